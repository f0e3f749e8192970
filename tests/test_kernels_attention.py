"""The attention kernels, interpreted on the CPU, against float64; and who computes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import api, pallas_triton, reference
from pallas_kernels.decode_attention.config import (
    DecodeAttentionConfig,
    config_for,
    unsupported_reason,
)
from tests import attention_cases as cases

SMALL = DecodeAttentionConfig(split=32, block=16, combine_splits=2)
FLOAT32 = 2e-6
BFLOAT16 = 1e-2  # eight bits, at each of four roundings
KINDS = {
    "latent": (cases.Latent(), "attend_latent", cases.latent_float64),
    "grouped": (cases.Grouped(), "attend_grouped", cases.grouped_float64),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


@functools.cache
def compiled(name, config, options):
    function = getattr(pallas_triton, name)
    return jax.jit(functools.partial(function, **dict(options), config=config, interpret=True))


def run(name, arrays, options, config=SMALL):
    return compiled(name, config, tuple(sorted(options.items(), key=str)))(*arrays)


@pytest.mark.parametrize(
    ("batch", "tokens", "capacity", "window"),
    [(1, 1, 96, 0), (2, 3, 100, 0), (3, 9, 96, 20)],
)
def test_matches_float64(kind, batch, tokens, capacity, window):
    sizes, name, exact = kind
    case = sizes.case(batch, tokens, capacity, window=window)
    for value, expected in zip(run(name, *case), exact(*case), strict=True):
        assert cases.error(value, expected) < FLOAT32


def test_reference_matches_float64(kind):
    sizes, name, exact = kind
    case = sizes.case(2, 5, 70, window=30)
    values = getattr(reference, name)(*case[0], **case[1])
    for value, expected in zip(values, exact(*case), strict=True):
        assert cases.error(value, expected) < FLOAT32


def test_matches_float64_in_bfloat16(kind):
    sizes, name, exact = kind
    case = sizes.case(2, 2, 64, jnp.bfloat16)
    for value, expected in zip(run(name, *case), exact(*case), strict=True):
        assert cases.error(value, expected) < BFLOAT16


@pytest.mark.parametrize("length", [0, 31, 32, 94])
def test_lengths_at_the_edges_of_splits_and_cache(kind, length):
    sizes, name, exact = kind
    case = sizes.case(1, 2, 96, lengths=length)
    for value, expected in zip(run(name, *case), exact(*case), strict=True):
        assert cases.error(value, expected) < FLOAT32


def test_positions_beyond_the_capacity_are_dropped(kind):
    sizes, name, exact = kind
    arrays, options = sizes.case(1, 3, 32, lengths=31)
    attended, *cache = run(name, arrays, options)
    expected, *expected_cache = exact(arrays, options)
    for value, other in zip(cache, expected_cache, strict=True):
        assert cases.error(value, other) < FLOAT32
    assert cases.error(attended[:, 0], expected[:, 0]) < FLOAT32


def test_what_lies_beyond_the_length_is_never_used(kind):
    sizes, name, _ = kind
    arrays, options = sizes.case(1, 2, 96, lengths=40)
    expected = run(name, arrays, options)[0]
    *others, first, second, lengths = arrays
    first, second = (entries.at[:, 42:].set(1e9) for entries in (first, second))
    value = run(name, (*others, first, second, lengths), options)[0]
    np.testing.assert_array_equal(value, expected)


def test_partial_results_in_several_launches(kind):
    sizes, name, _ = kind
    case = sizes.case(3, 2, 96)
    few = DecodeAttentionConfig(split=32, block=16, combine_splits=2, most_partial_bytes=1)
    for value, expected in zip(run(name, *case, few), run(name, *case), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_mapping_to_values_in_the_combining_kernel():
    case = cases.Latent().case(1, 2, 96)
    fused = DecodeAttentionConfig(split=32, block=16, combine_splits=2, most_fused_rows=2)
    value, expected = (run("attend_latent", *case, config)[0] for config in (fused, SMALL))
    assert cases.error(value, expected) < FLOAT32


def test_splits_tile_the_cache_without_gaps():
    config = DecodeAttentionConfig(split=32, block=16)
    capacity = 32 * (16 + 2 * 24 + 4 * 48 + 16 * 3) + 5
    starts = [config.split_start(i) for i in range(config.num_splits(capacity) + 1)]
    assert starts[0] == 0
    assert starts[-2] < capacity <= starts[-1]
    assert all(start % config.block == 0 for start in starts)
    for position in range(capacity):
        split = config.split_of(position)
        assert starts[split] <= position < starts[split + 1]


def test_sums_do_not_depend_on_the_number_of_tokens():
    shape = dict(key_dim=576, value_dim=512, group=16, dtype_name="bfloat16", device_kind="none")
    one = config_for(num_tokens=1, batch=1, **shape)
    many = config_for(num_tokens=17, batch=32, **shape)
    for field in ("split", "block", "product_out", "value_out", "combine_splits", "num_warps"):
        assert getattr(one, field) == getattr(many, field)
    assert one.rows == one.product_rows == 16
    assert many.rows > 16


def test_who_computes(kind, monkeypatch):
    sizes, name, _ = kind
    arrays, options = sizes.case(1, 2, 32)
    choose = getattr(api, name)
    if api.tuning.is_cuda_gpu():
        pytest.skip("a GPU is there")
    expected = getattr(reference, name)(*arrays, **options)
    for value, other in zip(choose(*arrays, **options), expected, strict=True):
        np.testing.assert_array_equal(value, other)
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU, the default device is"):
        choose(*arrays, **options, implementation="pallas")
    with pytest.raises(ValueError, match="implementation must be"):
        choose(*arrays, **options, implementation="other")
    monkeypatch.setattr("pallas_kernels.tuning.is_cuda_gpu", lambda: True)
    called = []
    monkeypatch.setattr(pallas_triton, name, lambda *_, config, **__: called.append(config))
    choose(*arrays, **options)
    assert called[0].rows == 16


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (dict(num_tokens=33, dtype_name="bfloat16", rank=512), "at most 32 new tokens, got 33"),
        (dict(num_tokens=1, dtype_name="int8", rank=512), "products must be"),
        (dict(num_tokens=1, dtype_name="bfloat16", rank=96), "rank must be a power of two"),
        (dict(num_tokens=1, dtype_name="float32", rank=512), "from 16 to 128, got 512"),
        (dict(num_tokens=17, dtype_name="bfloat16", rank=512), None),
    ],
)
def test_unsupported_sizes_are_named(sizes, reason):
    found = unsupported_reason(**sizes)
    assert found is None if reason is None else reason in found
