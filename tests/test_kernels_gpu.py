"""The kernels on a real GPU at real sizes, against the references; run by scripts/test_gpu.sh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.constants import NOT_RESIDENT
from pallas_kernels.draft_experts import api as draft_api
from pallas_kernels.expert_ffn import api as ffn_api
from pallas_kernels.expert_ffn import pallas_triton as ffn_kernels
from pallas_kernels.expert_ffn.config import config_for
from pallas_kernels.small_dense import Dense, Norm, Normalized, api, reference
from tests.routing_cases import KINDS, check_routing

pytestmark = pytest.mark.gpu

DRAFT_ROUNDING = 2e-2  # bytes for tables and activations, see draft_experts/arithmetic.py
FFN_ROUNDING = 5e-3  # both sides round the same operands to bfloat16, the hidden ones rarely apart
MOST_ROWS = 544


@dataclasses.dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    num_experts: int
    top_k: int


SHAPES = {
    "deepseek-v2-lite": Shape(2048, 1408, 64, 6),
    "qwen1.5-moe": Shape(2048, 1408, 60, 4),
    "phi-3.5-moe": Shape(4096, 6400, 16, 2),
    "small": Shape(128, 96, 8, 2),
}


@pytest.fixture(params=SHAPES, scope="module")
def shape(request):
    if not tuning.is_cuda_gpu():
        pytest.skip("needs an NVIDIA GPU")
    return SHAPES[request.param]


def inputs(shape, num_rows):
    keys = jax.random.split(jax.random.key(num_rows), num_rows)
    order = jax.vmap(lambda key: jax.random.permutation(key, shape.num_experts))(keys)
    x = jax.random.normal(keys[0], (num_rows, shape.hidden), jnp.bfloat16)
    weights = jax.random.uniform(keys[0], (num_rows, shape.top_k))
    return x, order[:, : shape.top_k].astype(jnp.int32), weights


def error(value, expected):
    return float(jnp.linalg.norm(value - expected) / jnp.linalg.norm(expected))


@pytest.fixture(scope="module")
def draft_layer(shape):
    group = 128 if shape.inner % 128 == 0 else 32
    keys = iter(jax.random.split(jax.random.key(0), 5))

    def codes(*dims):
        bits = jax.random.bits(next(keys), dims, jnp.uint32)
        return jax.lax.bitcast_convert_type(bits, jnp.int32)

    def scales(num_in, *dims):
        scale = jax.random.uniform(next(keys), dims, minval=1, maxval=3) * num_in**-0.5
        return scale.astype(jnp.bfloat16)

    hidden, inner, experts = shape.hidden, shape.inner, shape.num_experts
    tables = jnp.sort(jax.random.uniform(next(keys), (experts, 3, 8)), axis=-1)
    return {
        "gate_up_codes": codes(experts, 2 * inner, hidden // 8),
        "gate_up_scales": scales(hidden, experts, 2 * inner, hidden // group),
        "down_codes": codes(experts, hidden, inner // 8),
        "down_scales": scales(inner, experts, hidden, inner // group),
        "tables": tables,
    }


@pytest.mark.parametrize("num_rows", [1, 5])
def test_draft_matches_reference(shape, draft_layer, num_rows):
    x, experts, weights = inputs(shape, num_rows)
    if num_rows > 1:
        experts = experts.at[1].set(shape.num_experts)
    kernels = jax.jit(functools.partial(draft_api.draft_experts, implementation="pallas"))
    plain = jax.jit(functools.partial(draft_api.draft_experts, implementation="reference"))
    value = kernels(x, experts, weights, draft_layer)
    assert error(value, plain(x, experts, weights, draft_layer)) < DRAFT_ROUNDING
    np.testing.assert_array_equal(kernels(x, experts, weights, draft_layer), value)
    if num_rows > 1:
        assert not value[1].any()


@pytest.fixture(scope="module")
def slots(shape):
    # 300 slots of the first shape are more than 2**31 elements: offsets need 64 bits.
    num_slots = 300 if shape.num_experts == 64 else shape.num_experts + 1

    def fill():
        keys = jax.random.split(jax.random.key(1), num_slots)
        size = (3 * shape.hidden * shape.inner,)
        scale = jnp.bfloat16(shape.hidden**-0.5)
        return jax.lax.map(lambda key: jax.random.normal(key, size, jnp.bfloat16) * scale, keys)

    order = jax.random.permutation(jax.random.key(2), num_slots)[: shape.num_experts]
    return jax.jit(fill)(), order.astype(jnp.int32).at[3].set(NOT_RESIDENT)


@pytest.mark.parametrize("num_rows", [1, 17, MOST_ROWS])
def test_ffn_matches_reference_and_rows_keep_their_bits(shape, slots, num_rows):
    x, experts, weights = inputs(shape, MOST_ROWS)
    experts = experts.at[5].set(shape.num_experts)
    common = dict(compute_dtype=jnp.bfloat16)
    kernels = jax.jit(functools.partial(ffn_api.expert_ffn, implementation="pallas", **common))
    plain = jax.jit(functools.partial(ffn_api.expert_ffn, implementation="reference", **common))
    some = [array[:num_rows] for array in (x, experts, weights)]
    value = kernels(*some, *slots)
    assert error(value, plain(*some, *slots)) < FFN_ROUNDING
    np.testing.assert_array_equal(kernels(*some, *slots), value)
    everything = kernels(x, experts, weights, *slots)
    np.testing.assert_array_equal(value, everything[:num_rows])
    assert not everything[5].any()


@pytest.mark.parametrize("block_rows", [32, 64])
def test_row_blocks_do_not_change_bits(shape, slots, block_rows):
    x, experts, weights = inputs(shape, 40)
    config = config_for(shape.hidden, shape.inner, "bfloat16", "none", num_choices=1, num_experts=1)
    wide = dataclasses.replace(config, block_rows=block_rows)
    narrow, wide = (
        jax.jit(functools.partial(ffn_kernels.expert_ffn, compute_dtype=jnp.bfloat16, config=c))
        for c in (config, wide)
    )
    expected = narrow(x, experts, weights, *slots)
    np.testing.assert_array_equal(wide(x, experts, weights, *slots), expected)


def test_ffn_in_float32_on_a_small_shape():
    if not tuning.is_cuda_gpu():
        pytest.skip("needs an NVIDIA GPU")
    shape = SHAPES["small"]
    x, experts, weights = inputs(shape, 20)
    slots = jax.random.normal(jax.random.key(3), (shape.num_experts, 3 * 128 * 96))
    slot_row = jnp.arange(shape.num_experts, dtype=jnp.int32)
    value, expected = (
        jax.jit(functools.partial(ffn_api.expert_ffn, implementation=name))(
            x, experts, weights, slots, slot_row
        )
        for name in ("pallas", "reference")
    )
    assert error(value, expected) < 1e-5


def dense_case(num_rows, num_in=2816, dtype=jnp.bfloat16):
    """x and parts with every epilogue, sizes that no block divides among them."""
    keys = iter(jax.random.split(jax.random.key(7), 20))

    def array(*shape, as_type=dtype):
        return jax.random.normal(next(keys), shape, as_type)

    def weight(outputs):
        return array(outputs, num_in) * jnp.asarray(num_in**-0.5, dtype)

    x = array(num_rows, num_in)
    return x, [
        Dense(weight=weight(700), bias=array(700), dtype=dtype),
        Dense(weight=weight(300), up=weight(300), dtype=dtype),
        Dense(
            weight=weight(512),
            scale=array(num_rows, 1, as_type=jnp.float32),
            add=(array(num_rows, 512, as_type=jnp.float32), array(num_rows, 512)),
        ),
        Dense(weight=weight(60).astype(jnp.float32), widen=True),
    ]


def few(x, parts, num_rows):
    return x[:num_rows], [
        dataclasses.replace(
            part,
            scale=part.scale if part.scale is None else part.scale[:num_rows],
            add=tuple(term[:num_rows] for term in part.add),
        )
        for part in parts
    ]


def run_products(implementation, x, parts):
    return jax.jit(functools.partial(api.products, implementation=implementation))(x, parts)


@pytest.mark.parametrize(("num_in", "dtype"), [(2816, jnp.bfloat16), (2048, jnp.float32)])
def test_dense_rows_match_and_keep_their_bits(num_in, dtype):
    if not tuning.is_cuda_gpu():
        pytest.skip("needs an NVIDIA GPU")
    x, parts = dense_case(100, num_in, dtype)
    bound = 1e-5 if dtype == jnp.float32 else FFN_ROUNDING
    whole = run_products("rows", x, parts)
    for value, expected in zip(whole, run_products("reference", x, parts), strict=True):
        assert error(value.astype(jnp.float32), expected.astype(jnp.float32)) < bound
    for num_rows in (1, 2, 9, 17, 33, 64):
        values = run_products("rows", *few(x, parts, num_rows))
        for value, expected in zip(values, whole, strict=True):
            np.testing.assert_array_equal(value, expected[:num_rows])


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_in", [2048, 2816, 10944])
def test_dense_vector_and_norms_match(num_in, has_bias):
    if not tuning.is_cuda_gpu():
        pytest.skip("needs an NVIDIA GPU")
    x, parts = few(*dense_case(20, num_in), 1)
    weight, bias = jax.random.normal(jax.random.key(1), (2, num_in), jnp.bfloat16)
    norm = Norm(weight=weight, bias=bias if has_bias else None, eps=1e-6)
    expected_input = reference.normalize(x, norm)
    normed = jax.jit(lambda x: api.normalize(x, norm, implementation="rows"))(x)
    assert error(normed.astype(jnp.float32), expected_input.astype(jnp.float32)) < FFN_ROUNDING
    run = jax.jit(
        lambda x, parts: api.products(
            Normalized(x, norm), parts, keep_input=True, implementation="vector"
        )
    )
    *values, kept = run(x, parts)
    assert error(kept.astype(jnp.float32), expected_input.astype(jnp.float32)) < FFN_ROUNDING
    for value, expected in zip(values, reference.products(expected_input, parts), strict=True):
        assert error(value.astype(jnp.float32), expected.astype(jnp.float32)) < FFN_ROUNDING


@pytest.mark.parametrize("kind", KINDS)
def test_routing_matches_its_reference(kind):
    if not tuning.is_cuda_gpu():
        pytest.skip("needs an NVIDIA GPU")
    check_routing(kind, interpret=False)
