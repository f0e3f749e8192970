"""Matrix products with float32 accumulation on every backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def product_operands(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array, lax.Precision]:
    """Operands and precision for a product in x's dtype with a float32 result.

    y is cast to x's dtype. float32 is multiplied as float32, which GPUs would round to TF32
    otherwise. XLA's CPU backend lacks some bfloat16 products with float32 results, so there the
    operands are widened, which changes no product.
    """
    y = y.astype(x.dtype)
    if x.dtype == jnp.float32:
        return x, y, lax.Precision.HIGHEST
    if jax.default_backend() == "cpu":
        return x.astype(jnp.float32), y.astype(jnp.float32), lax.Precision.HIGHEST
    return x, y, lax.Precision.DEFAULT


def contract(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`x @ weight.T`: x [..., in], weight [out, in] -> float32 [..., out]."""
    x, weight, precision = product_operands(x, weight)
    return lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def einsum(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """`jnp.einsum` of two operands, in x's dtype with a float32 result."""
    x, y, precision = product_operands(x, y)
    return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32)
