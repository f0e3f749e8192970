"""Triton kernels: each needed expert is read from its slot and applied to blocks of its rows.

`gate_up` computes `silu(gate) * up` for (block of choices, tile of inner), `down` the weighted
outputs for (block, tile of hidden), written to the choice's own place; a last sum adds a row's
choices in order of expert id. Products are `[out, in] x [in, rows]`, so that weights fill the
matrix unit's long side and the number of rows changes neither the instruction nor the order of
summation. Blocks beyond the needed ones return at once. Row blocks of one expert follow each
other, so its weights come from memory once and from the L2 cache after that.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.expert_ffn.config import ExpertFFNConfig
from pallas_kernels.expert_ffn.grouping import Grouping
from pallas_kernels.expert_ffn.triton_grouping import group_choices


def _dot(weight, x, compute_dtype):
    """[out, in] x [rows, in] -> float32 [out, rows]."""
    exact = jnp.dtype(compute_dtype) == jnp.float32
    return lax.dot_general(
        weight.astype(compute_dtype),
        x,
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def _gate_up_kernel(
    block_expert_ref,
    block_choices_ref,
    slot_row_ref,
    x_ref,
    slots_ref,
    active_ref,
    *,
    num_choices,
    top_k,
    config,
):
    """x_ref: [rows, hidden]. slots_ref: [num_slots, 3 * inner, hidden]. active_ref: out."""
    tile, block = pl.program_id(0), pl.program_id(1)
    num_experts = slot_row_ref.shape[0]
    expert = block_expert_ref[block]

    @pl.when(expert < num_experts)
    def _():
        slot = slot_row_ref[expert]
        inner = active_ref.shape[2]
        first = tile * config.block_out
        choices = block_choices_ref[block, :]
        used = choices < num_choices
        rows = jnp.where(used, choices // top_k, 0)
        out_dim, in_dim = config.block_out, config.block_in
        column = lax.broadcasted_iota(jnp.int32, (config.block_rows, in_dim), 1)
        row_index = jnp.broadcast_to(rows[:, None], column.shape)

        def step(i, sums):
            start = i * in_dim
            x = plgpu.load(
                x_ref.at[row_index, start + column],
                mask=jnp.broadcast_to(used[:, None], column.shape),
                other=0.0,
            )
            return tuple(
                total
                + _dot(
                    plgpu.load(
                        slots_ref.at[
                            slot, pl.ds(first + side * inner, out_dim), pl.ds(start, in_dim)
                        ]
                    ),
                    x,
                    x_ref.dtype,
                )
                for side, total in enumerate(sums)
            )

        zeros = jnp.zeros((out_dim, config.block_rows), jnp.float32)
        gate, up = lax.fori_loop(0, x_ref.shape[1] // in_dim, step, (zeros, zeros))
        active = gate / (1 + jnp.exp(-gate)) * up
        plgpu.store(active_ref.at[block, :, pl.ds(first, out_dim)], active.T.astype(x_ref.dtype))


def _down_kernel(
    block_expert_ref,
    block_choices_ref,
    slot_row_ref,
    weights_ref,
    rank_ref,
    active_ref,
    slots_ref,
    out_ref,
    *,
    num_choices,
    top_k,
    config,
):
    """slots_ref: [num_slots, 3 * hidden, inner]. out_ref: float32 [rows * k, hidden]."""
    tile, block = pl.program_id(0), pl.program_id(1)
    num_experts = slot_row_ref.shape[0]
    expert = block_expert_ref[block]

    @pl.when(expert < num_experts)
    def _():
        slot = slot_row_ref[expert]
        hidden, inner = out_ref.shape[1], active_ref.shape[2]
        first = tile * config.block_out
        choices = block_choices_ref[block, :]
        out_dim, in_dim = config.block_out, config.block_in

        def step(i, total):
            start = i * in_dim
            weight = plgpu.load(
                slots_ref.at[slot, pl.ds(2 * hidden + first, out_dim), pl.ds(start, in_dim)]
            )
            active = plgpu.load(active_ref.at[block, :, pl.ds(start, in_dim)])
            return total + _dot(weight, active, active_ref.dtype)

        zeros = jnp.zeros((out_dim, config.block_rows), jnp.float32)
        total = lax.fori_loop(0, inner // in_dim, step, zeros)
        weighted = total * plgpu.load(weights_ref.at[jnp.minimum(choices, num_choices - 1)])[None]
        store_choices(out_ref, rank_ref, choices, first, weighted.T, top_k)

    @pl.when(expert >= num_experts)
    def _():
        nothing = jnp.zeros((config.block_rows, config.block_out), jnp.float32)
        store_choices(
            out_ref, rank_ref, block_choices_ref[block, :], tile * config.block_out, nothing, top_k
        )


def outputs_shape(num_choices: int, hidden: int, interpret: bool) -> jax.ShapeDtypeStruct:
    """What the down kernels leave: each choice's output at its row's place for its rank.

    Interpreted stores also write where they are masked, to one row more.
    """
    return jax.ShapeDtypeStruct((num_choices + interpret, hidden), jnp.float32)


def store_choices(out_ref, rank_ref, choices, first, values, top_k):
    """Writes values [block_rows, columns] of a block's choices from column `first` on.

    out_ref: see `outputs_shape`. choices: [block_rows], of which those past the last are empty.
    """
    num_choices = rank_ref.shape[0]
    used = choices < num_choices
    last = jnp.minimum(choices, num_choices - 1)
    place = jnp.where(used, last // top_k * top_k + plgpu.load(rank_ref.at[last]), num_choices)
    plgpu.store(
        out_ref.at[
            jnp.broadcast_to(place[:, None], values.shape),
            first + lax.broadcasted_iota(jnp.int32, values.shape, 1),
        ],
        values,
        mask=jnp.broadcast_to(used[:, None], values.shape),
    )


def sum_choices(outputs: jax.Array, accumulate: jax.Array | None = None) -> jax.Array:
    """Adds a row's choices in order: float32 [..., k, hidden] -> [..., hidden].

    accumulate: float32 [..., hidden] to start from, or None.
    """
    total = jnp.zeros_like(outputs[..., 0, :]) if accumulate is None else accumulate
    for place in range(outputs.shape[-2]):
        total += outputs[..., place, :]
    return total


def expert_ffn(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    slots: jax.Array,
    slot_row: jax.Array,
    accumulate: jax.Array | None = None,
    compute_dtype: jax.typing.DTypeLike = jnp.float32,
    *,
    config: ExpertFFNConfig,
    interpret: bool = False,
    with_misses: bool = False,
    groups: Grouping | None = None,
    summed: bool = True,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Weighted sum of each row's chosen experts; arguments as in `reference.expert_ffn`.

    interpret: run the kernels' arithmetic on any device, slowly. with_misses: also return the
    number of distinct experts that are chosen and not resident, int32. groups: those of `experts`
    in blocks of `config.block_rows`, if known. Returns float32 [rows, hidden], or [rows, k, hidden]
    where it is not to be summed.
    """
    num_rows, hidden = x.shape
    top_k = experts.shape[1]
    num_slots, expert_elements = slots.shape
    inner = expert_elements // (3 * hidden)
    num_choices = num_rows * top_k
    x = x.astype(compute_dtype)
    experts = experts.astype(jnp.int32)
    if groups is None:
        groups = group_choices(experts, slot_row, config.block_rows, interpret=interpret)
    num_blocks = groups.block_expert.shape[0]
    blocks = (groups.block_expert, groups.block_choices, slot_row.astype(jnp.int32))
    common = dict(num_choices=num_choices, top_k=top_k, config=config)
    params = plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)
    active = pl.pallas_call(
        functools.partial(_gate_up_kernel, **common),
        grid=(inner // config.block_out, num_blocks),
        out_shape=jax.ShapeDtypeStruct((num_blocks, config.block_rows, inner), compute_dtype),
        compiler_params=params,
        interpret=interpret,
        name="expert_gate_up",
    )(*blocks, x, slots.reshape(num_slots, 3 * inner, hidden))
    outputs = pl.pallas_call(
        functools.partial(_down_kernel, **common),
        grid=(hidden // config.block_out, num_blocks),
        out_shape=outputs_shape(num_choices, hidden, interpret),
        compiler_params=params,
        interpret=interpret,
        name="expert_down",
    )(
        *blocks,
        weights.astype(jnp.float32).reshape(-1),
        groups.rank,
        active,
        slots.reshape(num_slots, 3 * hidden, inner),
    )
    outputs = outputs[:num_choices].reshape(num_rows, top_k, hidden)
    total = sum_choices(outputs, accumulate) if summed else outputs
    return (total, groups.misses) if with_misses else total
