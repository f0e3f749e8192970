"""The attention kernels on a GPU at real sizes, against float64; run by scripts/test_gpu.sh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.decode_attention import api
from tests import attention_cases as cases

pytestmark = pytest.mark.gpu

ROUNDING = {jnp.bfloat16: 1e-2, jnp.float32: 1e-5}
KINDS = {
    "deepseek-v2-lite": cases.Latent(heads=16, nope=128, rope=64, value=128, rank=512),
    "qwen1.5-moe": cases.Grouped(heads=16, kv_heads=16, dim=128, value=128),
    "phi-3.5-moe": cases.Grouped(heads=32, kv_heads=8, dim=128, value=128),
    "tiny-deepseek": cases.Latent(heads=8, nope=32, rope=16, value=32, rank=64),
}


@pytest.fixture(params=KINDS)
def sizes(request):
    if not tuning.is_cuda_gpu():
        pytest.skip("needs an NVIDIA GPU")
    return KINDS[request.param]


def functions(sizes):
    """The kernels' function and the one in float64."""
    latent = isinstance(sizes, cases.Latent)
    exact = cases.latent_float64 if latent else cases.grouped_float64
    return (api.attend_latent if latent else api.attend_grouped), exact


def compiled(function, options):
    return jax.jit(functools.partial(function, **options, implementation="pallas"))


@pytest.mark.parametrize(
    ("batch", "tokens", "capacity", "window", "dtype"),
    [
        (1, 1, 256, 0, jnp.bfloat16),
        (3, 9, 1024, 0, jnp.bfloat16),
        (2, 17, 1000, 100, jnp.bfloat16),
        (2, 3, 256, 0, jnp.float32),
    ],
)
def test_matches_float64(sizes, batch, tokens, capacity, window, dtype):
    function, exact = functions(sizes)
    if dtype == jnp.float32 and getattr(sizes, "rank", 0) > 128:
        pytest.skip("latents of this size in float32 are left to the reference")
    arrays, options = sizes.case(batch, tokens, capacity, dtype, window=window)
    values = compiled(function, options)(*arrays)
    for value, expected in zip(values, exact(arrays, options), strict=True):
        assert cases.error(value, expected) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_tokens_bits_do_not_depend_on_the_others(sizes, dtype):
    function, _ = functions(sizes)
    if dtype == jnp.float32 and getattr(sizes, "rank", 0) > 128:
        pytest.skip("latents of this size in float32 are left to the reference")
    batch, tokens = 3, 17
    lengths = np.array([0, 118, 983])
    arrays, options = sizes.case(batch, tokens, 1024, dtype, lengths=lengths)
    call = compiled(function, options)
    attended, *cache = call(*arrays)
    repeated, *_ = call(*arrays)
    np.testing.assert_array_equal(repeated, attended)
    for start, stop in ((0, 1), (4, 6), (8, 17)):
        value, *same = call(*cases.part(arrays, start, stop, cache))
        np.testing.assert_array_equal(value, attended[:, start:stop])
        for entries, expected in zip(same, cache, strict=True):
            np.testing.assert_array_equal(entries, expected)
    # One sequence alone, with several tokens and with a single one.
    row = cases.row(cases.part(arrays, 0, tokens, cache), 2)
    for start, stop in ((3, 12), (16, 17)):
        alone = tuple(entries[2:3] for entries in cache)
        value, *_ = call(*cases.part(row, start, stop, alone))
        np.testing.assert_array_equal(value, attended[2:3, start:stop])


def test_bits_do_not_depend_on_the_capacity(sizes):
    function, _ = functions(sizes)
    arrays, options = sizes.case(2, 5, 256, jnp.bfloat16)
    *others, first, second, lengths = arrays
    attended, *_ = compiled(function, options)(*arrays)
    padding = [(0, 0), (0, 1024 - 256)]
    first, second = (jnp.pad(e, padding + [(0, 0)] * (e.ndim - 2)) for e in (first, second))
    value, *_ = compiled(function, options)(*others, first, second, lengths)
    np.testing.assert_array_equal(value, attended)
