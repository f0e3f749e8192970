"""Encoding of bf16 experts into the nested format, and exact decoding in numpy and JAX.

"Packed" weights are an expert's matrices in one vector: gate `[F, H]`, up `[F, H]`, down `[H, F]`.
Scales and codes are those of the draft made from the same weights: gate and up `[2F, ...]`, down
`[H, ...]`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.int4 import BUCKET_FRACTIONS, CODES_PER_WORD, group_edges, unpack_codes
from pallas_kernels.nested.layout import (
    LEAST_SCALE_BITS,
    REMAINDERS,
    NestedLayout,
    padded_capacity,
)

_MAGNITUDE_MASK = 0x7FFF
_INFINITY_BITS = 0x7F80
_SIGN_BIT = 0x8000
_BLOCK_ELEMENTS = 1 << 17  # 256 KiB of bf16: a block and its temporaries stay in the CPU's cache

BASE_FRACTIONS = np.concatenate([BUCKET_FRACTIONS[1:2], BUCKET_FRACTIONS[1:]])
"""float32 [8]: the fraction of the scale that a bucket's base comes from; the lowest bucket's is
its upper edge, from which 256 are taken away."""


def encode(packed: np.ndarray, gate_up_scales: np.ndarray, down_scales: np.ndarray) -> np.ndarray:
    """Encodes one expert.

    The draft's codes are not needed: a magnitude's bucket is the one with the highest edge that is
    not above it. So its remainder is the least of its distances from the edges, where the distance
    from a higher edge wraps around to more than 2^15.

    Args:
        packed: bf16 `[3FH]`, finite.
        gate_up_scales: bf16 `[2F, H/g1]`.
        down_scales: bf16 `[H, F/g2]`.

    Returns:
        int32 `[W]` with the least capacity that holds the expert's escapes.

    Raises:
        ValueError: the shapes do not fit together, or `packed` is not bfloat16.
    """
    inner, hidden = gate_up_scales.shape[0] // 2, down_scales.shape[0]
    if packed.shape != (3 * inner * hidden,) or packed.dtype != ml_dtypes.bfloat16:
        raise ValueError(
            f"packed weights must be bfloat16 [{3 * inner * hidden}], "
            f"got {packed.dtype} {packed.shape}"
        )
    bits = packed.view(np.uint16)
    remainders = np.empty(packed.size, np.uint8)
    split = 2 * inner * hidden
    parts = (
        (bits[:split].reshape(2 * inner, hidden), gate_up_scales, remainders[:split]),
        (bits[split:].reshape(hidden, inner), down_scales, remainders[split:]),
    )
    escapes = [_encode_matrix(*part) for part in parts]
    counts, listed = (np.concatenate(columns) for columns in zip(*escapes, strict=True))

    layout = NestedLayout(hidden, inner, padded_capacity(len(listed)))
    words = np.zeros(layout.num_words, "<i4")
    words[: layout.row_starts].view(np.uint8)[:] = remainders
    _row_starts(words, layout)[1:] = np.cumsum(counts)
    words[layout.escapes :][: len(listed)] = listed
    return words


def _encode_matrix(
    bits: np.ndarray, scales: np.ndarray, remainders: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Fills `remainders`; returns each row's number of escapes, and their words."""
    num_rows, num_in = bits.shape
    counts, listed = [], []
    rows = max(1, _BLOCK_ELEMENTS // num_in)
    for start in range(0, num_rows, rows):
        magnitudes = bits[start : start + rows] & np.uint16(_MAGNITUDE_MASK)
        distances = _remainders(magnitudes, _bases(scales[start : start + rows]))
        block = remainders[start * num_in : (start + rows) * num_in]
        np.copyto(block, distances.reshape(-1), casting="unsafe")
        places = np.flatnonzero(distances >= REMAINDERS)
        block[places] = 0
        row, position = np.divmod(places, num_in)
        counts.append(np.bincount(row, minlength=len(magnitudes)))
        escaped = bits[start : start + rows].reshape(-1)[places].astype(np.uint32)
        listed.append(escaped << 16 | position.astype(np.uint32))
    return np.concatenate(counts), np.concatenate(listed).view(np.int32)


def _bases(scales: np.ndarray) -> np.ndarray:
    """uint16 `[..., 8]`: integer that each bucket's remainders are counted from."""
    bases = group_edges(scales).view(np.uint16)
    bases[..., 0] = np.maximum(bases[..., 1], REMAINDERS) - REMAINDERS
    bases[scales.view(np.uint16) < LEAST_SCALE_BITS] = 0
    return bases


def _remainders(magnitudes: np.ndarray, bases: np.ndarray) -> np.ndarray:
    """uint16 like `magnitudes` `[rows, in]`: distances from the base; `REMAINDERS` up: escapes."""
    grouped = magnitudes.reshape(*bases.shape[:2], -1)
    least = grouped - bases[..., 0, None]
    distance = np.empty_like(least)
    for bucket in range(1, bases.shape[-1]):
        np.subtract(grouped, bases[..., bucket, None], out=distance)
        np.minimum(least, distance, out=least)
    return least.reshape(magnitudes.shape)


def _row_starts(words: np.ndarray, layout: NestedLayout) -> np.ndarray:
    return words[layout.row_starts :][: layout.num_rows + 1]


def num_escapes(words: np.ndarray, layout: NestedLayout) -> int:
    """Escapes of an encoded expert."""
    return int(words[layout.row_starts + layout.num_rows])


def check_words(words: np.ndarray, layout: NestedLayout) -> None:
    """Raises ValueError if the lists of an expert contradict themselves.

    A kernel follows them without looking: row starts must ascend from 0 to the number of escapes,
    positions lie within their rows, and an escape be finite.
    """
    starts = _row_starts(words, layout)
    count = int(starts[-1])
    if starts[0] != 0 or (np.diff(starts) < 0).any() or count > layout.capacity:
        raise ValueError("the row starts of its escapes are not in order")
    escapes = words[layout.escapes :][:count].view(np.uint32)
    in_gate_up = int(starts[2 * layout.inner])
    positions = escapes & np.uint32(0xFFFF)
    for part, length in (
        (positions[:in_gate_up], layout.hidden),
        (positions[in_gate_up:], layout.inner),
    ):
        if (part >= length).any():
            raise ValueError("an escape lies outside of its row")
    if ((escapes >> 16 & _INFINITY_BITS) == _INFINITY_BITS).any():
        raise ValueError("an escape is not finite")


def with_capacity(
    words: np.ndarray, hidden: int, inner: int, capacity: int, out: np.ndarray | None = None
) -> np.ndarray:
    """The same expert with room for `capacity` escapes.

    Args:
        words: int32 `[W]`.
        out: int32 array of the new size to write to, or None for a new one.

    Raises:
        ValueError: the expert has more escapes, or `words` is no nested expert of these sizes.
    """
    old = NestedLayout.from_words(hidden, inner, len(words))
    new = NestedLayout(hidden, inner, capacity)
    count = num_escapes(words, old)
    if not 0 <= count <= min(old.capacity, capacity):
        raise ValueError(
            f"an expert with {count} escapes does not fit a capacity of {capacity} "
            f"(its own is {old.capacity})"
        )
    check_words(words, old)
    if out is None:
        out = np.empty(new.num_words, "<i4")
    end = new.escapes + count
    out[:end] = words[:end]
    out[end:] = 0
    return out


def decode_numpy(
    words: np.ndarray,
    gate_up_codes: np.ndarray,
    gate_up_scales: np.ndarray,
    down_codes: np.ndarray,
    down_scales: np.ndarray,
) -> np.ndarray:
    """Decodes one expert on the host; arguments and result as of `decode`."""
    inner, hidden = gate_up_codes.shape[0] // 2, down_codes.shape[0]
    layout = NestedLayout.from_words(hidden, inner, len(words))
    nibbles, bases = [], []
    for codes, scales in ((gate_up_codes, gate_up_scales), (down_codes, down_scales)):
        matrix = unpack_codes(codes)
        grouped = matrix.reshape(*scales.shape, -1) & 7
        nibbles.append(matrix.reshape(-1))
        bases.append(np.take_along_axis(_bases(scales), grouped, axis=-1).reshape(-1))
    signs = (np.concatenate(nibbles) >> 3).astype(np.uint16) << 15
    remainders = np.ascontiguousarray(words[: layout.row_starts]).view(np.uint8)
    bits = signs | (np.concatenate(bases) + remainders)

    starts = _row_starts(words, layout)
    rows = np.repeat(np.arange(layout.num_rows), np.diff(starts))
    escapes = words[layout.escapes :][: len(rows)].view(np.uint32)
    bits[_row_offsets(layout)[rows] + (escapes & 0xFFFF)] = escapes >> 16
    return bits.view(ml_dtypes.bfloat16)


def _row_offsets(layout: NestedLayout) -> np.ndarray:
    """int32 [R]: place of each row's first weight among the packed ones."""
    hidden, inner = layout.hidden, layout.inner
    gate_up = np.arange(2 * inner) * hidden
    down = 2 * inner * hidden + np.arange(hidden) * inner
    return np.concatenate([gate_up, down]).astype(np.int32)


def decode(
    words: jax.Array,
    gate_up_codes: jax.Array,
    gate_up_scales: jax.Array,
    down_codes: jax.Array,
    down_scales: jax.Array,
) -> jax.Array:
    """Decodes one expert in JAX, bit for bit what was encoded.

    Args:
        words: int32 `[W]`.
        gate_up_codes: int32 `[2F, H/8]`. gate_up_scales: bf16 `[2F, H/g1]`.
        down_codes: int32 `[H, F/8]`. down_scales: bf16 `[H, F/g2]`.

    Returns:
        bf16 `[3FH]`, packed.
    """
    inner, hidden = gate_up_codes.shape[0] // 2, down_codes.shape[0]
    layout = NestedLayout.from_words(hidden, inner, words.shape[0])
    drafts = ((gate_up_codes, gate_up_scales), (down_codes, down_scales))
    signs, bases = (
        jnp.concatenate(part)
        for part in zip(*(_draft_part(*draft) for draft in drafts), strict=True)
    )
    remainders = _split_words(words[: layout.row_starts], 8).astype(jnp.uint16)
    bits = signs | (bases + remainders)
    if layout.capacity:
        starts = words[layout.row_starts :][: layout.num_rows + 1]
        positions, values = _split_words(words[layout.escapes :], 16).reshape(-1, 2).T
        numbers = jnp.arange(layout.capacity, dtype=jnp.int32)
        # Counting the rows that have begun; a row without escapes begins where the next one does.
        begun = jnp.zeros(layout.capacity, jnp.int32).at[starts[1:-1]].add(1, mode="drop")
        places = jnp.asarray(_row_offsets(layout))[jnp.cumsum(begun)]
        places = jnp.where(numbers < starts[-1], places + positions, bits.size)
        bits = bits.at[places].set(values.astype(jnp.uint16), mode="drop")
    return jax.lax.bitcast_convert_type(bits, jnp.bfloat16)


def _draft_part(codes: jax.Array, scales: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sign bits (bit 15) and bases that one matrix's draft gives, uint16 `[out * in]`."""
    shifts = jnp.arange(CODES_PER_WORD, dtype=jnp.int32) * 4
    nibbles = (codes[..., None] >> shifts) & 0xF
    nibbles = nibbles.reshape(*scales.shape, -1)
    buckets = nibbles & 7
    products = scales.astype(jnp.float32)[..., None] * jnp.asarray(BASE_FRACTIONS)[buckets]
    edges = jax.lax.bitcast_convert_type(products.astype(jnp.bfloat16), jnp.uint16)
    bases = edges.astype(jnp.int32) - jnp.where(buckets == 0, REMAINDERS, 0)
    scale_bits = jax.lax.bitcast_convert_type(scales, jnp.uint16)[..., None]
    bases = jnp.where(scale_bits < LEAST_SCALE_BITS, 0, jnp.maximum(bases, 0))
    signs = (nibbles >> 3) * _SIGN_BIT
    return signs.astype(jnp.uint16).reshape(-1), bases.astype(jnp.uint16).reshape(-1)


def _split_words(words: jax.Array, bits: int) -> jax.Array:
    """The fields of `bits` bits that lie in int32 words, lowest first, as int32."""
    shifts = jnp.arange(0, 32, bits, dtype=jnp.int32)
    return ((words[:, None] >> shifts) & ((1 << bits) - 1)).reshape(-1)
