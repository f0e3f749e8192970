"""Triton kernels for the draft experts, on the arithmetic of `arithmetic.py`.

Two kernels. `gate_up` (`triton_gate_up.py`) leaves a choice's rounded inner activations. `down`
sums over the k choices of a row in their given order. Nothing is summed across programs, so
results repeat exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.draft_experts.arithmetic import (
    WORD_INPUTS,
    finite,
    fma,
    pack_tables,
    word_product,
)
from pallas_kernels.draft_experts.config import DraftExpertsConfig
from pallas_kernels.draft_experts.triton_gate_up import (
    DOWN,
    H_BLOCK,
    gate_up_kernel,
    index,
    pieces_of,
)
from pallas_kernels.early_launch import let_next_start
from pallas_kernels.routing import RoutingRule

_H_BLOCK_WORDS = H_BLOCK // WORD_INPUTS
_LANE_WORDS = 4  # words of one 16-byte load
_GROUP_ROWS = 8  # rows that one warp reads at once


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

    pieces = pieces_of(num_choices * expert_chunks, config.down_chunks)

    def load(start, width):
        tile = (groups, width, _GROUP_ROWS, chunk)
        position = index((1, width, 1, 1), 1, start)
        expert = expert_of(position // expert_chunks)
        column = (position % expert_chunks) * chunk
        line = first + index(tile, 0, 0, _GROUP_ROWS) + index(tile, 2)
        words = plgpu.load(
            codes_ref.at[
                jnp.broadcast_to(expert, tile),
                line,
                jnp.broadcast_to(column, tile) + index(tile, 3),
            ],
            eviction_policy=config.eviction_policy,
        )
        lanes = (*tile[:3], chunk_lanes)
        line = first + index(lanes, 0, 0, _GROUP_ROWS) + index(lanes, 2)
        scales = plgpu.load(
            scales_ref.at[
                jnp.broadcast_to(expert, lanes),
                line,
                (jnp.broadcast_to(column, lanes) + index(lanes, 3, 0, _LANE_WORDS))
                // (group // WORD_INPUTS),
            ]
        )
        expert = expert_of(index((width,), 0, start) // expert_chunks)
        tables = [bytes_ref[expert, DOWN, half] for half in (0, 1)]
        # Rows of low and high are choices, so a row's choices lie end to end.
        inputs = (width * chunk,)
        word = row * (num_choices * expert_chunks * chunk) + start * chunk + index(inputs, 0)
        bytes_ = [plgpu.load(ref.at[word]) for ref in (low_ref, high_ref)]
        blocks = (width * chunk_blocks,)
        h_block = (row * num_choices * expert_chunks + start) * chunk_blocks + index(blocks, 0)
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
    plgpu.store(out_ref.at[row, pl.ds(first, rows)], finite(total))


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
    experts, weights = experts.astype(jnp.int32), weights.astype(jnp.float32)
    options = dict(num_choices=experts.shape[1], config=config, interpret=interpret)
    return _run(x, experts, weights, layer, rule=None, **options)[0]


def draft_routed(
    x: jax.Array,
    logits: jax.Array,
    mask: jax.Array,
    layer: Mapping[str, jax.Array],
    *,
    rule: RoutingRule,
    config: DraftExpertsConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`draft_experts` of the experts that `rule` chooses, which it must be able to compare.

    x: [rows, hidden]. logits: float32 [rows, num_experts], the router's. mask: bool [rows], where
    false no expert is chosen. Returns float32 [rows, hidden] and experts int32 [rows, k].
    """
    options = dict(num_choices=rule.top_k, config=config, interpret=interpret)
    return _run(x, logits, mask.astype(jnp.int32), layer, rule=rule, **options)


def _run(x, choices, weights, layer, *, rule, num_choices, config, interpret):
    """Both kernels: sums and experts; choices, weights: see `gate_up_kernel`."""
    num_rows, hidden = x.shape
    num_experts = layer["tables"].shape[0]
    inner = layer["down_codes"].shape[2] * WORD_INPUTS
    flat = num_rows * num_choices
    if "table_bytes" not in layer:
        layer = {**layer, **pack_tables(layer["tables"])}
    tables = (layer["table_bytes"], layer["table_steps"])
    common = dict(
        num_experts=num_experts, num_choices=num_choices, config=config, interpret=interpret
    )
    out_shape = [
        jax.ShapeDtypeStruct((flat, inner // WORD_INPUTS), jnp.int32),
        jax.ShapeDtypeStruct((flat, inner // WORD_INPUTS), jnp.int32),
        jax.ShapeDtypeStruct((flat, inner // H_BLOCK), jnp.float32),
        jax.ShapeDtypeStruct((flat, inner // H_BLOCK), jnp.float32),
    ]
    if rule is not None:
        out_shape.append(jax.ShapeDtypeStruct((num_rows, num_choices), jnp.int32))
    low, high, scale, offset, *chosen = pl.pallas_call(
        functools.partial(
            gate_up_kernel,
            inner=inner,
            group=hidden // layer["gate_up_scales"].shape[2],
            rule=rule,
            **common,
        ),
        grid=(flat, inner // config.gate_up_rows),
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=config.gate_up_warps, num_stages=1),
        interpret=interpret,
        name="draft_gate_up",
    )(x, choices, weights, layer["gate_up_codes"], layer["gate_up_scales"], *tables)
    experts = chosen[0] if chosen else choices
    total = pl.pallas_call(
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
    return total, experts
