"""Normalization over the last axis, computed in float32."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight`, weight [size] (Zhang and Sennrich, 1910.07467)."""

    size: int
    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., size] -> the same shape and dtype."""
        weight = self.param("weight", nn.initializers.ones, (self.size,)).astype(jnp.float32)
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return (y * weight).astype(x.dtype)


class LayerNorm(nn.Module):
    """Mean and variance normalization with weight and bias [size] (Ba et al., 1607.06450)."""

    size: int
    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., size] -> the same shape and dtype."""
        weight = self.param("weight", nn.initializers.ones, (self.size,)).astype(jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.size,)).astype(jnp.float32)
        y = x.astype(jnp.float32)
        y = y - jnp.mean(y, -1, keepdims=True)
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return (y * weight + bias).astype(x.dtype)


def make_norm(kind: str, size: int, eps: float) -> nn.Module:
    """kind: "rms" or "layer"."""
    return {"rms": RMSNorm, "layer": LayerNorm}[kind](size, eps)
