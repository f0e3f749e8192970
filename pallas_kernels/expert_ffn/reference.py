"""Plain JAX: each needed expert is read once and applied to all rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.constants import NOT_RESIDENT

MIN_ROWS = 2
"""XLA sums a one-row product in another order than a product of two or more rows."""


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
    rows, hidden = x.shape
    if accumulate is None:
        accumulate = jnp.zeros((rows, hidden), jnp.float32)
    num_experts = slot_row.shape[0]
    padding = max(MIN_ROWS - rows, 0)
    x = jnp.pad(x.astype(compute_dtype), ((0, padding), (0, 0)))
    experts = jnp.pad(experts, ((0, padding), (0, 0)), constant_values=num_experts)
    weights = jnp.pad(weights.astype(jnp.float32), ((0, padding), (0, 0)))
    accumulate = jnp.pad(accumulate, ((0, padding), (0, 0)))

    ids = jnp.arange(num_experts, dtype=experts.dtype)
    used = (experts[..., None] == ids).any((0, 1)) & (slot_row != NOT_RESIDENT)
    # Needed ids first, ascending; the loop runs over those only.
    order = jnp.argsort(~used, stable=True).astype(jnp.int32)

    def add_expert(i: jax.Array, total: jax.Array) -> jax.Array:
        expert = order[i]
        packed = lax.dynamic_index_in_dim(slots, slot_row[expert], keepdims=False)
        output = gated_ffn(x, packed, compute_dtype)
        chosen = experts == expert
        weight = jnp.where(chosen, weights, 0.0).sum(-1, keepdims=True)
        return jnp.where(chosen.any(-1, keepdims=True), total + weight * output, total)

    total = lax.fori_loop(0, used.sum(dtype=jnp.int32), add_expert, accumulate)
    return total[:rows]


def gated_ffn(
    x: jax.Array, packed: jax.Array, compute_dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """One expert's `down(silu(gate(x)) * up(x))`.

    x: [rows, hidden]. packed: [3 * inner * hidden]. Returns float32 [rows, hidden].
    """
    hidden = x.shape[1]
    inner = packed.shape[0] // (3 * hidden)
    gate_up = packed[: 2 * inner * hidden].reshape(2 * inner, hidden)
    down = packed[2 * inner * hidden :].reshape(hidden, inner)
    both = _product(x.astype(compute_dtype), gate_up.astype(compute_dtype))
    gate, up = both[:, :inner], both[:, inner:]
    active = (jax.nn.silu(gate) * up).astype(compute_dtype)
    return _product(active, down.astype(compute_dtype))


def _product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """[rows, in] x [out, in] -> float32 [rows, out]; float32 inputs are not rounded."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x,
        weight,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
