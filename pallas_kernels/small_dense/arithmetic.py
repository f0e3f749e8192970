"""What the kernels of small dense products share: norm, epilogue, and who computes which tile."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.small_dense.operands import Dense, Norm


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(value: int) -> int:
    """Least power of two that is at least value."""
    return 1 << (value - 1).bit_length()


def mean_and_scale(pieces: list, num_in: int, norm: Norm) -> tuple[jax.Array | float, jax.Array]:
    """Mean (0 for RMSNorm) and reciprocal deviation of a row given in pieces.

    pieces: (float32 values, 0 beyond the row; bool, false beyond it, or None) each.
    """
    mean = 0.0
    if norm.bias is not None:
        mean = sum(jnp.sum(values) for values, _ in pieces) / num_in
        pieces = [
            (values - mean if mask is None else jnp.where(mask, values - mean, 0.0), mask)
            for values, mask in pieces
        ]
    square = sum(jnp.sum(values * values) for values, _ in pieces) / num_in
    return mean, lax.rsqrt(square + norm.eps)


def affine(values, mean, scale, weight, bias):
    """The last step of a norm, float32."""
    values = (values if bias is None else values - mean) * scale * weight
    return values if bias is None else values + bias


def read_epilogue(part: Dense, row_index, lines, used) -> Dense:
    """`part` with the values that its epilogue needs instead of references, None for weights.

    row_index, lines (outputs), used: the shape of the tile that the epilogue gets.
    """

    def bias(ref):
        return None if ref is None else plgpu.load(ref.at[lines]).astype(jnp.float32)

    def term(ref, columns):
        value = plgpu.load(ref.at[row_index, columns], mask=used, other=0.0)
        return value.astype(jnp.float32)

    def summed(ref):
        total = 0.0
        for number in range(ref.shape[1]):
            places = (row_index, jnp.full_like(lines, number), lines)
            total += plgpu.load(ref.at[places], mask=used, other=0.0).astype(jnp.float32)
        return total

    return dataclasses.replace(
        part,
        weight=None,
        up=None,
        bias=bias(part.bias),
        up_bias=bias(part.up_bias),
        scale=None if part.scale is None else term(part.scale, jnp.zeros_like(lines)),
        terms=None if part.terms is None else summed(part.terms),
        add=tuple(term(ref, lines) for ref in part.add),
    )


def epilogue(values: Dense, sums):
    """What follows the sums of a tile; values: see `read_epilogue`."""

    def side(total, bias):
        return total if bias is None else total + bias

    y = side(sums[0], values.bias)
    if len(sums) == 2:
        y = y / (1 + jnp.exp(-y)) * side(sums[1], values.up_bias)
    if values.scale is not None:
        y = y / (1 + jnp.exp(-values.scale))
    if values.terms is not None:
        y += values.terms
    for term in values.add:
        y += term
    return y.astype(values.dtype)


def sides(part: Dense) -> list:
    """The one or two weights of a part."""
    return [part.weight] if part.up is None else [part.weight, part.up]


def tiles(parts: Sequence[Dense], block_out: Callable[[Dense], int]) -> list[tuple[int, int]]:
    """The first program of each part and the one after its last; block_out: outputs of one."""
    spans, start = [], 0
    for part in parts:
        end = start + ceil_div(part.outputs, block_out(part))
        spans.append((start, end))
        start = end
    return spans
