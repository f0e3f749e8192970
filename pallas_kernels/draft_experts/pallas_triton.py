"""Triton kernels for the draft experts, on the arithmetic of `arithmetic.py`.

Two kernels. `gate_up` reads x, rounds it, and leaves `silu(gate) * up` rounded per 16 values, with
the routing weight and the down projection's step inside the block scales. `down` sums over the k
choices of a row in their given order. Nothing is summed across programs, so results repeat
exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.draft_experts.arithmetic import (
    WORD_INPUTS,
    fma,
    pack_tables,
    round_blocks,
    word_product,
)
from pallas_kernels.draft_experts.config import DraftExpertsConfig
from pallas_kernels.early_launch import let_next_start

X_BLOCK_WORDS = 4
"""Words of gate and up inputs that share an activation scale."""
H_BLOCK = 16
"""Inner activations that share a scale; also the least rows of a gate_up program."""
_H_BLOCK_WORDS = H_BLOCK // WORD_INPUTS
_LANE_WORDS = 4  # words of one 16-byte load
_GROUP_ROWS = 8  # rows that one warp reads at once
_DOWN = 2  # the down projection's place in the tables


def _index(shape, axis, start=0, step=1):
    """start + step * (position along axis), int32 `shape`."""
    return start + step * lax.broadcasted_iota(jnp.int32, shape, axis)


def _pieces(num_words: int, widest: int) -> list[tuple[int, int]]:
    """(start, width) pieces of a row, widths powers of two: 176, 128 -> 128 + 32 + 16."""
    pieces, start = [], 0
    while start < num_words:
        width = min(widest, 1 << ((num_words - start).bit_length() - 1))
        pieces.append((start, width))
        start += width
    return pieces


def _gate_up_kernel(
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
    *,
    num_experts,
    num_choices,
    inner,
    group,
    config,
    interpret,
):
    """One choice (row, expert) and `config.gate_up_rows` inner positions.

    Codes are read as tiles [chunks, rows, chunk words]: a warp reads full lines of several rows,
    and a thread keeps several chunks of the same row, so that most of a sum stays in the thread.
    """
    choice, block = pl.program_id(0), pl.program_id(1)
    rows, chunk = config.gate_up_rows, config.gate_up_chunk_words
    row, slot = choice // num_choices, choice % num_choices
    expert = let_next_start(experts_ref[row, slot], config.early_launch and not interpret)
    first = block * rows
    blocks_out = pl.ds(block * (rows // H_BLOCK), rows // H_BLOCK)

    @pl.when(expert < num_experts)
    def _():
        pieces = _pieces(codes_ref.shape[2], config.gate_up_words)
        words, scales = {}, {}

        def read(start, width):
            tile = (width // chunk, rows, chunk)
            lanes = (width // chunk, rows, chunk // X_BLOCK_WORDS)
            for side in (0, 1):
                words[start, side] = plgpu.load(
                    codes_ref.at[
                        expert,
                        _index(tile, 1, first + side * inner),
                        _index(tile, 0, start, chunk) + _index(tile, 2),
                    ],
                    eviction_policy=config.eviction_policy,
                )
                scales[start, side] = plgpu.load(
                    scales_ref.at[
                        expert,
                        _index(lanes, 1, first + side * inner),
                        (_index(lanes, 0, start, chunk) + _index(lanes, 2, 0, X_BLOCK_WORDS))
                        // (group // WORD_INPUTS),
                    ],
                )

        # Every load comes before the first use of any: a late one would wait for memory alone.
        tables = [[bytes_ref[expert, side, half] for half in (0, 1)] for side in (0, 1)]
        steps = [steps_ref[expert, projection] for projection in (0, 1, 2)]
        weight = weights_ref[row, slot]
        inputs = {}
        for start, width in pieces:
            flat = (width // X_BLOCK_WORDS, X_BLOCK_WORDS * WORD_INPUTS)
            inputs[start] = plgpu.load(
                x_ref.at[row, _index(flat, 0, start * WORD_INPUTS, flat[1]) + _index(flat, 1)]
            )
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
        h_scale *= steps[_DOWN] * weight
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


def _down_kernel(
    experts_ref,
    low_ref,
    high_ref,
    scale_ref,
    offset_ref,
    codes_ref,
    scales_ref,
    bytes_ref,
    out_ref,
    *,
    num_experts,
    num_choices,
    group,
    config,
    interpret,
):
    """One row and `config.down_rows` outputs, over all of the row's choices.

    The choices' inner positions are laid end to end and cut into chunks; codes are read as tiles
    [row groups, chunks, 8 rows, chunk words]. A choice that selects nothing has scales of 0 and
    reads some expert's codes for nothing.
    """
    row, block = pl.program_id(0), pl.program_id(1)
    rows, chunk = config.down_rows, config.down_chunk_words
    first = block * rows
    groups = rows // _GROUP_ROWS
    expert_chunks = codes_ref.shape[2] // chunk
    chunk_lanes, chunk_blocks = chunk // _LANE_WORDS, chunk // _H_BLOCK_WORDS
    chosen = [experts_ref[row, slot] for slot in range(num_choices)]
    chosen[0] = let_next_start(chosen[0], config.early_launch and not interpret)
    chosen = [jnp.minimum(expert, num_experts - 1) for expert in chosen]

    def expert_of(slot):
        expert = jnp.full(slot.shape, chosen[0], jnp.int32)
        for candidate in range(1, num_choices):
            expert = jnp.where(slot == candidate, chosen[candidate], expert)
        return expert

    pieces = _pieces(num_choices * expert_chunks, config.down_chunks)

    def load(start, width):
        tile = (groups, width, _GROUP_ROWS, chunk)
        position = _index((1, width, 1, 1), 1, start)
        expert = expert_of(position // expert_chunks)
        column = (position % expert_chunks) * chunk
        line = first + _index(tile, 0, 0, _GROUP_ROWS) + _index(tile, 2)
        words = plgpu.load(
            codes_ref.at[
                jnp.broadcast_to(expert, tile),
                line,
                jnp.broadcast_to(column, tile) + _index(tile, 3),
            ],
            eviction_policy=config.eviction_policy,
        )
        lanes = (*tile[:3], chunk_lanes)
        line = first + _index(lanes, 0, 0, _GROUP_ROWS) + _index(lanes, 2)
        scales = plgpu.load(
            scales_ref.at[
                jnp.broadcast_to(expert, lanes),
                line,
                (jnp.broadcast_to(column, lanes) + _index(lanes, 3, 0, _LANE_WORDS))
                // (group // WORD_INPUTS),
            ]
        )
        expert = expert_of(_index((width,), 0, start) // expert_chunks)
        tables = [bytes_ref[expert, _DOWN, half] for half in (0, 1)]
        # Rows of low and high are choices, so a row's choices lie end to end.
        inputs = (width * chunk,)
        word = row * (num_choices * expert_chunks * chunk) + start * chunk + _index(inputs, 0)
        bytes_ = [plgpu.load(ref.at[word]) for ref in (low_ref, high_ref)]
        blocks = (width * chunk_blocks,)
        h_block = (row * num_choices * expert_chunks + start) * chunk_blocks + _index(blocks, 0)
        h_scales = [plgpu.load(ref.at[h_block]) for ref in (scale_ref, offset_ref)]
        return tile, words, scales, tables, bytes_, h_scales

    loaded = [load(*piece) for piece in pieces[: config.down_ahead]]
    total = jnp.zeros((rows,), jnp.float32)
    for number in range(len(pieces)):
        loaded.extend(load(*piece) for piece in pieces[number + config.down_ahead :][:1])
        tile, words, scales, tables, bytes_, h_scales = loaded.pop(0)
        width = tile[1]
        table_low, table_high = (
            jnp.broadcast_to(table.reshape(1, width, 1, 1), tile) for table in tables
        )
        low, high = (jnp.broadcast_to(b.reshape(1, width, 1, chunk), tile) for b in bytes_)
        product = word_product(words, low, high, table_low, table_high, interpret)
        by_block = (*tile[:3], chunk_blocks)
        product = jnp.sum(product.reshape(*by_block, _H_BLOCK_WORDS), axis=4)
        h_scale, offset = (
            jnp.broadcast_to(value.reshape(1, width, 1, chunk_blocks), by_block)
            for value in h_scales
        )
        value = fma(product.astype(jnp.float32), h_scale, offset, interpret)
        value = jnp.sum(value.reshape(*tile[:3], chunk_lanes, 2), axis=4)
        value *= scales.astype(jnp.float32)
        total += jnp.sum(jnp.sum(value, axis=1), axis=2).reshape(rows)
    plgpu.store(out_ref.at[row, pl.ds(first, rows)], total)


def draft_experts(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    layer: Mapping[str, jax.Array],
    *,
    config: DraftExpertsConfig,
    interpret: bool = False,
) -> jax.Array:
    """Weighted sum of each row's chosen INT4 experts; arguments as in `reference.draft_experts`.

    interpret: run the kernels' arithmetic on any device, slowly. Returns float32 [rows, hidden].
    """
    num_rows, hidden = x.shape
    num_choices = experts.shape[1]
    num_experts = layer["tables"].shape[0]
    inner = layer["down_codes"].shape[2] * WORD_INPUTS
    flat = num_rows * num_choices
    experts = experts.astype(jnp.int32)
    weights = weights.astype(jnp.float32)
    if "table_bytes" not in layer:
        layer = {**layer, **pack_tables(layer["tables"])}
    tables = (layer["table_bytes"], layer["table_steps"])
    common = dict(
        num_experts=num_experts, num_choices=num_choices, config=config, interpret=interpret
    )
    low, high, scale, offset = pl.pallas_call(
        functools.partial(
            _gate_up_kernel,
            inner=inner,
            group=hidden // layer["gate_up_scales"].shape[2],
            **common,
        ),
        grid=(flat, inner // config.gate_up_rows),
        out_shape=[
            jax.ShapeDtypeStruct((flat, inner // WORD_INPUTS), jnp.int32),
            jax.ShapeDtypeStruct((flat, inner // WORD_INPUTS), jnp.int32),
            jax.ShapeDtypeStruct((flat, inner // H_BLOCK), jnp.float32),
            jax.ShapeDtypeStruct((flat, inner // H_BLOCK), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=config.gate_up_warps, num_stages=1),
        interpret=interpret,
        name="draft_gate_up",
    )(x, experts, weights, layer["gate_up_codes"], layer["gate_up_scales"], *tables)
    return pl.pallas_call(
        functools.partial(_down_kernel, group=inner // layer["down_scales"].shape[2], **common),
        grid=(num_rows, hidden // config.down_rows),
        out_shape=jax.ShapeDtypeStruct((num_rows, hidden), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=config.down_warps, num_stages=1),
        interpret=interpret,
        name="draft_down",
    )(
        experts,
        low.reshape(-1),
        high.reshape(-1),
        scale.reshape(-1),
        offset.reshape(-1),
        layer["down_codes"],
        layer["down_scales"],
        layer["table_bytes"],
    )
