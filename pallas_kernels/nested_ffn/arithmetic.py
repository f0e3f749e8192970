"""Rebuilding bf16 weights from draft codes and remainders, several at a time.

A weight is `sign << 15 | (base[bucket] + remainder)`. Per group of weights the eight bases are kept
as four registers: their low bytes (two registers) and their high bytes (two). A byte permute takes
its selectors from nibbles, so that the codes themselves, without their sign bits, look up four
bytes at once. Per word of eight weights:

- a mask and a shift leave two sets of four selectors; four permutes look up low and high bytes;
- two permutes spread the sign bits, two logical operations put them into the high bytes;
- four permutes pair low and high bytes, four widen the remainders, four additions add two weights
  each: sums have 15 bits, so that nothing is carried from one weight into the other or the sign.

That is 23 instructions for eight weights; at the memory's full speed there is time for 50.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.nested import BASE_FRACTIONS, LEAST_SCALE_BITS, REMAINDERS

WORD_INPUTS = 8
_SIGNS = 0x80808080 - (1 << 32)
_LEAST_SCALE = 2.0 ** ((LEAST_SCALE_BITS >> 7) - 127)


def _permute(low, high, selector, interpret):
    """Bytes of `high:low` chosen by the four low nibbles of `selector`, int32.

    selector: like `low` with bit 3 of each nibble clear, or an int, where a set bit 3 repeats the
    chosen byte's sign bit instead. high: like `low`, or None for zero.
    """
    if not interpret:
        args = [low] + ([] if high is None else [high])
        fixed = isinstance(selector, int)
        args += [] if fixed else [selector]
        second = "0" if high is None else "$2"
        third = hex(selector) if fixed else f"${len(args)}"
        [out] = plgpu.elementwise_inline_asm(
            f"prmt.b32 $0, $1, {second}, {third};",
            args=args,
            constraints="=r" + ",r" * len(args),
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(low.shape, jnp.int32)],
        )
        return out
    high = jnp.zeros_like(low) if high is None else high
    out = jnp.zeros_like(low)
    for byte in range(4):
        if isinstance(selector, int):
            nibble = (selector >> (4 * byte)) & 0xF
            shift = 8 * (nibble & 3)
            value = (high if nibble & 4 else low) >> shift
            value = (value << 24) >> 31 if nibble & 8 else value
            out |= (value & 0xFF) << (8 * byte)
            continue
        nibble = selector >> (4 * byte)
        word = jnp.where((nibble & 4) != 0, high, low)
        out |= ((word >> (8 * (nibble & 3))) & 0xFF) << (8 * byte)
    return out


def _round_pair(first, second, interpret):
    """Two float32 rounded to bf16 (nearest, ties to even), in the low and high half of an int32."""
    if not interpret:
        [out] = plgpu.elementwise_inline_asm(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            args=[first, second],
            constraints="=r,f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(first.shape, jnp.int32)],
        )
        return out
    low, high = (
        lax.bitcast_convert_type(value.astype(jnp.bfloat16), jnp.uint16).astype(jnp.int32)
        for value in (first, second)
    )
    return high << 16 | low


def _usable(scales):
    """bf16 -> float32, with 0 for scales that are too small to have bases."""
    scales = scales.astype(jnp.float32)
    return jnp.where(scales < _LEAST_SCALE, 0.0, scales)


def least_base(scales, interpret):
    """Base of bucket 0 for bf16 scales, int32."""
    edge = _usable(scales) * float(BASE_FRACTIONS[0])
    return jnp.maximum(_round_pair(edge, jnp.zeros_like(edge), interpret) - REMAINDERS, 0)


def base_tables(scales, interpret):
    """Bytes of the bases of bf16 scales: low of buckets 0..3, 4..7, high of 0..3, 4..7, int32."""
    scales = _usable(scales)
    edges = [scales * float(fraction) for fraction in BASE_FRACTIONS]
    pairs = [_round_pair(*edges[i : i + 2], interpret) for i in range(0, len(edges), 2)]
    least = jnp.maximum((pairs[0] & 0xFFFF) - REMAINDERS, 0)
    pairs[0] = (pairs[0] & -0x10000) | least
    return tuple(
        _permute(pairs[i], pairs[i + 1], selector, interpret)
        for selector in (0x6420, 0x7531)
        for i in (0, 2)
    )


def decode_words(codes, low, high, tables, interpret):
    """Four int32 like `codes`, each the bf16 bits of two neighbouring weights of its word.

    codes: int32, words of eight codes. low, high: int32, remainder bytes of weights 0..3 and 4..7.
    tables: as of `base_tables`, shapes that broadcast to that of `codes`. Escapes come out
    as their signs and the base of bucket 0.
    """
    low_03, low_47, high_03, high_47 = (jnp.broadcast_to(table, codes.shape) for table in tables)
    selectors = codes & 0x77777777
    shifted = codes << 4  # the sign of code 2i, as bit 7 of byte i
    pairs = []
    for half, remainders in enumerate((low, high)):
        chosen = lax.shift_right_logical(selectors, 16 * half)
        low_bytes = _permute(low_03, low_47, chosen, interpret)
        high_bytes = _permute(high_03, high_47, chosen, interpret)
        signs = _permute(shifted, codes, (0xD9C8, 0xFBEA)[half], interpret)
        high_bytes |= signs & _SIGNS
        for pair in range(2):
            base = _permute(low_bytes, high_bytes, (0x5140, 0x7362)[pair], interpret)
            pairs.append(base + _permute(remainders, None, (0x4140, 0x4342)[pair], interpret))
    return pairs


def escape_error(words, base, dtype):
    """What the dense decoding of escapes lacks: their weights minus the decoded ones, float32.

    words: the list's, with the bits of the weight in the high half; base: of bucket 0; int32 of one
    shape. dtype: products take this type.
    """
    sign = words & -(1 << 31)
    weight = lax.bitcast_convert_type(words & -(1 << 16), jnp.float32)
    decoded = lax.bitcast_convert_type(base << 16 | sign, jnp.float32)
    if dtype == jnp.float16:
        weight, decoded = (value.astype(dtype).astype(jnp.float32) for value in (weight, decoded))
    return weight - decoded


def side_by_side(tiles):
    """Joins `2^n` equal `[rows, width]` tiles to `[rows, 2^n * width]`, in order."""
    while len(tiles) > 1:
        tiles = [
            jnp.concatenate([tile[..., None] for tile in two], axis=2)
            .transpose(0, 2, 1)
            .reshape(two[0].shape[0], 2 * two[0].shape[1])
            for two in zip(tiles[::2], tiles[1::2], strict=True)
        ]
    return tiles[0]


def tile_of(pairs):
    """Weights of `decode_words` as one bf16 `[rows, 8 * words]`, columns in `arranged` order."""

    def weights(bits):
        return lax.bitcast_convert_type(bits.astype(jnp.int16), jnp.bfloat16)

    tiles = []
    for pair in pairs:
        both = [
            weights(pair)[..., None],
            weights(lax.shift_right_logical(pair, 16))[..., None],
        ]
        tiles.append(jnp.concatenate(both, axis=2).reshape(pair.shape[0], 2 * pair.shape[1]))
    return side_by_side(tiles)


def arrange(inputs: jax.Array, block_in: int) -> jax.Array:
    """Reorders `[..., in]` within blocks of inputs like the columns of `tile_of`.

    Pair p of every word comes before pair p + 1 of any, so that decoding never moves a weight
    between the threads or within a register.
    """
    shape = (*inputs.shape[:-1], -1, block_in // WORD_INPUTS, WORD_INPUTS // 2, 2)
    return inputs.reshape(shape).swapaxes(-2, -3).reshape(inputs.shape)


def arranged_place(index, block_in: int):
    """Where `arrange` puts an index."""
    within = index % block_in
    pair = within // 2 % (WORD_INPUTS // 2)
    return index - within + pair * (block_in // 4) + within // WORD_INPUTS * 2 + within % 2
