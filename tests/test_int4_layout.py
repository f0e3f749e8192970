"""The INT4 draft layout: against a plain float64 model of itself, and its stated properties."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.int4 import (
    BUCKET_FRACTIONS,
    decode,
    decode_numpy,
    encode,
    group_edges,
    unpack_codes,
)

BF16 = ml_dtypes.bfloat16


def plain_encode(weight: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One number after another in float64: codes [out, in], scales, table."""
    num_out, num_in = weight.shape
    codes = np.zeros((num_out, num_in), np.int64)
    scales = np.zeros((num_out, num_in // group))
    ratios: list[list[float]] = [[] for _ in range(8)]
    for row in range(num_out):
        for g in range(num_in // group):
            values = weight[row, g * group : (g + 1) * group].astype(np.float64)
            scale = max(abs(values))
            scales[row, g] = scale
            edges = [float(BF16(np.float32(scale) * fraction)) for fraction in BUCKET_FRACTIONS]
            for j, value in enumerate(values):
                bucket = sum(abs(value) >= edge for edge in edges[1:]) if scale else 0
                codes[row, g * group + j] = 8 * np.signbit(value) + bucket
                if scale:
                    ratios[bucket].append(abs(value) / scale)
    upper = [*BUCKET_FRACTIONS[1:], 1.0]
    table = [
        np.mean(ratios[b]) if ratios[b] else (float(BUCKET_FRACTIONS[b]) + upper[b]) / 2
        for b in range(8)
    ]
    return codes, scales, np.array(table)


@st.composite
def weights(draw: st.DrawFn, fixed_shape: bool = False) -> tuple[np.ndarray, int]:
    """A bf16 matrix with zeros, negative zeros, subnormals and huge values, and a group size."""
    group = 16 if fixed_shape else draw(st.sampled_from([8, 16, 32, 64]))
    groups, rows = (3, 4) if fixed_shape else (draw(st.integers(1, 3)), draw(st.integers(1, 4)))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((rows, groups * group)) * 10.0 ** draw(st.integers(-30, 30))
    kind = draw(st.sampled_from(["plain", "zero groups", "one huge", "zeros", "bit patterns"]))
    if kind == "zero groups":
        weight.reshape(rows, groups, group)[rng.random((rows, groups)) < 0.5] = 0
    elif kind == "one huge":
        weight[0, 0] = draw(st.sampled_from([3e38, -3e38]))
    elif kind == "zeros":
        weight[rng.random(weight.shape) < 0.5] = -0.0
    result = weight.astype(BF16)
    if kind == "bit patterns":  # any finite bf16, subnormals included
        bits = rng.integers(0, 0x7F80, weight.shape, dtype=np.uint16)
        result = (bits | (rng.integers(0, 2, weight.shape, dtype=np.uint16) << 15)).view(BF16)
    return result, group


@settings(max_examples=60, deadline=None)
@given(weights())
def test_encoding_equals_the_plain_model(case: tuple[np.ndarray, int]) -> None:
    weight, group = case
    codes, scales, table = encode(weight, group)
    expected_codes, expected_scales, expected_table = plain_encode(weight, group)
    np.testing.assert_array_equal(unpack_codes(codes), expected_codes)
    np.testing.assert_array_equal(scales.astype(np.float64), expected_scales)
    # The quotients are float32, the plain model's float64: half a unit in the last place each, or
    # half the smallest subnormal number.
    np.testing.assert_allclose(table, expected_table, rtol=2e-7, atol=1.5e-45)


@settings(max_examples=25, deadline=None)
@given(weights(fixed_shape=True))  # one shape, for every new one is compiled anew
def test_decoding_in_jax_equals_decoding_in_numpy(case: tuple[np.ndarray, int]) -> None:
    weight, group = case
    codes, scales, table = encode(weight, group)
    expected = decode_numpy(codes, scales, table)
    normal = np.finfo(np.float32).tiny
    # Subnormal operands and results are flushed to zero by XLA.
    comparable = np.repeat(scales.astype(np.float32), group, axis=1) >= normal
    comparable &= (np.abs(expected) >= normal) | (expected == 0)
    result = np.asarray(decode(codes, scales, table))
    np.testing.assert_array_equal(result[comparable], expected[comparable])
    assert result.dtype == expected.dtype == np.float32


@settings(max_examples=40, deadline=None)
@given(weights())
def test_decoded_values_lie_in_their_buckets(case: tuple[np.ndarray, int]) -> None:
    weight, group = case
    codes, scales, table = encode(weight, group)
    decoded = decode_numpy(codes, scales, table).astype(np.float64)
    scale = np.repeat(scales.astype(np.float64), group, axis=1)
    # The widest bucket is b..b + (1-b)/6 and its neighbours; edges move by half a bf16 step at
    # most, subnormal ones by the smallest bf16 number.
    error = np.abs(decoded - weight.astype(np.float64))
    assert (error <= scale * (0.88 / 6 + 1 / 128) + 1e-40).all()
    assert (np.signbit(decoded) == np.signbit(weight)).all()


def test_every_code_has_its_documented_place() -> None:
    # Input 8w+j stands in bits 4j..4j+3. Scale 1: the weights are one per bucket, then negated.
    weight = np.array([[0.0, 0.05, 0.2, 0.3, 0.5, 0.6, 0.8, 1.0]], BF16)
    codes, scales, table = encode(np.concatenate([weight, -weight], axis=1), 16)
    words = codes.view(np.uint32)[0]
    assert [(int(words[0]) >> 4 * j) & 15 for j in range(8)] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [(int(words[1]) >> 4 * j) & 15 for j in range(8)] == [8, 9, 10, 11, 12, 13, 14, 15]
    assert codes.dtype == np.int32
    assert scales.astype(np.float32).tolist() == [[1.0]]
    np.testing.assert_array_equal(table, weight[0].astype(np.float32))


def test_group_of_zeros_has_scale_zero_and_decodes_to_zero() -> None:
    weight = np.ones((2, 32), BF16)
    weight[1, 16:] = 0
    codes, scales, table = encode(weight, 16)
    assert scales.astype(np.float32).tolist() == [[1, 1], [1, 0]]
    assert not unpack_codes(codes)[1, 16:].any()
    assert not decode_numpy(codes, scales, table)[1, 16:].any()
    assert table[7] == 1  # the zeros did not enter the means


def test_buckets_above_the_lowest_span_at_most_256_bf16_numbers() -> None:
    # Exhaustive over all finite scales: what makes an 8-bit remainder enough.
    scales = np.arange(1, 0x7F80, dtype=np.uint16)
    edges = group_edges(scales.view(BF16)).view(np.uint16).astype(np.int32)
    assert (np.diff(edges, axis=1) >= 0).all()
    assert (np.diff(edges[:, 1:], axis=1) <= 256).all()
    assert (scales - edges[:, 7] < 256).all()


def test_draft_is_closer_than_symmetric_rounding_on_gaussian_weights() -> None:
    weight = np.random.default_rng(0).standard_normal((256, 512)).astype(BF16)
    exact = weight.astype(np.float64)
    decoded = decode_numpy(*encode(weight, 128))
    groups = exact.reshape(256, -1, 128)
    step = np.abs(groups).max(axis=-1, keepdims=True) / 7
    rounded = (np.round(groups / step) * step).reshape(exact.shape)
    error, rounding_error = (
        np.linalg.norm(values - exact) / np.linalg.norm(exact) for values in (decoded, rounded)
    )
    assert error < 0.112  # 0.108 measured for Gaussian weights
    assert error < rounding_error


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_other_types_are_rounded_to_bf16_first(dtype: type) -> None:
    weight = np.random.default_rng(1).standard_normal((8, 64)).astype(dtype)
    for result, expected in zip(encode(weight, 32), encode(weight.astype(BF16), 32), strict=True):
        np.testing.assert_array_equal(result, expected)


def test_large_matrix_equals_its_rows_encoded_alone() -> None:
    # More elements than one internal block.
    weight = np.random.default_rng(2).standard_normal((300, 1024)).astype(BF16)
    codes, scales, _ = encode(weight, 128)
    for rows in (slice(0, 1), slice(100, 200), slice(299, 300)):
        part_codes, part_scales, _ = encode(weight[rows], 128)
        np.testing.assert_array_equal(codes[rows], part_codes)
        np.testing.assert_array_equal(scales[rows], part_scales)


def test_strided_input_is_accepted() -> None:
    weight = np.random.default_rng(3).standard_normal((64, 32)).astype(BF16)
    for result, expected in zip(encode(weight.T, 32), encode(weight.T.copy(), 32), strict=True):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3.4e38])
def test_values_not_finite_in_bf16_are_refused(value: float) -> None:
    weight = np.ones((4, 16), np.float32)
    weight[2, 3] = value
    with pytest.raises(ValueError, match="not finite"):
        encode(weight, 8)


@pytest.mark.parametrize("group", [0, -8, 4, 12, 48, 128])
def test_group_size_must_divide_and_be_a_multiple_of_8(group: int) -> None:
    with pytest.raises(ValueError, match=rf"got {group}"):
        encode(np.ones((2, 64), BF16), group)


@pytest.mark.parametrize("weight", [np.ones(64, BF16), np.ones((2, 64), np.float64)])
def test_shape_and_type_are_checked(weight: np.ndarray) -> None:
    with pytest.raises(ValueError, match="weight must be"):
        encode(weight, 8)
