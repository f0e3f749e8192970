"""Products with weights stored `[out, in]`, and the modules that hold such weights."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax


def contract(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight.T`, accumulated in float32.

    x: [..., in], float32 or bfloat16. weight: [out, in]; cast to x's dtype. float32 inputs are
    multiplied as float32 on every backend. Returns float32 [..., out].
    """
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(
        x,
        weight.astype(x.dtype),
        dims,
        precision=precision_for(x.dtype),
        preferred_element_type=jnp.float32,
    )


def precision_for(dtype: jax.typing.DTypeLike) -> lax.Precision:
    """HIGHEST for float32, whose products GPUs would round to TF32 otherwise."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


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
