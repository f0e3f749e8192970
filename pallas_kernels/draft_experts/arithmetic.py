"""INT4 weights times activations rounded to 8 bits, in exact integer products.

The arithmetic is chosen so that decoding costs little more than one instruction a weight; at the
memory's full speed there is time for about two integer instructions. Per word of 8 weights:

- a mask and a shift leave two sets of four 3-bit selectors; two byte permutes look up the eight
  magnitudes in a table of eight bytes;
- two more permutes spread the eight sign bits over eight bytes, two exclusive-ors apply them;
- two 4-way byte products (`dp4a`) multiply with the activations and add.

A table byte m stands for the magnitude `(m + 1/2) * step`, `step = largest entry / 127.5`. Negating
is then flipping all bits: `~m + 1/2 = -(m + 1/2)`. The halves add up to half the sum of the
activations, a number per block that is added once. Rounding the table costs at most 0.4 % of its
largest entry, rounding activations per block of 32 (hidden) or 16 (inner) inputs about 0.5 % of
their root mean square; the 4-bit weights themselves are off by about 11 %.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

WORD_INPUTS = 8
_ROUND = 12582912.0
_ROUND_BITS = 0x4B400000  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits

_WORD_PRODUCT_ASM = """
{
  .reg .b32 sel, hi, m0, m1, s, n0, n1, p;
  and.b32 sel, $1, 0x77777777;
  shr.u32 hi, sel, 16;
  prmt.b32 m0, $4, $5, sel;
  prmt.b32 m1, $4, $5, hi;
  shl.b32 s, $1, 4;
  prmt.b32 n0, s, $1, 0xD9C8;
  prmt.b32 n1, s, $1, 0xFBEA;
  xor.b32 m0, m0, n0;
  xor.b32 m1, m1, n1;
  dp4a.s32.s32 p, m0, $2, 0;
  dp4a.s32.s32 $0, m1, $3, p;
}
"""


def word_product(words, x_low, x_high, table_low, table_high, interpret):
    """Sum over each word's 8 weights of `sign(m + 1/2) - 1/2` times activation, int32.

    words, x_low, x_high: int32, same shape; activations of inputs 0..3 and 4..7 as signed bytes.
    table_low, table_high: int32 scalars, magnitude bytes of buckets 0..3 and 4..7.
    """
    if not interpret:
        args = [
            words,
            x_low,
            x_high,
            jnp.broadcast_to(table_low, words.shape),
            jnp.broadcast_to(table_high, words.shape),
        ]
        [out] = plgpu.elementwise_inline_asm(
            _WORD_PRODUCT_ASM,
            args=args,
            constraints="=r,r,r,r,r,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(words.shape, jnp.int32)],
        )
        return out
    total = jnp.zeros(words.shape, jnp.int32)
    for j in range(WORD_INPUTS):
        bucket = (words >> (4 * j)) & 7
        table = jnp.where(bucket < 4, table_low, table_high)
        magnitude = (table >> (8 * (bucket & 3))) & 0xFF
        signed = jnp.where((words >> (4 * j + 3)) & 1 != 0, ~magnitude, magnitude)
        byte = 8 * (j % 4)
        activation = ((x_low if j < 4 else x_high) << (24 - byte)) >> 24
        total += signed * activation
    return total


def fma(a, b, c, interpret):
    """a * b + c, float32, same shapes, in one instruction: the compiler may not contract them."""
    if interpret:
        return a * b + c
    [out] = plgpu.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;",
        args=[a, b, c],
        constraints="=f,f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(a.shape, jnp.float32)],
    )
    return out


def round_blocks(values, interpret):
    """Rounds float32 [blocks, width] to signed bytes, one scale a block, largest to 127.

    Returns low, high: int32 [blocks * width / 8], bytes of inputs 0..3 and 4..7 of each word;
    scale and half_sum (half the sum of the block's integers): float32 [blocks].
    """
    blocks, width = values.shape
    largest = jnp.max(jnp.abs(values), axis=1)
    inverse = jnp.where(largest > 0, 127 / largest, 0.0)
    inverse = jnp.broadcast_to(inverse[:, None], values.shape)
    shifted = fma(values, inverse, jnp.full(values.shape, _ROUND), interpret)
    integers = lax.bitcast_convert_type(shifted, jnp.int32)
    half_sum = 0.5 * jnp.sum(integers - _ROUND_BITS, axis=1).astype(jnp.float32)
    integers = (integers & 0xFF).reshape(blocks * width // WORD_INPUTS, 2, 4)
    shift = 8 * lax.broadcasted_iota(jnp.int32, integers.shape, 2)
    halves = jnp.sum(integers << shift, axis=2)
    is_high = lax.broadcasted_iota(jnp.int32, halves.shape, 1) == 1
    low = jnp.sum(jnp.where(is_high, 0, halves), axis=1)
    high = jnp.sum(jnp.where(is_high, halves, 0), axis=1)
    return low, high, largest * (1 / 127), half_sum


def pack_tables(tables: jax.Array) -> dict[str, jax.Array]:
    """The kernels' form of the magnitude tables; worth keeping beside the codes.

    tables: float32 [num_experts, 3, 8]. Returns `table_bytes` int32 [num_experts, 3, 2], bytes of
    buckets 0..3 and 4..7, and `table_steps` float32 [num_experts, 3]: entry b is about
    `(byte b + 1/2) * step`.
    """
    steps = jnp.maximum(tables.max(-1), 1e-30) / 127.5
    # An entry is at most 127.5 steps; truncating rounds to the nearest number and a half.
    numbers = jnp.clip((tables / steps[..., None]).astype(jnp.int32), 0, 127)
    shifts = 8 * jnp.arange(4, dtype=jnp.int32)
    packed = (numbers.reshape(*steps.shape, 2, 4) << shifts).sum(-1, dtype=jnp.int32)
    return {"table_bytes": packed, "table_steps": steps}


_LARGEST = 1e30


def finite(total: jax.Array) -> jax.Array:
    """`total`, float32, with 0 in the place of what no sum of sound experts can be.

    A draft that overflows would leave NaN in the KV behind the tokens that verification writes, and
    attention's weight of 0 for such an entry times NaN is NaN in the target's own output.
    """
    return jnp.where(jnp.abs(total) < _LARGEST, total, 0.0)
