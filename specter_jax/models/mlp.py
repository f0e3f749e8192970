"""Gated MLPs that every token takes: dense layers and shared experts."""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.small_dense import Dense, products
from specter_jax.models.linear import Linear


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    hidden: int
    inner: int
    use_bias: bool = False

    def setup(self) -> None:
        self.gate_proj = Linear(self.hidden, self.inner, self.use_bias)
        self.up_proj = Linear(self.hidden, self.inner, self.use_bias)
        self.down_proj = Linear(self.inner, self.hidden, self.use_bias)

    def gate_up(self, dtype: jax.typing.DTypeLike) -> Dense:
        """`silu(gate) * up` in `dtype`, for `products`."""
        gate, up = self.gate_proj.dense(), self.up_proj.dense()
        return Dense(weight=gate.weight, bias=gate.bias, up=up.weight, up_bias=up.bias, dtype=dtype)

    def down(
        self,
        active: jax.Array,
        scale: jax.Array | None = None,
        add: Sequence[jax.Array] = (),
        dtype: jax.typing.DTypeLike = jnp.float32,
        terms: jax.Array | None = None,
    ) -> jax.Array:
        """active: [..., inner] -> [..., hidden]; scale, add, dtype and terms: see `Dense`."""
        return products(active, [self.down_proj.dense(dtype, scale, add, terms)])[0]
