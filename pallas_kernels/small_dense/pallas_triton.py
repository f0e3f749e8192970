"""Triton kernels: one for a single row, one for any number of rows, one for the norm alone.

All parts of a call run in one grid, each program on a tile of one part's outputs over all inputs;
nothing is summed across programs. `vector` multiplies and adds in float32, with every weight of a
program on its way before the row is normalized. `rows` uses the matrix unit as `[out, in] x [in,
rows]`: the same instructions over the same steps for a row, however many rows there are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.draft_experts.arithmetic import fma
from pallas_kernels.early_launch import let_next_start
from pallas_kernels.small_dense.arithmetic import (
    affine,
    ceil_div,
    epilogue,
    mean_and_scale,
    power_of_two,
    read_epilogue,
    sides,
    tiles,
)
from pallas_kernels.small_dense.config import LANE, LEAST_BLOCK, SmallDenseConfig
from pallas_kernels.small_dense.operands import Dense, Norm

_MOST_BLOCK_ROWS = 64
_WARP_INPUTS = 32 * LANE
_SHARED_BYTES = 200 * 1024  # of shared memory that a program may fill with tiles on their way


def _vector_out(part: Dense, config: SmallDenseConfig) -> int:
    return config.vector_out if part.up is None else max(config.vector_out // 2, 1)


def _vector_kernel(*refs, tree, num_inputs, spans, keep_normed, config, interpret):
    """One part's tile of outputs for the only row; refs: inputs as `tree` says, then outputs."""
    x_ref, norm, parts = jax.tree.unflatten(tree, refs[:num_inputs])
    out_refs = refs[num_inputs:]
    num_in = x_ref.shape[1]
    width = min(_WARP_INPUTS * config.vector_warps, power_of_two(num_in))
    starts = list(range(0, num_in, width))
    tile = let_next_start(pl.program_id(0), config.early_launch and not interpret)

    def columns(start):
        index = start + lax.broadcasted_iota(jnp.int32, (width,), 0)
        return index, None if start + width <= num_in else index < num_in

    def read(ref, start):
        index, mask = columns(start)
        places = (index,) if len(ref.shape) == 1 else (jnp.zeros_like(index), index)
        # Zeros beyond the row: nothing is added to sums there.
        return plgpu.load(ref.at[places], mask=mask, other=None if mask is None else 0.0)

    def inputs():
        """The row's pieces, normalized, as functions that load what they need."""
        if norm is None:
            return [lambda s=start: read(x_ref, s).astype(jnp.float32) for start in starts]
        raw = [read(x_ref, start).astype(jnp.float32) for start in starts]
        weights = [read(norm.weight, start).astype(jnp.float32) for start in starts]
        biases = [None] * len(starts)
        if norm.bias is not None:
            biases = [read(norm.bias, start).astype(jnp.float32) for start in starts]
        masked = [(values, columns(start)[1]) for values, start in zip(raw, starts, strict=True)]
        mean, scale = mean_and_scale(masked, num_in, norm)
        # Beyond the row the weights of the norm are zeros, its bias too. The result is not rounded
        # to x's dtype: that takes slow instructions, and a single row need not match any bits.
        return [
            lambda v=v, w=w, b=b: affine(v, mean, scale, w, b)
            for v, w, b in zip(raw, weights, biases, strict=True)
        ]

    for number, (part, (begin, end)) in enumerate(zip(parts, spans, strict=True)):

        @pl.when((tile >= begin) & (tile < end))
        def _(number=number, part=part, begin=begin):
            block = _vector_out(part, config)
            places_out = (tile - begin) * block + lax.broadcasted_iota(jnp.int32, (block,), 0)
            used = places_out < part.outputs
            # Lines past the last read the last one again: it is in the cache.
            lines = jnp.minimum(places_out, part.outputs - 1)

            def read_weights(start):
                index, mask = columns(start)
                shape = (block, width)
                index = jnp.broadcast_to(index[None], shape)
                if mask is not None:
                    mask = jnp.broadcast_to(mask[None], shape)
                places = (jnp.broadcast_to(lines[:, None], shape), index)
                other = None if mask is None else 0.0
                return [plgpu.load(side.at[places], mask=mask, other=other) for side in sides(part)]

            row = jnp.zeros_like(lines)
            loaded = [read_weights(start) for start in starts[: config.vector_ahead]]
            values = read_epilogue(part, row, lines, used)
            if not interpret:
                # The compiler would move loads behind the first uses of x otherwise.
                plgpu.debug_barrier()
            pieces = inputs()
            sums = [jnp.zeros((block, width), jnp.float32) for _ in sides(part)]
            dtype = part.compute_dtype(x_ref.dtype)
            for step, piece in enumerate(pieces):
                loaded += [read_weights(s) for s in starts[step + config.vector_ahead :][:1]]
                x = jnp.broadcast_to(piece()[None], (block, width))
                for side, weight in enumerate(loaded.pop(0)):
                    weight = weight.astype(dtype).astype(jnp.float32)
                    sums[side] = fma(weight, x, sums[side], interpret)
            y = epilogue(values, [jnp.sum(total, axis=1) for total in sums])
            plgpu.store(out_refs[number].at[row, places_out], y, mask=used)

            if keep_normed and begin == 0:

                @pl.when(tile == 0)
                def _():
                    for start, piece in zip(starts, pieces, strict=True):
                        index, mask = columns(start)
                        plgpu.store(
                            out_refs[-1].at[jnp.zeros_like(index), index],
                            piece().astype(x_ref.dtype),
                            mask=mask,
                        )


def _rows_kernel(*refs, tree, num_inputs, spans, block_rows, config, interpret):
    """One part's tile of outputs for a block of rows."""
    x_ref, parts = jax.tree.unflatten(tree, refs[:num_inputs])
    out_refs = refs[num_inputs:]
    num_rows, num_in = x_ref.shape
    block_out, block_in = config.rows_out, config.rows_in
    tile = let_next_start(pl.program_id(1), config.early_launch and not interpret)
    rows = pl.program_id(0) * block_rows + lax.broadcasted_iota(jnp.int32, (block_rows,), 0)

    for part, out_ref, (begin, end) in zip(parts, out_refs, spans, strict=True):

        @pl.when((tile >= begin) & (tile < end))
        def _(part=part, out_ref=out_ref, begin=begin):
            places_out = lax.broadcasted_iota(jnp.int32, (block_out,), 0)
            places_out += (tile - begin) * block_out
            lines = jnp.minimum(places_out, part.outputs - 1)
            dtype = part.compute_dtype(x_ref.dtype)
            column = lax.broadcasted_iota(jnp.int32, (block_in,), 0)

            def step(i, sums):
                index = i * block_in + column
                shape = (block_rows, block_in)
                x = plgpu.load(
                    x_ref.at[
                        jnp.broadcast_to(rows[:, None], shape),
                        jnp.broadcast_to(index[None], shape),
                    ],
                    mask=jnp.broadcast_to((rows < num_rows)[:, None], shape),
                    other=0.0,
                )
                shape = (block_out, block_in)
                places = (
                    jnp.broadcast_to(lines[:, None], shape),
                    jnp.broadcast_to(index[None], shape),
                )
                return tuple(
                    total + _dot(plgpu.load(side.at[places]), x, dtype)
                    for side, total in zip(sides(part), sums, strict=True)
                )

            zeros = tuple(jnp.zeros((block_out, block_rows), jnp.float32) for _ in sides(part))
            sums = lax.fori_loop(0, num_in // block_in, step, zeros)
            shape = (block_rows, block_out)
            row_index = jnp.broadcast_to(rows[:, None], shape)
            places_out, lines = (jnp.broadcast_to(v[None], shape) for v in (places_out, lines))
            used = (row_index < num_rows) & (places_out < part.outputs)
            values = read_epilogue(part, row_index, lines, used)
            y = epilogue(values, [total.T for total in sums])
            plgpu.store(out_ref.at[row_index, places_out], y, mask=used)


def _dot(weight, x, dtype):
    """[out, in] x [rows, in] -> float32 [out, rows]."""
    return lax.dot_general(
        weight.astype(dtype),
        x.astype(dtype),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _norm_kernel(*refs, tree, num_inputs, config, interpret):
    """One row."""
    x_ref, norm = jax.tree.unflatten(tree, refs[:num_inputs])
    (out_ref,) = refs[num_inputs:]
    num_in = x_ref.shape[1]
    row = let_next_start(pl.program_id(0), config.early_launch and not interpret)
    index = lax.broadcasted_iota(jnp.int32, (power_of_two(num_in),), 0)
    mask = None if index.shape[0] == num_in else index < num_in
    other = None if mask is None else 0.0
    line = jnp.full(index.shape, row, jnp.int32)
    x = plgpu.load(x_ref.at[line, index], mask=mask, other=other).astype(jnp.float32)
    weight, bias = (
        None if ref is None else plgpu.load(ref.at[index], mask=mask, other=other)
        for ref in (norm.weight, norm.bias)
    )
    mean, scale = mean_and_scale([(x, mask)], num_in, norm)
    bias = None if bias is None else bias.astype(jnp.float32)
    y = affine(x, mean, scale, weight.astype(jnp.float32), bias)
    plgpu.store(out_ref.at[line, index], y.astype(x_ref.dtype), mask=mask)


def vector(
    x: jax.Array,
    parts: Sequence[Dense],
    norm: Norm | None = None,
    *,
    keep_normed: bool = False,
    config: SmallDenseConfig,
    interpret: bool = False,
) -> list[jax.Array]:
    """Products of a single row, normalized first if asked.

    x: [1, in]. parts: `scale` [1, 1], `add` [1, out]. keep_normed: also return the normalized
    row. Returns [1, out] of every part, then [1, in] if asked.
    """
    leaves, tree = jax.tree.flatten((x, norm, tuple(parts)))
    spans = tiles(parts, lambda part: _vector_out(part, config))
    out_shape = [jax.ShapeDtypeStruct((1, part.outputs), part.dtype) for part in parts]
    if keep_normed:
        out_shape.append(jax.ShapeDtypeStruct(x.shape, x.dtype))
    return pl.pallas_call(
        functools.partial(
            _vector_kernel,
            tree=tree,
            num_inputs=len(leaves),
            spans=spans,
            keep_normed=keep_normed,
            config=config,
            interpret=interpret,
        ),
        grid=(spans[-1][1],),
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=config.vector_warps, num_stages=1),
        interpret=interpret,
        name="dense_vector",
    )(*leaves)


def rows(
    x: jax.Array,
    parts: Sequence[Dense],
    *,
    config: SmallDenseConfig,
    interpret: bool = False,
) -> list[jax.Array]:
    """Products of x [rows, in]: [rows, out] of every part; `scale` is [rows, 1]."""
    num_rows = x.shape[0]
    block_rows = min(max(power_of_two(num_rows), LEAST_BLOCK), _MOST_BLOCK_ROWS)
    leaves, tree = jax.tree.flatten((x, tuple(parts)))
    spans = tiles(parts, lambda part: config.rows_out)
    most_lines = max(len(sides(part)) for part in parts) * config.rows_out + block_rows
    stage_bytes = (
        most_lines * config.rows_in * max(x.dtype.itemsize, parts[0].weight.dtype.itemsize)
    )
    # How far loads run ahead changes no sum, so it may depend on the number of rows.
    stages = max(min(config.rows_stages, _SHARED_BYTES // stage_bytes), 2)
    return pl.pallas_call(
        functools.partial(
            _rows_kernel,
            tree=tree,
            num_inputs=len(leaves),
            spans=spans,
            block_rows=block_rows,
            config=config,
            interpret=interpret,
        ),
        # Blocks of rows follow each other, so that a weight comes from memory once.
        grid=(ceil_div(num_rows, block_rows), spans[-1][1]),
        out_shape=[jax.ShapeDtypeStruct((num_rows, p.outputs), p.dtype) for p in parts],
        compiler_params=plgpu.CompilerParams(num_warps=config.rows_warps, num_stages=stages),
        interpret=interpret,
        name="dense_rows",
    )(*leaves)


def normalize(
    x: jax.Array, norm: Norm, *, config: SmallDenseConfig, interpret: bool = False
) -> jax.Array:
    """The norm of each row of x [rows, in], in x's dtype."""
    leaves, tree = jax.tree.flatten((x, norm))
    return pl.pallas_call(
        functools.partial(
            _norm_kernel, tree=tree, num_inputs=len(leaves), config=config, interpret=interpret
        ),
        grid=(x.shape[0],),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=config.norm_warps, num_stages=1),
        interpret=interpret,
        name="norm_rows",
    )(*leaves)
