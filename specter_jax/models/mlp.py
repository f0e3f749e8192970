"""Gated MLPs that every token takes: dense layers and shared experts."""

from __future__ import annotations

import flax.linen as nn
import jax

from specter_jax.models.linear import Linear


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    hidden: int
    inner: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., hidden] -> float32 [..., hidden]."""
        gate = Linear(self.hidden, self.inner, self.use_bias, name="gate_proj")(x)
        up = Linear(self.hidden, self.inner, self.use_bias, name="up_proj")(x)
        active = (jax.nn.silu(gate) * up).astype(x.dtype)
        return Linear(self.inner, self.hidden, self.use_bias, name="down_proj")(active)
