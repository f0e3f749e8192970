"""The draft's 4-bit weight format: sign and magnitude bucket within a scaled group.

A weight matrix `[out, in]` is cut into groups of `group` neighbours along the input axis.

- scale: the group's largest magnitude, a bf16 number that occurs in the group.
- code: 4 bits. Bit 3 is the sign (1 negative), bits 0..2 the magnitude bucket.
- bucket: the number of the edges 1..7 that are not above the magnitude. The edges are
  `scale * (0, a, b, b + (1-b)/6, ..., b + 5(1-b)/6)`, `a = 0.03`, `b = 0.12`: the product is taken
  in float32 and rounded to bf16 (nearest, ties to even), so that every comparison is between two
  bf16 numbers.
- table: for each bucket the mean of `magnitude / scale` over the matrix, float32.
- value: `(-1)^sign * (table[bucket] * scale)`, one float32 product.
- packing: int32 word w of a row holds inputs 8w..8w+7, input 8w+j in bits 4j..4j+3.

The edges lie close enough together that, in every bucket but the lowest, a bf16 magnitude is
determined by its bucket and 8 more bits (a bucket spans at most two octaves, an octave has 128 bf16
numbers): a full-precision weight can be stored as its draft code and a small remainder.

Comparing bf16 magnitudes is comparing integers: read as 15-bit integers, non-negative bf16 numbers
are ordered like their values. That makes encoding a handful of vectorised 16-bit comparisons.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

NUM_BUCKETS = 8
CODES_PER_WORD = 8
_LOW_EDGE = 0.03  # a: below it a magnitude is "almost nothing" and the remainder may not fit
_FIRST_STEP = 0.12  # b: from here to the scale, six buckets of equal width
BUCKET_FRACTIONS = np.array(
    [0.0, _LOW_EDGE, *(_FIRST_STEP + step * (1 - _FIRST_STEP) / 6 for step in range(6))],
    dtype=np.float32,
)
_SIGN_BIT = 0x8000
_MAGNITUDE_MASK = 0x7FFF
_INFINITY_BITS = 0x7F80
_BLOCK_ELEMENTS = 1 << 17  # 256 KiB of bf16: a block and its temporaries stay in the CPU's cache


def group_edges(scales: np.ndarray) -> np.ndarray:
    """Lower bucket edges of each group.

    Args:
        scales: bf16, any shape `[...]`, not negative.

    Returns:
        bf16 `[..., 8]`.
    """
    edges = scales.astype(np.float32)[..., None] * BUCKET_FRACTIONS
    return edges.astype(ml_dtypes.bfloat16)


def encode(weight: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Encodes a weight matrix; see the module's text for the format.

    float32 and float16 weights are rounded to bf16 first. A group of zeros gets scale 0 and
    bucket 0 and does not enter the table; a bucket that no weight falls into gets its middle in
    the table.

    Args:
        weight: bf16, float32 or float16 `[out, in]`, finite.
        group: weights that share a scale; a multiple of 8 that divides `in`.

    Returns:
        codes int32 `[out, in / 8]`, scales bf16 `[out, in / group]`, table float32 `[8]`.

    Raises:
        ValueError: for another shape, dtype or group size, or if a weight is not finite as bf16.
    """
    if weight.ndim != 2:
        raise ValueError(f"weight must be [out, in], got shape {weight.shape}")
    num_out, num_in = weight.shape
    if group <= 0 or group % CODES_PER_WORD or num_in % group:
        raise ValueError(
            f"group size must be a multiple of {CODES_PER_WORD} that divides {num_in}, got {group}"
        )
    if weight.dtype not in (ml_dtypes.bfloat16, np.float32, np.float16):
        raise ValueError(f"weight must be bfloat16, float32 or float16, got {weight.dtype}")

    packed = np.empty((num_out, num_in // 2), np.uint8)
    scales = np.empty((num_out, num_in // group), ml_dtypes.bfloat16)
    sums = np.zeros(NUM_BUCKETS, np.float64)
    counts = np.zeros(NUM_BUCKETS, np.int64)
    rows = max(1, _BLOCK_ELEMENTS // num_in)
    for start in range(0, num_out, rows):
        block = slice(start, start + rows)
        scales[block], block_sums, block_counts = _encode_block(weight[block], group, packed[block])
        sums += block_sums
        counts += block_counts

    upper = np.append(BUCKET_FRACTIONS[1:], np.float32(1))
    middle = (BUCKET_FRACTIONS.astype(np.float64) + upper) / 2
    table = np.where(counts > 0, sums / np.maximum(counts, 1), middle).astype(np.float32)
    return packed.view("<i4"), scales, table


def _encode_block(
    weight: np.ndarray, group: int, packed: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Encodes some rows into `packed`; returns their scales, and per bucket sum and count."""
    with np.errstate(over="ignore"):  # overflow to infinity is reported below
        block = np.ascontiguousarray(weight.astype(ml_dtypes.bfloat16, copy=False))
    bits = block.view(np.uint16).reshape(len(block), -1, group)
    magnitudes = bits & np.uint16(_MAGNITUDE_MASK)
    scale_bits = magnitudes.max(axis=-1)
    if (scale_bits >= _INFINITY_BITS).any():
        raise ValueError("weight is not finite in bfloat16")
    scales = scale_bits.view(ml_dtypes.bfloat16)

    edges = group_edges(scales).view(np.uint16)
    # In a group of zeros every edge is 0 too; the largest integer as edge puts it into bucket 0.
    edges[scale_bits == 0] = np.uint16(0xFFFF)
    buckets = (magnitudes >= edges[..., 1, None]).view(np.uint8)
    for bucket in range(2, NUM_BUCKETS):
        buckets += (magnitudes >= edges[..., bucket, None]).view(np.uint8)

    codes = buckets | ((bits >= _SIGN_BIT).view(np.uint8) << 3)
    codes = codes.reshape(len(block), -1)
    np.bitwise_or(codes[:, 0::2], codes[:, 1::2] << 4, out=packed)
    sums, counts = _bucket_totals(magnitudes, scales, buckets)
    return scales, sums, counts


def _bucket_totals(
    magnitudes: np.ndarray, scales: np.ndarray, buckets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sum (float64) of magnitude / scale and count of each bucket, groups of zeros left out."""
    used = scales != 0
    if not used.all():
        magnitudes, scales, buckets = magnitudes[used], scales[used], buckets[used]
    values = (magnitudes.astype(np.uint32) << 16).view(np.float32)
    values /= scales.astype(np.float32)[..., None]
    flat = buckets.reshape(-1)
    sums = np.bincount(flat, weights=values.reshape(-1), minlength=NUM_BUCKETS)
    return sums, np.bincount(flat, minlength=NUM_BUCKETS)


def unpack_codes(codes: np.ndarray) -> np.ndarray:
    """Codes 0..15 of packed words: int32 `[..., in / 8]` -> uint8 `[..., in]`."""
    pairs = np.ascontiguousarray(codes, dtype="<i4").view(np.uint8)
    return np.stack([pairs & 0xF, pairs >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def decode_numpy(codes: np.ndarray, scales: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Decodes on the host; bit for bit what `decode` gives (subnormal results excepted).

    Args:
        codes: int32 `[out, in / 8]`.
        scales: bf16 `[out, in / group]`.
        table: float32 `[8]`.

    Returns:
        float32 `[out, in]`.
    """
    nibbles = unpack_codes(codes)
    magnitude = table[nibbles & 7] * _per_weight(scales.astype(np.float32), nibbles.shape[-1])
    return np.where(nibbles & 8, -magnitude, magnitude)


def _per_weight(scales: np.ndarray, num_in: int) -> np.ndarray:
    """Repeats each group's scale for its weights: `[out, groups]` -> `[out, in]`."""
    return np.repeat(scales, num_in // scales.shape[-1], axis=-1)


def decode(codes: Array, scales: Array, table: Array) -> Array:
    """Decodes one matrix in JAX; use `jax.vmap` for leading axes.

    Args:
        codes: int32 `[out, in / 8]`.
        scales: bf16 `[out, in / group]`.
        table: float32 `[8]`.

    Returns:
        float32 `[out, in]`.
    """
    num_out, num_words = codes.shape
    num_in = num_words * CODES_PER_WORD
    shifts = jnp.arange(CODES_PER_WORD, dtype=jnp.int32) * 4
    nibbles = ((codes[..., None] >> shifts) & 0xF).reshape(num_out, num_in)
    group = num_in // scales.shape[-1]
    magnitude = table[nibbles & 7] * jnp.repeat(scales.astype(jnp.float32), group, axis=-1)
    return jnp.where((nibbles & 8) != 0, -magnitude, magnitude)
