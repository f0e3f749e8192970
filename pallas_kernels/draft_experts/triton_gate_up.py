"""The first kernel of the draft experts: gate and up projections of one choice.

It reads x, rounds it, and leaves `silu(gate) * up` rounded per 16 values, with the routing weight
and the down projection's step inside the block scales. It may choose the expert itself.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.draft_experts.arithmetic import (
    WORD_INPUTS,
    fma,
    round_blocks,
    word_product,
)
from pallas_kernels.early_launch import let_next_start
from pallas_kernels.routing import choice_at

X_BLOCK_WORDS = 4
"""Words of gate and up inputs that share an activation scale."""
H_BLOCK = 16
"""Inner activations that share a scale; also the least rows of a gate_up program."""
DOWN = 2
"""The down projection's place in the tables."""


def index(shape, axis, start=0, step=1):
    """start + step * (position along axis), int32 `shape`."""
    return start + step * lax.broadcasted_iota(jnp.int32, shape, axis)


def pieces_of(num_words: int, widest: int) -> list[tuple[int, int]]:
    """(start, width) pieces of a row, widths powers of two: 176, 128 -> 128 + 32 + 16."""
    pieces, start = [], 0
    while start < num_words:
        width = min(widest, 1 << ((num_words - start).bit_length() - 1))
        pieces.append((start, width))
        start += width
    return pieces


def gate_up_kernel(
    x_ref,
    experts_ref,
    weights_ref,
    codes_ref,
    scales_ref,
    bytes_ref,
    steps_ref,
    low_ref,
    high_ref,
    scale_ref,
    offset_ref,
    *chosen_ref,
    num_experts,
    num_choices,
    inner,
    group,
    rule,
    config,
    interpret,
):
    """One choice (row, expert) and `config.gate_up_rows` inner positions.

    With a routing rule, experts_ref and weights_ref are the router's logits and which rows count,
    and the chosen expert is written too.

    Codes are read as tiles [chunks, rows, chunk words]: a warp reads full lines of several rows,
    and a thread keeps several chunks of the same row, so that most of a sum stays in the thread.
    """
    choice, block = pl.program_id(0), pl.program_id(1)
    rows, chunk = config.gate_up_rows, config.gate_up_chunk_words
    row, slot = choice // num_choices, choice % num_choices
    first = block * rows
    blocks_out = pl.ds(block * (rows // H_BLOCK), rows // H_BLOCK)
    pieces = pieces_of(codes_ref.shape[2], config.gate_up_words)
    inputs = {}
    for start, width in pieces:
        flat = (width // X_BLOCK_WORDS, X_BLOCK_WORDS * WORD_INPUTS)
        inputs[start] = plgpu.load(
            x_ref.at[row, index(flat, 0, start * WORD_INPUTS, flat[1]) + index(flat, 1)]
        )
    if rule is None:
        expert, weight = experts_ref[row, slot], weights_ref[row, slot]
    else:
        expert, weight = choice_at(experts_ref, row, slot, rule)
        expert = jnp.where(weights_ref[row] != 0, expert, num_experts)

        @pl.when(block == 0)
        def _():
            plgpu.store(chosen_ref[0].at[row, pl.ds(slot, 1)], jnp.full((1,), expert, jnp.int32))

    expert = let_next_start(expert, config.early_launch and not interpret)

    @pl.when(expert < num_experts)
    def _():
        words, scales = {}, {}

        def read(start, width):
            tile = (width // chunk, rows, chunk)
            lanes = (width // chunk, rows, chunk // X_BLOCK_WORDS)
            for side in (0, 1):
                words[start, side] = plgpu.load(
                    codes_ref.at[
                        expert,
                        index(tile, 1, first + side * inner),
                        index(tile, 0, start, chunk) + index(tile, 2),
                    ],
                    eviction_policy=config.eviction_policy,
                )
                scales[start, side] = plgpu.load(
                    scales_ref.at[
                        expert,
                        index(lanes, 1, first + side * inner),
                        (index(lanes, 0, start, chunk) + index(lanes, 2, 0, X_BLOCK_WORDS))
                        // (group // WORD_INPUTS),
                    ],
                )

        # Every load comes before the first use of any: a late one would wait for memory alone.
        tables = [[bytes_ref[expert, side, half] for half in (0, 1)] for side in (0, 1)]
        steps = [steps_ref[expert, projection] for projection in (0, 1, 2)]
        for piece in pieces[: config.gate_up_ahead]:
            read(*piece)
        sums = [jnp.zeros((rows,), jnp.float32)] * 2
        for number, (start, width) in enumerate(pieces):
            for piece in pieces[number + config.gate_up_ahead :][:1]:
                read(*piece)
            tile = (width // chunk, rows, chunk)
            lanes = (width // chunk, rows, chunk // X_BLOCK_WORDS)
            x = inputs[start].astype(jnp.float32)
            low, high, x_scale, half_sum = round_blocks(x, interpret)
            low, high = (jnp.broadcast_to(v.reshape(tile[0], 1, chunk), tile) for v in (low, high))
            offset = (half_sum * x_scale).reshape(lanes[0], 1, lanes[2])
            x_scale = x_scale.reshape(lanes[0], 1, lanes[2])
            x_scale, offset = (jnp.broadcast_to(v, lanes) for v in (x_scale, offset))
            for side in (0, 1):
                product = word_product(words[start, side], low, high, *tables[side], interpret)
                product = jnp.sum(product.reshape(*lanes, X_BLOCK_WORDS), axis=3)
                value = fma(product.astype(jnp.float32), x_scale, offset, interpret)
                value *= scales[start, side].astype(jnp.float32)
                sums[side] += jnp.sum(jnp.sum(value, axis=0), axis=1)
        gate, up = (total * step for total, step in zip(sums, steps[:2], strict=True))
        active = gate / (1 + jnp.exp(-gate)) * up
        low, high, h_scale, half_sum = round_blocks(
            active.reshape(rows // H_BLOCK, H_BLOCK), interpret
        )
        h_scale *= steps[DOWN] * weight
        words_out = pl.ds(block * (rows // WORD_INPUTS), rows // WORD_INPUTS)
        plgpu.store(low_ref.at[choice, words_out], low)
        plgpu.store(high_ref.at[choice, words_out], high)
        plgpu.store(scale_ref.at[choice, blocks_out], h_scale)
        plgpu.store(offset_ref.at[choice, blocks_out], h_scale * half_sum)

    @pl.when(expert >= num_experts)
    def _():
        nothing = jnp.zeros((rows // H_BLOCK,), jnp.float32)
        plgpu.store(scale_ref.at[choice, blocks_out], nothing)
        plgpu.store(offset_ref.at[choice, blocks_out], nothing)
