"""Plain JAX: each needed expert is read once and applied to all rows."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.constants import NOT_RESIDENT
from pallas_kernels.products import contract

ROW_BLOCK = 8
"""Rows of one product. Fixed, because XLA's order of summation depends on the number of rows."""


def expert_ffn(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    slots: jax.Array,
    slot_row: jax.Array,
    accumulate: jax.Array | None = None,
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """Weighted sum of each row's chosen gated (silu) experts, added in order of expert id.

    A row's result does not depend on the other rows, nor on which slot holds an expert. Experts
    that are not resident contribute nothing.

    x: [rows, hidden]. experts: int32 [rows, k], an id of num_experts or more selects nothing.
    weights: float32 [rows, k]. slots: [num_slots, 3 * inner * hidden], each row gate
    [inner, hidden], up [inner, hidden], down [hidden, inner]. slot_row: int32 [num_experts], the
    slot of each expert or `NOT_RESIDENT`. accumulate: float32 [rows, hidden] to add to, or None.
    compute_dtype: products take this type and accumulate in float32. Returns float32
    [rows, hidden].
    """

    def packed(expert: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(slots, slot_row[expert], keepdims=False)

    return sum_experts(x, experts, weights, packed, slot_row, accumulate, compute_dtype)


def sum_experts(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    packed: Callable[[jax.Array], jax.Array],
    slot_row: jax.Array,
    accumulate: jax.Array | None,
    compute_dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """As `expert_ffn`; `packed(expert)` gives a resident expert's weights [3 * inner * hidden]."""
    rows, hidden = x.shape
    if accumulate is None:
        accumulate = jnp.zeros((rows, hidden), jnp.float32)
    num_experts = slot_row.shape[0]
    # At least two blocks: XLA would simplify the slicing of a single one and fuse differently.
    num_blocks = max(-(-rows // ROW_BLOCK), 2)
    padding = ((0, num_blocks * ROW_BLOCK - rows), (0, 0))
    x = jnp.pad(x.astype(compute_dtype), padding)
    experts = jnp.pad(experts, padding, constant_values=num_experts)
    weights = jnp.pad(weights.astype(jnp.float32), padding)
    accumulate = jnp.pad(accumulate, padding)

    ids = jnp.arange(num_experts, dtype=experts.dtype)
    resident = slot_row != NOT_RESIDENT
    order, num_used = _true_first((experts[..., None] == ids).any((0, 1)) & resident)

    def add_expert(i: jax.Array, total: jax.Array) -> jax.Array:
        expert = order[i]
        gate_up, down = _unpack(packed(expert).astype(compute_dtype), hidden)
        chosen = experts == expert
        weight = jnp.where(chosen, weights, 0.0).sum(-1, keepdims=True)
        row_chosen = chosen.any(-1, keepdims=True)
        blocks, num_needed = _true_first(row_chosen.reshape(-1, ROW_BLOCK).any(-1))

        def add_block(j: jax.Array, total: jax.Array) -> jax.Array:
            def rows_of(array: jax.Array) -> jax.Array:
                return lax.dynamic_slice_in_dim(array, blocks[j] * ROW_BLOCK, ROW_BLOCK)

            output = rows_of(weight) * _gated(rows_of(x), gate_up, down)
            old = rows_of(total)
            new = jnp.where(rows_of(row_chosen), old + output, old)
            return lax.dynamic_update_slice_in_dim(total, new, blocks[j] * ROW_BLOCK, 0)

        return lax.fori_loop(0, num_needed, add_block, total)

    return lax.fori_loop(0, num_used, add_expert, accumulate)[:rows]


def _true_first(flags: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Indices of a bool vector, those of true entries first and ascending; and their number."""
    return jnp.argsort(~flags, stable=True).astype(jnp.int32), flags.sum(dtype=jnp.int32)


def _unpack(packed: jax.Array, hidden: int) -> tuple[jax.Array, jax.Array]:
    """[3 * inner * hidden] -> gate_up [2 * inner, hidden] and down [hidden, inner]."""
    inner = packed.shape[0] // (3 * hidden)
    gate_up, down = jnp.split(packed, [2 * inner * hidden])
    return gate_up.reshape(2 * inner, hidden), down.reshape(hidden, inner)


def _gated(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> jax.Array:
    """`down(silu(gate(x)) * up(x))`: [rows, hidden] -> float32 [rows, hidden]."""
    gate, up = jnp.split(contract(x, gate_up), 2, axis=1)
    return contract((jax.nn.silu(gate) * up).astype(x.dtype), down)
