"""Triton kernels after attention: the splits' results combined, and mapped to values.

A query's splits are combined in chunks at fixed places, in order. The same code runs in a kernel of
its own, followed by the product of all tokens, and, for very few tokens, in the product's kernel.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.decode_attention.config import DecodeAttentionConfig
from pallas_kernels.decode_attention.triton_attend import LOW
from pallas_kernels.decode_attention.triton_prepare import dot, index, tile
from pallas_kernels.early_launch import let_next_start

Partials = tuple[jax.Array, jax.Array, jax.Array]


def _combined(sums_ref, maxima_ref, norms_ref, row, head, position, *, capacity, window, config):
    """One query's attention from its splits: float32 [value]."""
    value_dim = sums_ref.shape[3]
    chunk = config.combine_splits
    last = config.split_of(jnp.minimum(position, capacity - 1))
    first = config.split_of(jnp.maximum(position - window + 1, 0)) if window else 0

    def step(i, carry):
        total, maximum, norm = carry
        split = index((chunk,), 0, i * chunk)
        used = (split >= first) & (split <= last)
        at = (split, jnp.full((chunk,), row, jnp.int32), jnp.full((chunk,), head, jnp.int32))
        maxima = plgpu.load(maxima_ref.at[at], mask=used, other=LOW)
        norms = plgpu.load(norms_ref.at[at], mask=used, other=0.0)
        shape = (chunk, value_dim)
        split = index(shape, 0, i * chunk)
        at = (split, jnp.full(shape, row, jnp.int32), jnp.full(shape, head, jnp.int32))
        sums = plgpu.load(
            sums_ref.at[(*at, index(shape, 1))],
            mask=(split >= first) & (split <= last),
            other=0.0,
        )
        new_maximum = jnp.maximum(maximum, jnp.max(maxima))
        shrink = jnp.exp(maximum - new_maximum)
        weights = jnp.exp(maxima - new_maximum)
        norm = norm * shrink + jnp.sum(weights * norms)
        total = total * shrink + jnp.sum(weights[:, None] * sums, axis=0)
        return total, new_maximum, norm

    state = (jnp.zeros((value_dim,), jnp.float32), jnp.float32(LOW), jnp.float32(0))
    if sums_ref.shape[0] <= chunk:
        total, _, norm = step(0, state)
    else:
        total, _, norm = lax.fori_loop(first // chunk, last // chunk + 1, step, state)
    return total / norm


def _combine_kernel(
    lengths_ref,
    sums_ref,
    maxima_ref,
    norms_ref,
    out_ref,
    *,
    first_sequence,
    tokens,
    early,
    **reading,
):
    """One query: out_ref [rows, heads, value]."""
    row, head = let_next_start(pl.program_id(0), early), pl.program_id(1)
    position = lengths_ref[first_sequence + row // tokens] + row % tokens
    value = _combined(sums_ref, maxima_ref, norms_ref, row, head, position, **reading)
    plgpu.store(out_ref.at[row, head, pl.ds(0, value.shape[0])], value.astype(out_ref.dtype))


def _values_kernel(attended_ref, kv_up_ref, out_ref, *, nope, config, early):
    """One head, a tile of its values, a block of tokens: out_ref [rows, heads, value]."""
    rows, _, value_dim = out_ref.shape
    rank = attended_ref.shape[2]
    head, block = let_next_start(pl.program_id(0), early), config.product_rows
    out_dim = min(config.value_out, value_dim)
    column, first = pl.program_id(1) * out_dim, pl.program_id(2) * block
    weight = plgpu.load(kv_up_ref.at[head, pl.ds(nope + column, out_dim), pl.ds(0, rank)])
    at = tile((block, rank), first, 0, head)
    attended = plgpu.load(attended_ref.at[at], mask=at[0] < rows, other=0.0)
    _store_values(out_ref, weight, attended, first, column, head)


def _store_values(out_ref, weight, attended, first, column, head):
    at = tile((attended.shape[0], weight.shape[0]), first, column, head)
    values = dot(weight, attended, 1, 1).T.astype(out_ref.dtype)
    plgpu.store(out_ref.at[at], values, mask=at[0] < out_ref.shape[0])


def _combined_values_kernel(
    lengths_ref,
    sums_ref,
    maxima_ref,
    norms_ref,
    kv_up_ref,
    out_ref,
    *,
    tokens,
    nope,
    early,
    **reading,
):
    """As `_combine_kernel` and `_values_kernel`, for the few rows of one block."""
    rows, _, value_dim = out_ref.shape
    rank = sums_ref.shape[3]
    config = reading["config"]
    head, block = let_next_start(pl.program_id(0), early), config.product_rows
    out_dim = min(config.value_out, value_dim)
    column = pl.program_id(1) * out_dim
    weight = plgpu.load(kv_up_ref.at[head, pl.ds(nope + column, out_dim), pl.ds(0, rank)])
    attended = jnp.zeros((block, rank), jnp.float32)
    for row in range(rows):
        position = lengths_ref[row // tokens] + row % tokens
        value = _combined(sums_ref, maxima_ref, norms_ref, row, head, position, **reading)
        attended = jnp.where(index((block, rank), 0) == row, value[None], attended)
    _store_values(out_ref, weight, attended.astype(out_ref.dtype), 0, column, head)


def combine(
    partials: Partials,
    lengths: jax.Array,
    *,
    first_sequence: int,
    tokens: int,
    capacity: int,
    window: int,
    dtype: jax.typing.DTypeLike,
    config: DecodeAttentionConfig,
    interpret: bool,
) -> jax.Array:
    """The attention of the sequences that `attend_splits` ran: `dtype` [rows, heads, value]."""
    _, rows, heads, value_dim = partials[0].shape
    return pl.pallas_call(
        functools.partial(
            _combine_kernel,
            first_sequence=first_sequence,
            tokens=tokens,
            capacity=capacity,
            window=window,
            config=config,
            early=config.early_launch and not interpret,
        ),
        grid=(rows, heads),
        out_shape=jax.ShapeDtypeStruct((rows, heads, value_dim), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=config.combine_warps, num_stages=1),
        interpret=interpret,
        name="attend_combine",
    )(lengths, *partials)


def map_values(
    attended: jax.Array,
    kv_up: jax.Array,
    *,
    nope: int,
    config: DecodeAttentionConfig,
    interpret: bool,
) -> jax.Array:
    """Each head's product with rows `nope` on of its matrix.

    attended: [rows, heads, rank]. kv_up: [heads, nope + value, rank]. Returns the like of
    `attended`, [rows, heads, value].
    """
    rows, heads, _ = attended.shape
    value_dim = kv_up.shape[1] - nope
    tiles = value_dim // min(config.value_out, value_dim)
    return pl.pallas_call(
        functools.partial(
            _values_kernel,
            nope=nope,
            config=config,
            early=config.early_launch and not interpret,
        ),
        grid=(heads, tiles, pl.cdiv(rows, config.product_rows)),
        out_shape=jax.ShapeDtypeStruct((rows, heads, value_dim), attended.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="latent_values",
    )(attended, kv_up)


def combine_and_map_values(
    partials: Partials,
    lengths: jax.Array,
    kv_up: jax.Array,
    *,
    nope: int,
    tokens: int,
    capacity: int,
    window: int,
    dtype: jax.typing.DTypeLike,
    config: DecodeAttentionConfig,
    interpret: bool,
) -> jax.Array:
    """`combine`, then `map_values`, in one kernel; for the first block of rows only."""
    _, rows, heads, _ = partials[0].shape
    value_dim = kv_up.shape[1] - nope
    return pl.pallas_call(
        functools.partial(
            _combined_values_kernel,
            tokens=tokens,
            nope=nope,
            capacity=capacity,
            window=window,
            config=config,
            early=config.early_launch and not interpret,
        ),
        grid=(heads, value_dim // min(config.value_out, value_dim)),
        out_shape=jax.ShapeDtypeStruct((rows, heads, value_dim), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="latent_combine_values",
    )(lengths, *partials, kv_up)
