"""The Triton kernel of attention proper: one split of the cache per program.

Scores are products `[entries, dim] x [dim, queries]` and their weighted sums `[value, entries] x
[entries, queries]`: the cache fills the matrix unit's long side, queries are columns, and the bits
of a column do not depend on how many there are. Splits and blocks lie at fixed entries and are
added in order. An entry that a query may not read has probability 0 and leaves its maximum alone,
so a block that is read for another query's sake changes nothing.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.decode_attention.config import DecodeAttentionConfig
from pallas_kernels.decode_attention.triton_prepare import dot, index, tile
from pallas_kernels.early_launch import let_next_start

LOW = -1e30
"""Below every score; finite, so that the difference of two of them is 0, not NaN."""


def _attend_kernel(lengths_ref, *refs, first_sequence, tokens, window, scale, config, early):
    """A block of queries of one key head over one split.

    refs: queries [rows, heads, dim] one or two times, and as many keys [batch, capacity, kv_heads,
    dim], values [batch, capacity, kv_heads, value] unless the first keys are the values too; out:
    sums [splits, rows, heads, value], maxima and norms [splits, rows, heads].
    """
    *inputs, sums_ref, maxima_ref, norms_ref = refs
    num_parts = len(inputs) // 2
    queries_refs, keys_refs = inputs[:num_parts], inputs[num_parts : 2 * num_parts]
    values_ref = inputs[-1] if len(inputs) % 2 else keys_refs[0]
    capacity, kv_heads, value_dim = values_ref.shape[1:]
    group = sums_ref.shape[2] // kv_heads
    split, sequence = pl.program_id(0), pl.program_id(2)
    kv_head, first = pl.program_id(1) % kv_heads, pl.program_id(1) // kv_heads * config.rows
    batch = first_sequence + sequence
    length = let_next_start(lengths_ref[batch], early)
    last_token = jnp.minimum((first + config.rows - 1) // group, tokens - 1)
    end = jnp.minimum(jnp.minimum(length + last_token + 1, capacity), config.split_start(split + 1))
    begin = config.split_start(split)
    if window:
        begin = jnp.maximum(begin, length + first // group - window + 1)
    block = config.block

    def places(columns, in_rows):
        """(row, head) of each query, spread over `columns` more, and whether there is one."""
        shape = (config.rows, columns) if columns else (config.rows,)
        query = index(shape, 0, first)
        place = (in_rows * tokens + query // group, kv_head * group + query % group)
        return place, query < tokens * group

    def cached(ref, start, dim):
        if capacity % block == 0:
            return plgpu.load(ref.at[batch, pl.ds(start, block), kv_head, pl.ds(0, dim)])
        at = tile((block, dim), start, 0, kv_head)
        return plgpu.load(ref.at[(batch, *at)], mask=at[0] < capacity, other=0.0)

    @pl.when(begin < end)
    def _():
        queries = []
        for ref in queries_refs:
            at, used = places(ref.shape[2], batch)
            channel = index((config.rows, ref.shape[2]), 1)
            queries.append(plgpu.load(ref.at[(*at, channel)], mask=used, other=0.0))
        query = index((1, config.rows), 1, first)
        position = length + jnp.minimum(query // group, tokens - 1)

        def step(i, carry):
            sums, maxima, norms = carry
            start = i * block
            blocks = [cached(ref, start, ref.shape[3]) for ref in keys_refs]
            values = (
                blocks[0] if values_ref is keys_refs[0] else cached(values_ref, start, value_dim)
            )
            scores = dot(blocks[0], queries[0], 1, 1)
            if num_parts == 2:
                scores += dot(blocks[1], queries[1], 1, 1)
            entry = index((block, 1), 0, start)
            mask = entry <= position
            if window:
                mask &= entry > position - window
            scores = jnp.where(mask, scores * scale, LOW)
            new_maxima = jnp.maximum(maxima, jnp.max(scores, axis=0))
            shrink = jnp.exp(maxima - new_maxima)
            weights = jnp.where(mask, jnp.exp(scores - new_maxima[None]), 0.0)
            norms = norms * shrink + jnp.sum(weights, axis=0)
            sums = sums * shrink[None] + dot(values, weights.astype(values.dtype), 0, 0)
            return sums, new_maxima, norms

        state = (
            jnp.zeros((value_dim, config.rows), jnp.float32),
            jnp.full((config.rows,), LOW, jnp.float32),
            jnp.zeros((config.rows,), jnp.float32),
        )
        sums, maxima, norms = lax.fori_loop(begin // block, (end + block - 1) // block, step, state)
        at, used = places(value_dim, sequence)
        channel = index((config.rows, value_dim), 1)
        split_of_query = jnp.full(channel.shape, split, jnp.int32)
        plgpu.store(sums_ref.at[(split_of_query, *at, channel)], sums.T, mask=used)
        at, used = places(0, sequence)
        for ref, value in ((maxima_ref, maxima), (norms_ref, norms)):
            split_of_query = jnp.full(value.shape, split, jnp.int32)
            plgpu.store(ref.at[(split_of_query, *at)], value, mask=used)


def attend_splits(
    queries: tuple[jax.Array, ...],
    keys: tuple[jax.Array, ...],
    values: jax.Array | None,
    lengths: jax.Array,
    *,
    first_sequence: int,
    num_sequences: int,
    tokens: int,
    window: int,
    scale: float,
    config: DecodeAttentionConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Softmax attention over each split of the cache by itself, for some sequences.

    Scores are `scale` times the sum of the products of each queries with its keys.

    queries: [batch * tokens, heads, dim] each. keys: [batch, capacity, kv_heads, dim] each. values:
    [batch, capacity, kv_heads, value], or None where the first keys are the values. lengths: int32
    [batch], entries before the new ones. window: 0 for none. Returns float32 weighted sums [splits,
    num_sequences * tokens, heads, value], then maxima of the scores and sums of the weights, both
    [splits, num_sequences * tokens, heads]; splits that a query does not read are undefined.
    """
    capacity, kv_heads = keys[0].shape[1:3]
    value_dim = (keys[0] if values is None else values).shape[3]
    heads = queries[0].shape[1]
    num_splits = config.num_splits(capacity)
    partial = (num_splits, num_sequences * tokens, heads)
    blocks = pl.cdiv(tokens * heads // kv_heads, config.rows) * kv_heads
    return pl.pallas_call(
        functools.partial(
            _attend_kernel,
            first_sequence=first_sequence,
            tokens=tokens,
            window=window,
            scale=scale,
            config=config,
            early=config.early_launch and not interpret,
        ),
        grid=(num_splits, blocks, num_sequences),
        out_shape=[
            jax.ShapeDtypeStruct((*partial, value_dim), jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="attend_split",
    )(lengths, *queries, *keys, *(() if values is None else (values,)))
