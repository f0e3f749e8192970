"""What a small dense product is made of: norm, weights, and what follows the sum."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


def _pytree(cls: type) -> type:
    """Registers a dataclass so that kernels can flatten it into a list of references."""
    names = [field.name for field in dataclasses.fields(cls)]
    static = [name for name in names if name in ("eps", "dtype", "widen")]
    data = [name for name in names if name not in static]
    return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=static)


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class Norm:
    """Normalization over the last axis: RMSNorm without a bias, LayerNorm with one.

    weight, bias: [in].
    """

    weight: jax.Array
    bias: jax.Array | None = None
    eps: float


@_pytree
@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense:
    """One product and its epilogue, in float32 and in this order.

    1. `x @ weight.T + bias`; with `up`, `silu` of that times `x @ up.T + up_bias`.
    2. Times `sigmoid(scale)`.
    3. `terms`, summed over k first, and each of `add` are added, then the result is rounded to
       `dtype`.

    weight, up: [out, in]. bias, up_bias: [out]. scale: [..., 1]. terms: [..., k, out]. add: arrays
    [..., out]. dtype: of the result. widen: where the weight's dtype is not x's, multiply both as
    float32 instead of rounding the weight to x's dtype.
    """

    weight: jax.Array
    bias: jax.Array | None = None
    up: jax.Array | None = None
    up_bias: jax.Array | None = None
    scale: jax.Array | None = None
    terms: jax.Array | None = None
    add: tuple[jax.Array, ...] = ()
    dtype: jax.typing.DTypeLike = jnp.float32
    widen: bool = False

    @property
    def outputs(self) -> int:
        """Outputs per row."""
        return self.weight.shape[0]

    def compute_dtype(self, x_dtype: jax.typing.DTypeLike) -> jnp.dtype:
        """What both operands of the product are cast to."""
        if self.widen and self.weight.dtype != x_dtype:
            return jnp.dtype(jnp.float32)
        return jnp.dtype(x_dtype)
