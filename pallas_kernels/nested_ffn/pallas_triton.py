"""Triton kernels: weight tiles are rebuilt from nested words and the draft as they are used.

The same two kernels as in `expert_ffn`, over the same blocks of choices, with two differences.
Weight tiles are decoded in registers (`arithmetic.py`), where the matrix unit takes them from. And
escapes, which decode to something else, are corrected beside: for each escape of a weight row, the
input it meets times the error of its weight is added to the row's sum in float32. Every step of
the loop over inputs corrects a few escapes, about those whose surroundings it decodes, so that
what they need is in the cache. Which escapes a step corrects depends on the weights alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.expert_ffn.grouping import group_choices
from pallas_kernels.nested import NestedLayout
from pallas_kernels.nested_ffn.arithmetic import (
    WORD_INPUTS,
    arrange,
    arranged_place,
    base_tables,
    decode_words,
    escape_error,
    fma,
    least_base,
    side_by_side,
    tile_of,
)
from pallas_kernels.nested_ffn.config import ROW_STEP, NestedFFNConfig


def _index(shape, axis):
    return lax.broadcasted_iota(jnp.int32, shape, axis)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Matrix:
    """One expert's weight matrix, gate and up being one: refs of the arrays it is in, and where.

    slots: [num_slots, W]. codes: [E, rows, in / 8]. scales: [E, rows, groups]. row_offset: rows of
    the expert before those of `codes`; word_offset: words of remainders before them.
    """

    slots: jax.Ref
    codes: jax.Ref
    scales: jax.Ref
    slot: jax.Array
    expert: jax.Array
    row_offset: int
    word_offset: int
    layout: NestedLayout
    config: NestedFFNConfig
    dtype: jax.typing.DTypeLike
    interpret: bool

    @property
    def num_in(self) -> int:
        return self.codes.shape[2] * WORD_INPUTS

    @property
    def group(self) -> int:
        return self.num_in // self.scales.shape[2]

    def scales_at(self, first, step):
        """Scales of a step's inputs: [block_out, 1] where one group has them all, or per word."""
        words = self.config.block_in // WORD_INPUTS
        one = self.group % self.config.block_in == 0
        shape = (self.config.block_out, 1 if one else words)
        inputs = step * self.config.block_in + WORD_INPUTS * _index(shape, 1)
        return plgpu.load(
            self.scales.at[self.expert, first + _index(shape, 0), inputs // self.group]
        )

    def tile(self, first, step, scales):
        """Decoded weights `[block_out, block_in]` of a step, escapes wrong."""
        shape = (self.config.block_out, self.config.block_in // WORD_INPUTS)
        row, word = first + _index(shape, 0), step * shape[1] + _index(shape, 1)
        codes = plgpu.load(self.codes.at[self.expert, row, word])
        wide = (shape[0], 2 * shape[1])
        row, word = first + _index(wide, 0), step * wide[1] + _index(wide, 1)
        place = self.word_offset + row * (self.num_in // 4) + word
        remainders = plgpu.load(self.slots.at[self.slot, place]).reshape(*shape, 2)
        low, high = (half.reshape(shape) for half in jnp.split(remainders, 2, axis=2))
        tables = base_tables(scales, self.interpret)
        return tile_of(decode_words(codes, low, high, tables, self.interpret))

    def escape_range(self, rows):
        """First escape of each of the rows and the one after its last, int32 like `rows`."""
        place = self.layout.row_starts + self.row_offset + rows
        return tuple(plgpu.load(self.slots.at[self.slot, place + end]) for end in (0, 1))

    def list_words(self, numbers, used):
        """Words of the lists that hold the positions and the high bits of escapes `numbers`."""
        starts = ((self.layout.positions, 1), (self.layout.highs, 2))
        return tuple(
            plgpu.load(self.slots.at[self.slot, start + (numbers >> shift)], mask=used, other=0)
            for start, shift in starts
        )

    def escapes(self, rows, numbers, used, list_words, inputs, block, num_used):
        """What it takes to correct one escape of each row: loads, to be given to `correct`."""
        position = (list_words[0] >> ((numbers & 1) * 16)) & 0xFFFF
        high = (list_words[1] >> ((numbers & 3) * 8)) & 0xFF
        code = plgpu.load(self.codes.at[self.expert, rows, position >> 3], mask=used, other=0)
        place = self.word_offset + rows * (self.num_in // 4) + (position >> 2)
        remainders = plgpu.load(self.slots.at[self.slot, place], mask=used, other=0)
        group = position // self.group
        scale = plgpu.load(self.scales.at[self.expert, rows, group], mask=used, other=0.0)
        shape = (*rows.shape, ROW_STEP)
        where = jnp.broadcast_to(position[:, None], shape)
        met = [
            plgpu.load(
                inputs.at[block, where, first + _index(shape, 1)],
                mask=jnp.broadcast_to((used & (first < num_used))[:, None], shape),
                other=0.0,
            )
            for first in range(0, self.config.block_rows, ROW_STEP)
        ]
        return used, (code, remainders, high, position), scale, met

    def correct(self, totals, escapes):
        """Adds the errors of escapes times the inputs they meet: [rows, ROW_STEP] each."""
        used, parts, scale, met = escapes
        error = escape_error(*parts, least_base(scale, self.interpret), self.dtype)
        error = jnp.where(used, error, 0.0)
        return tuple(
            fma(
                jnp.broadcast_to(error[:, None], x.shape),
                x.astype(jnp.float32),
                total,
                self.interpret,
            )
            for total, x in zip(totals, met, strict=True)
        )


def _products(matrix, firsts, load_inputs, inputs, block, num_used) -> list[jax.Array]:
    """Weight rows `first .. first + block_out - 1` times the block's inputs, for both firsts.

    load_inputs: step -> [block_rows, block_in], arranged. inputs: ref [blocks, in, block_rows].
    num_used: how many rows of the block are in use. Returns float32 [block_out, block_rows] each.
    """
    config, dtype, block_out = matrix.config, matrix.dtype, matrix.config.block_out
    steps = matrix.num_in // config.block_in
    # One row after the other, a thread each: an escape's sum never leaves its thread.
    number = _index((2 * block_out,), 0)
    rows = number + jnp.where(number < block_out, firsts[0], firsts[1] - block_out)
    start, end = matrix.escape_range(rows)
    most = jnp.max(end - start)
    in_loop = jnp.minimum(most, steps * config.escapes)

    def chosen(first, last):
        """Escapes first..last - 1 of each row, at most `escapes`: numbers, and which exist."""
        for place in range(config.escapes):
            numbers = start + first + place
            yield numbers, (first + place < last) & (numbers < end)

    def of_step(step):
        return list(chosen(step * in_loop // steps, (step + 1) * in_loop // steps))

    def fetch(some, words):
        return [
            matrix.escapes(rows, *one, of_one, inputs, block, num_used)
            for one, of_one in zip(some, words, strict=True)
        ]

    def step(i, carry):
        totals, fixes, words = carry
        x = load_inputs(i)
        scales = [matrix.scales_at(first, i) for first in firsts]
        next_words = tuple(matrix.list_words(*one) for one in of_step(i + 1))
        totals = tuple(
            total
            + lax.dot_general(
                matrix.tile(first, i, scale).astype(dtype),
                x,
                (((1,), (1,)), ((), ())),
                precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
                preferred_element_type=jnp.float32,
            )
            for first, total, scale in zip(firsts, totals, scales, strict=True)
        )
        for one in fetch(of_step(i), words):
            fixes = matrix.correct(fixes, one)
        return totals, fixes, next_words

    def leftover(i, fixes):
        first = in_loop + i * config.escapes
        some = list(chosen(first, first + config.escapes))
        for one in fetch(some, [matrix.list_words(*one) for one in some]):
            fixes = matrix.correct(fixes, one)
        return fixes

    zeros = jnp.zeros((block_out, config.block_rows), jnp.float32)
    none = jnp.zeros((*rows.shape, ROW_STEP), jnp.float32)
    carry = (
        (zeros, zeros),
        (none,) * (config.block_rows // ROW_STEP),
        tuple(matrix.list_words(*one) for one in of_step(0)),
    )
    totals, fixes, *_ = lax.fori_loop(0, steps, step, carry)
    chunks = (most - in_loop + config.escapes - 1) // config.escapes
    fixes = side_by_side(list(lax.fori_loop(0, chunks, leftover, fixes)))
    return [total + fix for total, fix in zip(totals, jnp.split(fixes, 2), strict=True)]


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
    """x_ref: [rows, hidden], arranged. inputs_ref: [blocks, hidden, block_rows].

    Out: active_ref [blocks, block_rows, inner], arranged, and active_inputs_ref
    [blocks, inner, block_rows].
    """
    tile, block = pl.program_id(0), pl.program_id(1)
    expert = block_expert_ref[block]

    @pl.when(expert < slot_row_ref.shape[0])
    def _():
        inner = active_ref.shape[2]
        choices = block_choices_ref[block, :]
        used = choices < num_choices
        num_used = jnp.sum(used.astype(jnp.int32))
        rows = jnp.where(used, choices // top_k, 0)
        column = _index((config.block_rows, config.block_in), 1)
        row_index = jnp.broadcast_to(rows[:, None], column.shape)
        mask = jnp.broadcast_to(used[:, None], column.shape)

        def load_inputs(step):
            return plgpu.load(
                x_ref.at[row_index, step * config.block_in + column], mask=mask, other=0.0
            )

        first = tile * config.block_out
        matrix = _Matrix(
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
        gate, up = _products(
            matrix, (first, first + inner), load_inputs, inputs_ref, block, num_used
        )
        active = (gate / (1 + jnp.exp(-gate)) * up).astype(x_ref.dtype)
        plgpu.store(active_inputs_ref.at[block, pl.ds(first, config.block_out), :], active)
        shape = (config.block_rows, config.block_out)
        place = arranged_place(first + _index(shape, 1), config.block_in)
        plgpu.store(active_ref.at[block, _index(shape, 0), place], active.T)


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
        choices = jnp.minimum(choices, num_choices - 1)

        def load_inputs(step):
            return plgpu.load(
                active_ref.at[block, :, pl.ds(step * config.block_in, config.block_in)]
            )

        matrix = _Matrix(
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
        totals = _products(matrix, firsts, load_inputs, inputs_ref, block, num_used)
        scale = plgpu.load(weights_ref.at[choices])[None]
        places = choices // top_k * top_k + plgpu.load(rank_ref.at[choices])
        # Empty places point at the row past the last, so that no two places are the same.
        places = jnp.where(used, places, num_choices)
        shape = (config.block_rows, config.block_out)
        place = jnp.broadcast_to(places[:, None], shape)
        mask = jnp.broadcast_to(used[:, None], shape)
        for first, total in zip(firsts, totals, strict=True):
            column = first + _index(shape, 1)
            plgpu.store(out_ref.at[place, column], (total * scale).T, mask=mask)


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
) -> jax.Array:
    """Weighted sum of each row's chosen experts; arguments as in `reference.nested_ffn`.

    interpret: run the kernels' arithmetic on any device, slowly. Returns float32 [rows, hidden].
    """
    num_rows, hidden = x.shape
    top_k = experts.shape[1]
    inner = draft["down_codes"].shape[2] * WORD_INPUTS
    layout = NestedLayout.from_words(hidden, inner, slots.shape[1])
    num_choices = num_rows * top_k
    x = x.astype(compute_dtype)
    experts = experts.astype(jnp.int32)
    groups = group_choices(experts, slot_row, config.block_rows)
    num_blocks = groups.block_expert.shape[0]
    blocks = (groups.block_expert, groups.block_choices, slot_row.astype(jnp.int32))
    common = dict(
        num_choices=num_choices, top_k=top_k, config=config, layout=layout, interpret=interpret
    )
    params = plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages)
    # Each block's inputs, rows side by side: an escape meets one input of every row.
    inputs = x.at[groups.block_choices // top_k].get(mode="fill", fill_value=0).swapaxes(1, 2)
    active_shape = (num_blocks, config.block_rows, inner)
    active, active_inputs = pl.pallas_call(
        functools.partial(_gate_up_kernel, **common),
        grid=(inner // config.block_out, num_blocks),
        out_shape=[
            jax.ShapeDtypeStruct(active_shape, compute_dtype),
            jax.ShapeDtypeStruct((num_blocks, inner, config.block_rows), compute_dtype),
        ],
        compiler_params=params,
        interpret=interpret,
        name="nested_gate_up",
    )(
        *blocks,
        arrange(x, config.block_in),
        inputs,
        slots,
        draft["gate_up_codes"],
        draft["gate_up_scales"],
    )
    outputs = pl.pallas_call(
        functools.partial(_down_kernel, **common),
        grid=(hidden // (2 * config.block_out), num_blocks),
        out_shape=jax.ShapeDtypeStruct((num_choices + 1, hidden), jnp.float32),
        compiler_params=params,
        interpret=interpret,
        name="nested_down",
    )(
        *blocks,
        weights.astype(jnp.float32).reshape(-1),
        groups.rank.reshape(-1),
        active,
        active_inputs,
        slots,
        draft["down_codes"],
        draft["down_scales"],
    )
    # Places of choices that were left out were never written.
    written = groups.valid[:, None] & (groups.rank[:, None] == jnp.arange(top_k)[:, None])
    written = written.any(-1)
    outputs = outputs[:num_choices].reshape(num_rows, top_k, hidden)
    total = jnp.zeros((num_rows, hidden), jnp.float32) if accumulate is None else accumulate
    for place in range(top_k):
        total = jnp.where(written[:, place, None], total + outputs[:, place], total)
    return total
