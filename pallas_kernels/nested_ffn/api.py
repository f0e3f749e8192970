"""Nested expert FFN: one signature, and the choice of who computes it."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.choice import Implementation, takes_kernels
from pallas_kernels.expert_ffn.config import rows_of_blocks, unsupported_reason
from pallas_kernels.expert_ffn.grouping import Grouping, count_misses
from pallas_kernels.nested_ffn import pallas_triton, reference
from pallas_kernels.nested_ffn.config import config_for


def nested_ffn(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    slots: jax.Array,
    slot_row: jax.Array,
    draft: Mapping[str, jax.Array],
    accumulate: jax.Array | None = None,
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    implementation: Implementation | None = None,
    with_misses: bool = False,
    groups: Grouping | None = None,
    summed: bool = True,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Weighted sum of each row's chosen experts; arrays as in `reference.nested_ffn`.

    implementation: None takes the kernels on an NVIDIA GPU where they support the sizes, and the
    reference otherwise. with_misses: also return the number of distinct experts that are chosen
    and not resident, an int32 scalar. groups: those of `experts` in blocks of `block_rows`, for the
    kernels, if known. summed: false for the outputs of a row's choices, float32 [rows, k, hidden]
    in order of expert id, where the kernels run and there is nothing to accumulate to.

    Raises:
        NotImplementedError: `implementation="pallas"` cannot run this; the text says why.
        ValueError: unknown implementation.
    """
    arguments = (x, experts, weights, slots, slot_row, draft, accumulate, compute_dtype)
    hidden = x.shape[1]
    inner = draft["gate_up_codes"].shape[1] // 2
    dtype_name = jnp.dtype(compute_dtype).name
    sizes = (hidden, inner, dtype_name, tuning.device_kind())
    counts = dict(num_choices=experts.size, num_experts=slot_row.shape[0])
    reason = unsupported_reason(hidden, inner, dtype_name)
    if not takes_kernels("nested_ffn", implementation, reason):
        total = reference.nested_ffn(*arguments)
        return (total, count_misses(experts, slot_row)) if with_misses else total
    config = config_for(*sizes, **counts)
    return pallas_triton.nested_ffn(
        *arguments, config=config, with_misses=with_misses, groups=groups, summed=summed
    )


block_rows = functools.partial(rows_of_blocks, config_for)
"""`expert_ffn.config.rows_of_blocks` with these kernels' block shapes."""
