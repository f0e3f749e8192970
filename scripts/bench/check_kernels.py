"""Checks the kernels on this GPU at real shapes against the references: `gpu` tests in brief.

    PYTHONPATH=. python scripts/bench/check_kernels.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import kernel_cases as cases

from pallas_kernels.constants import NOT_RESIDENT
from pallas_kernels.draft_experts import reference as draft_reference
from pallas_kernels.draft_experts.config import DraftExpertsConfig
from pallas_kernels.draft_experts.pallas_triton import draft_experts
from pallas_kernels.expert_ffn import reference as ffn_reference
from pallas_kernels.expert_ffn.config import ExpertFFNConfig
from pallas_kernels.expert_ffn.pallas_triton import expert_ffn


def error(value: jax.Array, expected: jax.Array) -> float:
    return float(jnp.linalg.norm(value - expected) / jnp.linalg.norm(expected))


def check_draft(shape: cases.Shape) -> None:
    layer = cases.random_draft_layer(shape)
    run = jax.jit(lambda x, e, w, layer: draft_experts(x, e, w, layer, config=DraftExpertsConfig()))
    reference = jax.jit(draft_reference.draft_experts)
    for rows in (1, 3):
        experts, weights = cases.random_choices(shape, rows, seed=rows)
        if rows == 3:
            experts = experts.at[1, 0].set(shape.num_experts)
        x = jax.random.normal(jax.random.key(rows), (rows, shape.hidden), jnp.bfloat16)
        first = run(x, experts, weights, layer)
        again = run(x, experts, weights, layer)
        off = error(first, reference(x, experts, weights, layer))
        print(f"draft {shape.name} rows {rows}: error {off:.2e}, repeats {bool((first == again).all())}")


def check_ffn(shape: cases.Shape, num_slots: int) -> None:
    slots = jax.jit(cases.random_slots, static_argnums=(0, 1))(shape, num_slots)
    order = jax.random.permutation(jax.random.key(5), num_slots)[: shape.num_experts]
    slot_row = order.astype(jnp.int32).at[3].set(NOT_RESIDENT)
    x = jax.random.normal(jax.random.key(6), (544, shape.hidden), jnp.bfloat16)
    experts, weights = cases.random_choices(shape, 544)
    experts = experts.at[5].set(shape.num_experts)

    def run(rows, config=ExpertFFNConfig()):
        call = jax.jit(
            lambda x, e, w, s, r: expert_ffn(x, e, w, s, r, compute_dtype=jnp.bfloat16, config=config)
        )
        return call(x[:rows], experts[:rows], weights[:rows], slots, slot_row)

    reference = jax.jit(
        lambda x, e, w, s, r: ffn_reference.expert_ffn(x, e, w, s, r, compute_dtype=jnp.bfloat16)
    )
    all_rows = run(544)
    again = run(544)
    off = error(all_rows, reference(x, experts, weights, slots, slot_row))
    same = {rows: bool((run(rows) == all_rows[:rows]).all()) for rows in (1, 2, 9, 17)}
    wide = {
        size: bool((run(544, ExpertFFNConfig(block_rows=size)) == all_rows).all())
        for size in (32, 64)
    }
    print(
        f"ffn {shape.name} slots {slots.shape}: error {off:.2e}, "
        f"repeats {bool((all_rows == again).all())}, same bits as 544 rows {same}, "
        f"same bits with row blocks {wide}, masked row zero {not bool(all_rows[5].any())}"
    )


if __name__ == "__main__":
    print(jax.devices()[0].device_kind, jax.__version__)
    for shape in cases.SHAPES:
        check_draft(shape)
    # More than 2**31 elements and 2**32 bytes: offsets need 64 bits.
    check_ffn(cases.SHAPES[0], 300)
