"""Plain JAX: the norms, products and epilogues that the kernels compute."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.products import contract
from pallas_kernels.small_dense.operands import Dense, Norm


def normalize(x: jax.Array, norm: Norm) -> jax.Array:
    """x: [..., in] -> the same shape and dtype, computed in float32."""
    weight = norm.weight.astype(jnp.float32)
    y = x.astype(jnp.float32)
    if norm.bias is None:
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + norm.eps)
        return (y * weight).astype(x.dtype)
    bias = norm.bias.astype(jnp.float32)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + norm.eps)
    return (y * weight + bias).astype(x.dtype)


def products(x: jax.Array, parts: Sequence[Dense]) -> list[jax.Array]:
    """Every part's product of x, [..., in] -> [..., out] each; see `Dense`."""
    return [_product(x, part) for part in parts]


def _product(x: jax.Array, part: Dense) -> jax.Array:
    x = x.astype(part.compute_dtype(x.dtype))
    y = _side(x, part.weight, part.bias)
    if part.up is not None:
        y = jax.nn.silu(y) * _side(x, part.up, part.up_bias)
    if part.scale is not None:
        y = jax.nn.sigmoid(part.scale) * y
    if part.terms is not None:
        total = 0.0
        for number in range(part.terms.shape[-2]):
            total = total + part.terms[..., number, :].astype(jnp.float32)
        y = total + y
    for term in part.add:
        y = term.astype(jnp.float32) + y
    return y.astype(part.dtype)


def _side(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    y = contract(x, weight)
    return y if bias is None else y + bias.astype(jnp.float32)
