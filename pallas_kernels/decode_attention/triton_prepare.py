"""Triton kernels before attention: rotation, queries in latent space, writing into the cache.

The cache is updated in place. Everything is per token but the mapping of queries, a product whose
weights fill the matrix unit's long side, so that the number of tokens changes no token's bits.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.decode_attention.config import DecodeAttentionConfig
from pallas_kernels.early_launch import let_next_start


def index(shape: tuple[int, ...], axis: int, start=0, step: int = 1) -> jax.Array:
    """start + step * (position along axis), int32 `shape`."""
    return start + step * lax.broadcasted_iota(jnp.int32, shape, axis)


def tile(shape: tuple[int, int], row, column, *between) -> tuple:
    """Index of a [rows, columns] tile at (row, column), with scalars for the axes between.

    Index arrays, not slices, because a slice that hangs over the end would be moved.
    """
    return index(shape, 0, row), *between, index(shape, 1, column)


def dot(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    """Product over one axis of each operand, in y's dtype with a float32 result."""
    return lax.dot_general(
        x.astype(y.dtype),
        y,
        (((x_axis,), (y_axis,)), ((), ())),
        precision=lax.Precision.HIGHEST if y.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _pairs(shape, start, *, interleaved):
    """Channels of the first and the second of each rotated pair along `shape`'s last axis."""
    axis = len(shape) - 1
    if interleaved:
        return index(shape, axis, start, 2), index(shape, axis, start + 1, 2)
    return index(shape, axis, start), index(shape, axis, start + shape[axis])


def _rotated(a, b, cos, sin, dtype):
    """Both channels of each pair, which are rounded to `dtype` before."""
    a, b = (value.astype(dtype).astype(jnp.float32) for value in (a, b))
    return a * cos - b * sin, b * cos + a * sin


def _store_rotated(
    source, target, at, start, cos, sin, *, interleaved, dtype, at_target, mask=None
):
    """Reads pairs of `source` at row `at`, channel `start` on; writes them at `at_target`."""
    shape = cos.shape
    pairs = _pairs(shape, start, interleaved=interleaved)
    a, b = (plgpu.load(source.at[(*at, channel)], mask=mask) for channel in pairs)
    for value, channel in zip(
        _rotated(a, b, cos, sin, dtype), _pairs(shape, 0, interleaved=interleaved), strict=True
    ):
        plgpu.store(target.at[(*at_target, channel)], value.astype(target.dtype), mask=mask)


def _latent_kernel(
    lengths_ref,
    q_ref,
    compressed_ref,
    norm_ref,
    kv_up_ref,
    cos_ref,
    sin_ref,
    _latent_ref,
    _rope_ref,
    q_latent_ref,
    q_rope_ref,
    latent_ref,
    rope_ref,
    *,
    tokens,
    interleaved,
    eps,
    dtype,
    config,
    early,
):
    """First one program per (head, tile of the rank, block of tokens), then one per token.

    q_ref: [rows, heads, head_dim]. compressed_ref: [rows, rank + rope]. kv_up_ref: [heads, nope +
    value, rank]. cos_ref, sin_ref: [rows, rope / 2].
    """
    rows, heads, rank = q_latent_ref.shape
    rope_dim = q_rope_ref.shape[2]
    nope = q_ref.shape[2] - rope_dim
    out_dim = min(config.product_out, rank)
    block = config.product_rows
    tiles = rank // out_dim
    products = heads * tiles * pl.cdiv(rows, block)
    program = let_next_start(pl.program_id(0), early)

    @pl.when(program < products)
    def _():
        column = program % tiles * out_dim
        head = program // tiles % heads
        first = program // (tiles * heads) * block
        weight = plgpu.load(kv_up_ref.at[head, pl.ds(0, nope), pl.ds(column, out_dim)])
        shape = (block, nope)
        used = index(shape, 0, first) < rows
        q = plgpu.load(q_ref.at[tile(shape, first, 0, head)], mask=used, other=0.0)
        shape = (block, out_dim)
        plgpu.store(
            q_latent_ref.at[tile(shape, first, column, head)],
            dot(weight, q.astype(dtype), 0, 1).T.astype(dtype),
            mask=index(shape, 0, first) < rows,
        )

    @pl.when(program >= products)
    def _():
        row = program - products
        position = lengths_ref[row // tokens] + row % tokens
        options = dict(interleaved=interleaved, dtype=dtype)
        cos, sin = cos_ref[row, :], sin_ref[row, :]
        num_heads = pl.next_power_of_2(heads)
        shape = (num_heads, rope_dim // 2)
        head = index(shape, 0)
        at = (jnp.full(shape, row, jnp.int32), head)
        _store_rotated(
            q_ref,
            q_rope_ref,
            at,
            nope,
            jnp.broadcast_to(cos[None], shape),
            jnp.broadcast_to(sin[None], shape),
            at_target=at,
            mask=head < heads,
            **options,
        )
        x = compressed_ref[row, pl.ds(0, rank)].astype(dtype).astype(jnp.float32)
        x = x * lax.rsqrt(jnp.sum(x * x) / rank + eps)
        x = (x * norm_ref[:].astype(jnp.float32)).astype(dtype)

        @pl.when(position < latent_ref.shape[1])
        def _():
            place = (row // tokens, position)
            plgpu.store(latent_ref.at[(*place, pl.ds(0, rank))], x.astype(latent_ref.dtype))
            _store_rotated(
                compressed_ref, rope_ref, (row,), rank, cos, sin, at_target=place, **options
            )


def prepare_latent(
    q: jax.Array,
    compressed: jax.Array,
    norm_weight: jax.Array,
    kv_up: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    latent: jax.Array,
    rope: jax.Array,
    lengths: jax.Array,
    *,
    interleaved: bool,
    eps: float,
    dtype: jax.typing.DTypeLike,
    config: DecodeAttentionConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Queries in latent space, their rotated part, and the cache with the new entries.

    Arguments as in `reference.attend_latent`. The queries are `dtype` [batch * tokens, heads, rank]
    and [batch * tokens, heads, rope_dim].
    """
    batch, tokens, heads, head_dim = q.shape
    rank, rope_dim = latent.shape[2], rope.shape[2]
    rows = batch * tokens
    tiles = rank // min(config.product_out, rank)
    products = heads * tiles * pl.cdiv(rows, config.product_rows)
    return pl.pallas_call(
        functools.partial(
            _latent_kernel,
            tokens=tokens,
            interleaved=interleaved,
            eps=eps,
            dtype=dtype,
            config=config,
            early=config.early_launch and not interpret,
        ),
        grid=(products + rows,),
        out_shape=[
            jax.ShapeDtypeStruct((rows, heads, rank), dtype),
            jax.ShapeDtypeStruct((rows, heads, rope_dim), dtype),
            jax.ShapeDtypeStruct(latent.shape, latent.dtype),
            jax.ShapeDtypeStruct(rope.shape, rope.dtype),
        ],
        input_output_aliases={7: 2, 8: 3},
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=1),
        interpret=interpret,
        name="latent_prepare",
    )(
        lengths,
        q.reshape(rows, heads, head_dim),
        compressed.reshape(rows, rank + rope_dim),
        norm_weight,
        kv_up,
        cos.reshape(rows, rope_dim // 2),
        sin.reshape(rows, rope_dim // 2),
        latent,
        rope,
    )


def _grouped_kernel(
    lengths_ref,
    q_ref,
    k_ref,
    v_ref,
    cos_ref,
    sin_ref,
    _keys_ref,
    _values_ref,
    q_out_ref,
    keys_ref,
    values_ref,
    *,
    tokens,
    interleaved,
    dtype,
    early,
):
    """One head of the queries, the keys or the values of one token."""
    row, part = let_next_start(pl.program_id(0), early), pl.program_id(1)
    heads, kv_heads = q_ref.shape[1], k_ref.shape[1]
    position = lengths_ref[row // tokens] + row % tokens
    fits = position < keys_ref.shape[1]
    cos, sin = cos_ref[row, :], sin_ref[row, :]
    options = dict(interleaved=interleaved, dtype=dtype)

    @pl.when(part < heads)
    def _():
        at = (row, part)
        _store_rotated(q_ref, q_out_ref, at, 0, cos, sin, at_target=at, **options)

    @pl.when((part >= heads) & (part < heads + kv_heads) & fits)
    def _():
        head = part - heads
        place = (row // tokens, position, head)
        _store_rotated(k_ref, keys_ref, (row, head), 0, cos, sin, at_target=place, **options)

    @pl.when((part >= heads + kv_heads) & fits)
    def _():
        head = part - heads - kv_heads
        size = v_ref.shape[2]
        value = v_ref[row, head, pl.ds(0, size)].astype(dtype).astype(values_ref.dtype)
        plgpu.store(values_ref.at[row // tokens, position, head, pl.ds(0, size)], value)


def prepare_grouped(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    *,
    interleaved: bool,
    dtype: jax.typing.DTypeLike,
    config: DecodeAttentionConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated queries, `dtype` [batch * tokens, heads, dim], and the cache with the new entries.

    Arguments as in `reference.attend_grouped`.
    """
    batch, tokens, heads, dim = q.shape
    kv_heads = k.shape[2]
    rows = batch * tokens
    return pl.pallas_call(
        functools.partial(
            _grouped_kernel,
            tokens=tokens,
            interleaved=interleaved,
            dtype=dtype,
            early=config.early_launch and not interpret,
        ),
        grid=(rows, heads + 2 * kv_heads),
        out_shape=[
            jax.ShapeDtypeStruct((rows, heads, dim), dtype),
            jax.ShapeDtypeStruct(keys.shape, keys.dtype),
            jax.ShapeDtypeStruct(values.shape, values.dtype),
        ],
        input_output_aliases={6: 1, 7: 2},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="grouped_prepare",
    )(
        lengths,
        q.reshape(rows, heads, dim),
        k.reshape(rows, kv_heads, dim),
        v.reshape(rows, kv_heads, v.shape[3]),
        cos.reshape(rows, dim // 2),
        sin.reshape(rows, dim // 2),
        keys,
        values,
    )
