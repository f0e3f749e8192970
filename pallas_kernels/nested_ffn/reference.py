"""Plain JAX: each needed expert is decoded, then applied as `expert_ffn` does."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert_ffn.reference import sum_experts
from pallas_kernels.nested.codec import decode


def nested_ffn(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    slots: jax.Array,
    slot_row: jax.Array,
    draft: Mapping[str, jax.Array],
    accumulate: jax.Array | None = None,
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """`expert_ffn` of the experts that nested words and the draft stand for, to the same bits.

    x: [rows, hidden]. experts: int32 [rows, k], an id of num_experts or more selects nothing.
    weights: float32 [rows, k]. slots: int32 [num_slots, words], each row as of
    `pallas_kernels.nested.NestedLayout`. slot_row: int32 [num_experts], the slot of each expert or
    `NOT_RESIDENT`. draft: the layer's draft experts: gate_up_codes int32
    [num_experts, 2 * inner, hidden / 8], gate_up_scales bf16 [num_experts, 2 * inner, hidden / g1],
    down_codes int32 [num_experts, hidden, inner / 8], down_scales bf16
    [num_experts, hidden, inner / g2]. accumulate: float32 [rows, hidden] to add to, or None.
    compute_dtype: products take this type and accumulate in float32. Returns float32
    [rows, hidden].
    """

    def packed(expert: jax.Array) -> jax.Array:
        def of_expert(array: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(array, expert, keepdims=False)

        words = lax.dynamic_index_in_dim(slots, slot_row[expert], keepdims=False)
        decoded = decode(
            words,
            of_expert(draft["gate_up_codes"]),
            of_expert(draft["gate_up_scales"]),
            of_expert(draft["down_codes"]),
            of_expert(draft["down_scales"]),
        )
        # Fused into the products, decoding would be done once for every row.
        return lax.optimization_barrier(decoded)

    return sum_experts(x, experts, weights, packed, slot_row, accumulate, compute_dtype)
