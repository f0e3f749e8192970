"""Triton kernels: weight tiles are rebuilt from nested words and the draft as they are used.

The same two kernels as in `expert_ffn`, over the same blocks of choices. Weight tiles are decoded
in registers (`arithmetic.py`), where the matrix unit takes them from; escapes are corrected beside
(`tiles.py`), for which a block's inputs also exist with its rows next to each other.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.expert_ffn.grouping import Grouping
from pallas_kernels.expert_ffn.pallas_triton import outputs_shape, store_choices, sum_choices
from pallas_kernels.expert_ffn.triton_grouping import group_choices
from pallas_kernels.nested import NestedLayout
from pallas_kernels.nested_ffn.arithmetic import WORD_INPUTS, arranged_place
from pallas_kernels.nested_ffn.config import NestedFFNConfig
from pallas_kernels.nested_ffn.tiles import Matrix, index, products
from pallas_kernels.nested_ffn.triton_inputs import arrange_inputs


def _gate_up_kernel(
    block_expert_ref,
    block_choices_ref,
    slot_row_ref,
    x_ref,
    inputs_ref,
    slots_ref,
    codes_ref,
    scales_ref,
    active_ref,
    active_inputs_ref,
    *,
    num_choices,
    top_k,
    config,
    **common,
):
    """x_ref: [rows, hidden], arranged. inputs_ref: [blocks, row steps, hidden, row_step].

    Out: active_ref [blocks, block_rows, inner], arranged, and active_inputs_ref
    [blocks, row steps, inner, row_step].
    """
    tile, block = pl.program_id(0), pl.program_id(1)
    expert = block_expert_ref[block]

    @pl.when(expert < slot_row_ref.shape[0])
    def _():
        inner = active_ref.shape[2]
        row = index((config.product_rows,), 0)
        inside = row < config.block_rows
        choices = plgpu.load(block_choices_ref.at[block, row], mask=inside, other=num_choices)
        used = choices < num_choices
        num_used = jnp.sum(used.astype(jnp.int32))
        rows = jnp.where(used, choices // top_k, 0)
        column = index((config.product_rows, config.block_in), 1)
        row_index = jnp.broadcast_to(rows[:, None], column.shape)
        mask = jnp.broadcast_to(used[:, None], column.shape)

        def load_inputs(step):
            return plgpu.load(
                x_ref.at[row_index, step * config.block_in + column],
                mask=mask,
                other=0.0,
            )

        first = tile * config.block_out
        matrix = Matrix(
            slots=slots_ref,
            codes=codes_ref,
            scales=scales_ref,
            slot=slot_row_ref[expert],
            expert=expert,
            row_offset=0,
            word_offset=0,
            config=config,
            dtype=x_ref.dtype,
            **common,
        )
        gate, up = products(
            matrix, (first, first + inner), load_inputs, inputs_ref, block, num_used
        )
        active = (gate / (1 + jnp.exp(-gate)) * up).astype(x_ref.dtype)
        shape = (config.block_out, config.block_rows)
        row, row_step = index(shape, 1), config.row_step
        plgpu.store(
            active_inputs_ref.at[block, row // row_step, first + index(shape, 0), row % row_step],
            active,
        )
        shape = (config.block_rows, config.block_out)
        place = arranged_place(first + index(shape, 1), config.block_in)
        plgpu.store(active_ref.at[block, index(shape, 0), place], active.T)


def _down_kernel(
    block_expert_ref,
    block_choices_ref,
    slot_row_ref,
    weights_ref,
    rank_ref,
    active_ref,
    inputs_ref,
    slots_ref,
    codes_ref,
    scales_ref,
    out_ref,
    *,
    num_choices,
    top_k,
    config,
    layout,
    **common,
):
    """active_ref, inputs_ref: what the other kernel left. out_ref: float32 [rows * k, hidden]."""
    tile, block = pl.program_id(0), pl.program_id(1)
    expert = block_expert_ref[block]

    @pl.when(expert < slot_row_ref.shape[0])
    def _():
        first = tile * 2 * config.block_out
        choices = block_choices_ref[block, :]
        used = choices < num_choices
        num_used = jnp.sum(used.astype(jnp.int32))

        def load_inputs(step):
            shape = (config.product_rows, config.block_in)
            row = index(shape, 0)
            column = step * config.block_in + index(shape, 1)
            return plgpu.load(
                active_ref.at[block, row, column],
                mask=row < config.block_rows,
                other=0.0,
            )

        matrix = Matrix(
            slots=slots_ref,
            codes=codes_ref,
            scales=scales_ref,
            slot=slot_row_ref[expert],
            expert=expert,
            row_offset=2 * layout.inner,
            word_offset=2 * layout.inner * layout.hidden // 4,
            layout=layout,
            config=config,
            dtype=active_ref.dtype,
            **common,
        )
        firsts = (first, first + config.block_out)
        totals = products(matrix, firsts, load_inputs, inputs_ref, block, num_used)
        scale = plgpu.load(weights_ref.at[jnp.minimum(choices, num_choices - 1)])[None]
        for first, total in zip(firsts, totals, strict=True):
            store_choices(out_ref, rank_ref, choices, first, (total * scale).T, top_k)

    @pl.when(expert >= slot_row_ref.shape[0])
    def _():
        nothing = jnp.zeros((config.block_rows, 2 * config.block_out), jnp.float32)
        first = tile * 2 * config.block_out
        store_choices(out_ref, rank_ref, block_choices_ref[block, :], first, nothing, top_k)


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
    config: NestedFFNConfig,
    interpret: bool = False,
    with_misses: bool = False,
    groups: Grouping | None = None,
    summed: bool = True,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Weighted sum of each row's chosen experts; arguments as in `reference.nested_ffn`.

    interpret: run the kernels' arithmetic on any device, slowly. with_misses: also return the
    number of distinct experts that are chosen and not resident, int32. groups: those of `experts`
    in blocks of `config.block_rows`, if known. Returns float32 [rows, hidden], or [rows, k, hidden]
    where it is not to be summed.
    """
    num_rows, hidden = x.shape
    top_k = experts.shape[1]
    inner = draft["down_codes"].shape[2] * WORD_INPUTS
    layout = NestedLayout.from_words(hidden, inner, slots.shape[1])
    num_choices = num_rows * top_k
    x = x.astype(compute_dtype)
    experts = experts.astype(jnp.int32)
    if groups is None:
        groups = group_choices(experts, slot_row, config.block_rows, interpret=interpret)
    num_blocks = groups.block_expert.shape[0]
    blocks = (groups.block_expert, groups.block_choices, slot_row.astype(jnp.int32))
    common = dict(
        num_choices=num_choices,
        top_k=top_k,
        config=config,
        layout=layout,
        interpret=interpret,
    )
    params = plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)
    # Each block's inputs have its rows side by side: an escape meets one input of every row.
    row_steps = config.block_rows // config.row_step
    arranged, inputs = arrange_inputs(
        x, groups.block_choices, top_k, config.block_in, interpret=interpret
    )
    active_shape = (num_blocks, config.block_rows, inner)
    active, active_inputs = pl.pallas_call(
        functools.partial(_gate_up_kernel, **common),
        grid=(inner // config.block_out, num_blocks),
        out_shape=[
            jax.ShapeDtypeStruct(active_shape, compute_dtype),
            jax.ShapeDtypeStruct((num_blocks, row_steps, inner, config.row_step), compute_dtype),
        ],
        compiler_params=params,
        interpret=interpret,
        name="nested_gate_up",
    )(
        *blocks,
        arranged,
        inputs,
        slots,
        draft["gate_up_codes"],
        draft["gate_up_scales"],
    )
    outputs = pl.pallas_call(
        functools.partial(_down_kernel, **common),
        grid=(hidden // (2 * config.block_out), num_blocks),
        out_shape=outputs_shape(num_choices, hidden, interpret),
        compiler_params=params,
        interpret=interpret,
        name="nested_down",
    )(
        *blocks,
        weights.astype(jnp.float32).reshape(-1),
        groups.rank,
        active,
        active_inputs,
        slots,
        draft["down_codes"],
        draft["down_scales"],
    )
    outputs = outputs[:num_choices].reshape(num_rows, top_k, hidden)
    total = sum_choices(outputs, accumulate) if summed else outputs
    return (total, groups.misses) if with_misses else total
