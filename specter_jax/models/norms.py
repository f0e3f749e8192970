"""Normalization over the last axis, computed in float32."""

from __future__ import annotations

import flax.linen as nn
import jax

from pallas_kernels.small_dense import Norm, Normalized, normalize, normalized


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight`, weight [size] (Zhang and Sennrich, 1910.07467)."""

    size: int
    eps: float

    def setup(self) -> None:
        self.weight = self.param("weight", nn.initializers.ones, (self.size,))

    def norm(self) -> Norm:
        """Its parameters, for `pallas_kernels`."""
        return Norm(weight=self.weight, eps=self.eps)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., size] -> the same shape and dtype."""
        return normalize(x, self.norm())

    def deferred(self, x: jax.Array) -> jax.Array | Normalized:
        """The same for `products`, which may compute it on the way."""
        return normalized(x, self.norm())


class LayerNorm(RMSNorm):
    """Mean and variance normalization with weight and bias [size] (Ba et al., 1607.06450)."""

    def setup(self) -> None:
        super().setup()
        self.bias = self.param("bias", nn.initializers.zeros, (self.size,))

    def norm(self) -> Norm:
        """Its parameters, for `pallas_kernels`."""
        return Norm(weight=self.weight, bias=self.bias, eps=self.eps)


def make_norm(kind: str, size: int, eps: float) -> RMSNorm:
    """kind: "rms" or "layer"."""
    return {"rms": RMSNorm, "layer": LayerNorm}[kind](size, eps)
