"""Modules that hold weights stored `[out, in]`."""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.small_dense import Dense, Normalized, products


class Linear(nn.Module):
    """`weight` [out, in] and optionally `bias` [out]."""

    inputs: int
    outputs: int
    use_bias: bool = False

    def setup(self) -> None:
        shape = (self.outputs, self.inputs)
        self.weight = self.param("weight", nn.initializers.normal(0.02), shape)
        if self.use_bias:
            self.bias = self.param("bias", nn.initializers.zeros, (self.outputs,))

    def dense(
        self,
        dtype: jax.typing.DTypeLike = jnp.float32,
        scale: jax.Array | None = None,
        add: Sequence[jax.Array] = (),
        terms: jax.Array | None = None,
    ) -> Dense:
        """This product, for `products`, with what follows it: see `Dense`."""
        bias = self.bias if self.use_bias else None
        epilogue = dict(scale=scale, terms=terms, add=tuple(add))
        return Dense(weight=self.weight, bias=bias, dtype=dtype, **epilogue)

    def __call__(
        self, x: jax.Array | Normalized, add: Sequence[jax.Array] = (), dtype=jnp.float32
    ) -> jax.Array:
        """x: [..., in] -> `x @ weight.T + bias` plus each of `add` [..., out], summed in float32.

        dtype: of the result; float32 is not rounded to x's dtype yet.
        """
        return products(x, [self.dense(dtype, add=add)])[0]


def together(x: jax.Array | Normalized, layers: Sequence[Linear]) -> list[jax.Array]:
    """Several layers of the same input, read in one pass: [..., out] each, in x's dtype."""
    return products(x, [layer.dense(x.dtype) for layer in layers])


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

    def attend(self, x: jax.Array | Normalized, bias: jax.Array | None = None) -> jax.Array:
        """x: [..., hidden] -> float32 logits [..., vocab]. bias: [vocab]."""
        return products(x, [Dense(weight=self.weight, bias=bias)])[0]
