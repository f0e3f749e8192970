"""The two orders of inputs that the nested kernels read, made by one kernel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning
from pallas_kernels.early_launch import let_next_start, supports_early_launch
from pallas_kernels.nested_ffn.arithmetic import arranged_place
from pallas_kernels.nested_ffn.config import MOST_ROW_STEP
from pallas_kernels.nested_ffn.tiles import index

_TILE = 256  # inputs of a program


def _kernel(block_choices_ref, x_ref, arranged_ref, inputs_ref, *, top_k, block_in, early_launch):
    """A tile of a block's inputs or, in the programs after all blocks, of a row's."""
    line, tile = let_next_start(pl.program_id(0), early_launch), pl.program_id(1)
    num_rows, hidden = x_ref.shape
    num_blocks, row_steps, _, row_step = inputs_ref.shape

    @pl.when(line < num_blocks)
    def _():
        shape = (_TILE, row_step)
        row, column = index(shape, 1), tile * _TILE + index(shape, 0)
        block = jnp.full(shape, line, jnp.int32)
        for step in range(row_steps):
            place = jnp.full((row_step,), line, jnp.int32), step * row_step + index((row_step,), 0)
            # Empty places have the number of choices.
            source = plgpu.load(block_choices_ref.at[place]) // top_k
            source = jnp.broadcast_to(source[None], shape)
            inside = column < hidden
            value = plgpu.load(
                x_ref.at[source, column], mask=inside & (source < num_rows), other=0.0
            )
            places = (block, jnp.full(shape, step, jnp.int32), column, row)
            plgpu.store(inputs_ref.at[places], value, mask=inside)

    @pl.when(line >= num_blocks)
    def _():
        column = tile * _TILE + index((_TILE,), 0)
        inside = column < hidden
        row = jnp.full((_TILE,), line - num_blocks, jnp.int32)
        value = plgpu.load(x_ref.at[row, column], mask=inside, other=0.0)
        plgpu.store(arranged_ref.at[row, arranged_place(column, block_in)], value, mask=inside)


def arrange_inputs(
    x: jax.Array, block_choices: jax.Array, top_k: int, block_in: int, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """x as `arithmetic.arrange` has it, and each block's inputs with its rows side by side.

    x: [rows, hidden], hidden a multiple of block_in. block_choices: of `Grouping`, blocks of
    r rows. Returns [rows, hidden] and [blocks, r / s, hidden, s] with s = min(r, `MOST_ROW_STEP`),
    zeros where a place is empty. interpret: run the kernel on any device, slowly.
    """
    num_rows, hidden = x.shape
    num_blocks, block_rows = block_choices.shape
    row_step = min(block_rows, MOST_ROW_STEP)
    return pl.pallas_call(
        functools.partial(
            _kernel,
            top_k=top_k,
            block_in=block_in,
            early_launch=not interpret and supports_early_launch(tuning.device_kind()),
        ),
        grid=(num_blocks + num_rows, pl.cdiv(hidden, _TILE)),
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((num_blocks, block_rows // row_step, hidden, row_step), x.dtype),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="nested_inputs",
    )(block_choices, x)
