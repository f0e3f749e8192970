"""Modules that hold weights stored `[out, in]`."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.products import contract


class Linear(nn.Module):
    """`weight` [out, in] and optionally `bias` [out]."""

    inputs: int
    outputs: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [..., in] -> float32 [..., out], not rounded to x's dtype yet."""
        shape = (self.outputs, self.inputs)
        y = contract(x, self.param("weight", nn.initializers.normal(0.02), shape))
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.outputs,))
            y = y + bias.astype(jnp.float32)
        return y


class Embedding(nn.Module):
    """Token embedding, `weight` [vocab, hidden]; also the head when the two are tied."""

    vocab: int
    hidden: int

    def setup(self) -> None:
        shape = (self.vocab, self.hidden)
        self.weight = self.param("weight", nn.initializers.normal(0.02), shape)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens: int32 [...] -> [..., hidden] in the weight's dtype."""
        return jnp.take(self.weight, tokens, axis=0, mode="clip")

    def attend(self, x: jax.Array) -> jax.Array:
        """x: [..., hidden] -> float32 logits [..., vocab]."""
        return contract(x, self.weight)
