"""Tiles of weight rows times a block of inputs, from nested words and the draft.

Escapes decode to something else and are corrected beside: for each escape of a weight row, the
inputs it meets times the error of its weight are added to the row's sums in float32. Every step of
the loop over inputs corrects a few, so that waiting for their lists and inputs overlaps with
decoding. Which escapes a step corrects depends on the weights alone.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.draft_experts.arithmetic import fma
from pallas_kernels.nested import NestedLayout
from pallas_kernels.nested_ffn.arithmetic import (
    WORD_INPUTS,
    base_tables,
    decode_words,
    escape_error,
    least_base,
    side_by_side,
    tile_of,
)
from pallas_kernels.nested_ffn.config import QUAD, NestedFFNConfig


def index(shape, axis):
    """Position along an axis, int32 `shape`."""
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def _columns(tile):
    """The columns of `[rows, 4]`: they lie in one thread."""
    halves = jnp.split(tile.reshape(tile.shape[0], 2, 2), 2, axis=2)
    even, odd = (jnp.split(half.reshape(-1, 2), 2, axis=1) for half in halves)
    return [column.reshape(-1) for column in (even[0], odd[0], even[1], odd[1])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrix:
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
        inputs = step * self.config.block_in + WORD_INPUTS * index(shape, 1)
        return plgpu.load(
            self.scales.at[self.expert, first + index(shape, 0), inputs // self.group]
        )

    def tile(self, first, step, scales):
        """Decoded weights `[block_out, block_in]` of a step, escapes wrong."""
        shape = (self.config.block_out, self.config.block_in // WORD_INPUTS)
        row, word = first + index(shape, 0), step * shape[1] + index(shape, 1)
        codes = plgpu.load(self.codes.at[self.expert, row, word])
        wide = (shape[0], 2 * shape[1])
        row, word = first + index(wide, 0), step * wide[1] + index(wide, 1)
        place = self.word_offset + row * (self.num_in // 4) + word
        remainders = plgpu.load(self.slots.at[self.slot, place]).reshape(*shape, 2)
        low, high = (half.reshape(shape) for half in jnp.split(remainders, 2, axis=2))
        tables = base_tables(scales, self.interpret)
        return tile_of(decode_words(codes, low, high, tables, self.interpret))

    def escape_range(self, rows):
        """First escape of each of the rows and the one after its last, int32 like `rows`."""
        place = self.layout.row_starts + self.row_offset + rows
        return tuple(plgpu.load(self.slots.at[self.slot, place + end]) for end in (0, 1))

    def list_words(self, quads, used):
        """The list's words of escapes 4 q .. 4 q + 3 for quads q: int32 [rows, 4]."""
        shape = (*quads.shape, QUAD)
        place = self.layout.escapes + jnp.broadcast_to(quads[:, None] * QUAD, shape)
        place += index(shape, 1)
        mask = jnp.broadcast_to(used[:, None], shape)
        return plgpu.load(self.slots.at[self.slot, place], mask=mask, other=0)

    def escapes(self, rows, used, words, inputs, block, num_used):
        """What it takes to correct one escape of each row: loads, to be given to `correct`."""
        position = words & 0xFFFF
        group = position // self.group
        scale = plgpu.load(self.scales.at[self.expert, rows, group], mask=used, other=0.0)
        row_step = self.config.row_step
        shape = (*rows.shape, row_step)
        where = jnp.broadcast_to(position[:, None], shape)
        met = [
            plgpu.load(
                inputs.at[block, first // row_step, where, index(shape, 1)],
                mask=jnp.broadcast_to((used & (first < num_used))[:, None], shape),
                other=0.0,
            )
            for first in range(0, self.config.block_rows, row_step)
        ]
        return used, words, scale, met

    def correct(self, totals, escapes):
        """Adds the errors of escapes times the inputs they meet: [rows, row_step] each."""
        used, words, scale, met = escapes
        error = escape_error(words, least_base(scale, self.interpret), self.dtype)
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


def products(matrix, firsts, load_inputs, inputs, block, num_used) -> list[jax.Array]:
    """Weight rows `first .. first + block_out - 1` times the block's inputs, for both firsts.

    load_inputs: step -> [product_rows, block_in], arranged. inputs: ref [blocks, row steps, in,
    row_step]. num_used: rows of the block that are in use. Returns float32 [block_out, block_rows]
    each.
    """
    config, dtype, block_out = matrix.config, matrix.dtype, matrix.config.block_out
    steps = matrix.num_in // config.block_in
    # One row after the other, a thread each: an escape's sum never leaves its thread.
    number = index((2 * block_out,), 0)
    rows = number + jnp.where(number < block_out, firsts[0], firsts[1] - block_out)
    start, end = matrix.escape_range(rows)
    first_quad, last_quad = start // QUAD, (end + QUAD - 1) // QUAD
    most = jnp.max(last_quad - first_quad)
    in_loop = jnp.minimum(most, steps * config.quads)

    def chosen(first, last):
        """Quads first..last - 1 of each row, at most `quads`: numbers, and which are to be read."""
        for place in range(config.quads):
            numbers = first_quad + first + place
            yield numbers, (first + place < last) & (numbers < last_quad)

    def of_step(step):
        return list(chosen(step * in_loop // steps, (step + 1) * in_loop // steps))

    def fetch(some, words):
        fetched = []
        for (numbers, used), of_quad in zip(some, words, strict=True):
            for place, of_one in enumerate(_columns(of_quad)):
                number = numbers * QUAD + place
                own = used & (number >= start) & (number < end)
                fetched.append(matrix.escapes(rows, own, of_one, inputs, block, num_used))
        return fetched

    def step(i, carry):
        totals, fixes, words = carry
        x = load_inputs(i)
        scales = [matrix.scales_at(first, i) for first in firsts]
        escapes = fetch(of_step(i), words)
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
        for one in escapes:
            fixes = matrix.correct(fixes, one)
        return totals, fixes, next_words

    def leftover(i, fixes):
        first = in_loop + i * config.quads
        some = list(chosen(first, first + config.quads))
        for one in fetch(some, [matrix.list_words(*one) for one in some]):
            fixes = matrix.correct(fixes, one)
        return fixes

    zeros = jnp.zeros((block_out, config.product_rows), jnp.float32)
    none = jnp.zeros((*rows.shape, config.row_step), jnp.float32)
    carry = (
        (zeros, zeros),
        (none,) * (config.block_rows // config.row_step),
        tuple(matrix.list_words(*one) for one in of_step(0)),
    )
    totals, fixes, *_ = lax.fori_loop(0, steps, step, carry)
    chunks = (most - in_loop + config.quads - 1) // config.quads
    fixes = side_by_side(list(lax.fori_loop(0, chunks, leftover, fixes)))
    for _ in range((config.product_rows // config.block_rows).bit_length() - 1):
        totals = [jnp.split(total, 2, axis=1)[0] for total in totals]
    return [total + fix for total, fix in zip(totals, jnp.split(fixes, 2), strict=True)]
