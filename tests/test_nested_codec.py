"""The nested format: exact for every finite bf16 bit pattern, and as small as it is said to be."""

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import int4
from pallas_kernels.nested import (
    BASE_FRACTIONS,
    LEAST_SCALE_BITS,
    REMAINDERS,
    NestedLayout,
    decode,
    decode_numpy,
    encode,
    num_escapes,
    with_capacity,
)

BF16 = ml_dtypes.bfloat16
INFINITY_BITS = 0x7F80
_decode = jax.jit(decode)


def draft_of(packed: np.ndarray, hidden: int, inner: int, groups: tuple[int, int]) -> tuple:
    """Codes and scales of gate and up, and of down."""
    split = 2 * inner * hidden
    gate_up = int4.encode(packed[:split].reshape(2 * inner, hidden), groups[0])
    down = int4.encode(packed[split:].reshape(hidden, inner), groups[1])
    return *gate_up[:2], *down[:2]


def assert_exact(packed: np.ndarray, hidden: int, inner: int, groups=(8, 8)) -> NestedLayout:
    """Encodes, decodes in numpy and JAX, with more capacity too; returns the layout."""
    draft = draft_of(packed, hidden, inner, groups)
    words = encode(packed, draft[1], draft[3])
    layout = NestedLayout.from_words(hidden, inner, len(words))
    assert words.dtype == np.int32
    assert layout.num_words == len(words)
    assert 0 <= layout.capacity - num_escapes(words, layout) < 128
    padded = with_capacity(words, hidden, inner, layout.capacity + 128)
    for version in (words, padded):
        for decoded in (decode_numpy(version, *draft), np.asarray(_decode(version, *draft))):
            assert decoded.dtype == BF16
            np.testing.assert_array_equal(decoded.view(np.uint16), packed.view(np.uint16))
    np.testing.assert_array_equal(with_capacity(padded, hidden, inner, layout.capacity), words)
    return layout


def bf16_bits(magnitudes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Magnitudes (integers) with random signs, as bf16."""
    signs = rng.integers(0, 2, magnitudes.shape, np.uint16) << 15
    return (magnitudes.astype(np.uint16) | signs).view(BF16)


def test_every_finite_bit_pattern_in_groups_of_neighbours():
    hidden, inner = 128, 88
    magnitudes = np.arange(INFINITY_BITS, dtype=np.uint16)
    both = np.concatenate([magnitudes, magnitudes | 0x8000])
    packed = np.resize(both, (3, 3 * hidden * inner)).view(BF16)
    assert set(both) <= set(packed.view(np.uint16).reshape(-1))
    for part in packed:
        assert_exact(part, hidden, inner)


def test_every_finite_bit_pattern_in_random_groups():
    hidden, inner = 128, 176
    rng = np.random.default_rng(0)
    both = np.arange(1 << 16, dtype=np.uint16)
    both = both[both & 0x7FFF < INFINITY_BITS]
    packed = rng.permutation(np.resize(both, 3 * hidden * inner)).view(BF16)
    assert_exact(packed, hidden, inner, (16, 8))


def test_a_bucket_above_the_lowest_spans_at_most_256_integers_for_every_scale():
    scales = np.arange(INFINITY_BITS, dtype=np.uint16)
    edges = int4.group_edges(scales.view(BF16)).view(np.uint16).astype(np.int64)
    last = np.concatenate([edges[:, 2:] - 1, scales[:, None].astype(np.int64)], axis=1)
    widest = (last - edges[:, 1:] + 1).max(1)
    assert widest.max() == REMAINDERS
    assert (widest[scales >= LEAST_SCALE_BITS] == REMAINDERS).all()


def test_products_of_scales_that_count_are_normal_numbers():
    least = np.uint16(LEAST_SCALE_BITS).view(BF16).astype(np.float32)
    assert least == 2.0**-120
    assert least * BASE_FRACTIONS.min() > np.finfo(np.float32).tiny


@pytest.mark.parametrize("scale_bits", [1, 100, 127, 128, 300, 895, 896, 897, 1024, 0x7F7F])
def test_all_magnitudes_below_a_scale(scale_bits):
    rng = np.random.default_rng(scale_bits)
    hidden, inner = 64, 64
    magnitudes = rng.integers(0, scale_bits + 1, 3 * hidden * inner)
    magnitudes[::64] = scale_bits
    assert_exact(bf16_bits(magnitudes, rng), hidden, inner, (64, 64))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3e38, 1e-45, 2.0**-120])
def test_groups_of_one_value(value):
    layout = assert_exact(np.full(3 * 16 * 8, value, BF16), 16, 8)
    assert layout.capacity in (0, 384)


def test_one_huge_value_a_group_costs_escapes_only():
    rng = np.random.default_rng(1)
    packed = (rng.standard_normal(3 * 64 * 64) * 0.02).astype(BF16)
    packed[::64] = 3e38
    layout = assert_exact(packed, 64, 64, (64, 64))
    assert layout.capacity == -(-(3 * 64 * 63) // 128) * 128


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.sampled_from([(8, 8), (64, 24), (16, 128)]),
    low=st.integers(0, INFINITY_BITS - 1),
    span=st.integers(1, INFINITY_BITS),
    zeros=st.floats(0, 1),
)
def test_random_bits_come_back(seed, sizes, low, span, zeros):
    rng = np.random.default_rng(seed)
    hidden, inner = sizes
    magnitudes = rng.integers(low, min(low + span, INFINITY_BITS), 3 * hidden * inner)
    magnitudes[rng.random(magnitudes.size) < zeros] = 0
    assert_exact(bf16_bits(magnitudes, rng), hidden, inner)


@pytest.mark.parametrize(
    ("draw", "most"),
    [("normal", 0.020), ("student", 0.035), ("laplace", 0.045)],
)
def test_escapes_of_usual_distributions(draw, most):
    rng = np.random.default_rng(2)
    hidden, inner = 256, 256
    size = 3 * hidden * inner
    values = {
        "normal": lambda: rng.standard_normal(size),
        "student": lambda: rng.standard_t(5, size),
        "laplace": lambda: rng.laplace(size=size),
    }[draw]()
    layout = assert_exact((values * 0.02).astype(BF16), hidden, inner, (128, 128))
    assert layout.capacity <= most * size + 128
    # 768 row starts are 0.125 bits a weight in an expert as small as this.
    assert layout.bits_per_weight <= 8.13 + 32 * most + 0.02


def test_capacity_too_small_is_refused():
    rng = np.random.default_rng(3)
    packed = rng.permutation(np.arange(3 * 64 * 64, dtype=np.uint16)).view(BF16)
    draft = draft_of(packed, 64, 64, (64, 64))
    words = encode(packed, draft[1], draft[3])
    with pytest.raises(ValueError, match="does not fit a capacity of 128"):
        with_capacity(words, 64, 64, 128)


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="bfloat16"):
        encode(np.zeros(3 * 64, np.float32), np.ones((16, 1), BF16), np.ones((8, 1), BF16))
    with pytest.raises(ValueError, match="capacity"):
        NestedLayout(64, 64, 100)
    with pytest.raises(ValueError, match="multiple of 8"):
        NestedLayout(65537, 64, 128)
    for num_words in (100, NestedLayout(64, 64, 256).num_words + 4):
        with pytest.raises(ValueError, match="words"):
            NestedLayout.from_words(64, 64, num_words)


def test_sections_begin_on_16_bytes():
    for hidden, inner in ((8, 8), (2048, 1408), (4096, 6400), (104, 72)):
        layout = NestedLayout(hidden, inner, 384)
        for word in (layout.row_starts, layout.escapes):
            assert word % 4 == 0
        assert NestedLayout.from_words(hidden, inner, layout.num_words) == layout


def test_lists_that_contradict_themselves_are_refused():
    hidden, inner = 128, 88
    rng = np.random.default_rng(3)
    packed = rng.standard_normal(3 * hidden * inner).astype(BF16)
    draft = draft_of(packed, hidden, inner, (8, 8))
    words = encode(packed, draft[1], draft[3])
    layout = NestedLayout.from_words(hidden, inner, len(words))
    starts = slice(layout.row_starts, layout.row_starts + layout.num_rows + 1)
    first_down = words[starts][2 * inner]

    def damaged(index: int, value: int) -> np.ndarray:
        copy = words.copy()
        copy[index] = value
        return copy

    reversed_starts = words.copy()
    reversed_starts[starts] = words[starts][::-1]
    for bad in (
        reversed_starts,
        damaged(layout.row_starts, 1),
        damaged(layout.row_starts + 5, -7),
        damaged(layout.row_starts + layout.num_rows, layout.capacity + 1),
        damaged(layout.escapes, hidden),  # position past a gate row
        damaged(layout.escapes + first_down, inner),  # past a down row
        damaged(layout.escapes, 0x7F80 << 16),  # infinity
    ):
        with pytest.raises(ValueError, match=r"order|outside|finite|does not fit"):
            with_capacity(bad, hidden, inner, layout.capacity)
