"""The small dense products' Triton kernels, interpreted on the CPU, against float64."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.products import contract
from pallas_kernels.small_dense import Dense, Norm, Normalized, api, pallas_triton, reference
from pallas_kernels.small_dense.config import (
    TUNED_FOLDER,
    SmallDenseConfig,
    config_for,
    unsupported_reason,
)
from specter_jax.config import ModelConfig
from specter_jax.models.router import choose_experts
from tests.checkpoints import tiny_config
from tests.routing_cases import KINDS, check_routing

SMALL = SmallDenseConfig(rows_out=16, rows_in=16, vector_out=4, vector_ahead=2, vector_warps=1)
FLOAT32, BFLOAT16 = 1e-5, 1e-2
EPS = 1e-6


def dense64(x, part, dtype):
    """A part's result in float64, from operands rounded to `dtype`."""

    def side(weight, bias):
        y = x @ np.asarray(jnp.asarray(weight).astype(dtype), np.float64).T
        return y if bias is None else y + np.asarray(bias, np.float64)

    y = side(part.weight, part.bias)
    if part.up is not None:
        y = y / (1 + np.exp(-y)) * side(part.up, part.up_bias)
    if part.scale is not None:
        y = y / (1 + np.exp(-np.asarray(part.scale, np.float64)))
    if part.terms is not None:
        y = y + np.asarray(part.terms, np.float64).sum(-2)
    return y + sum(np.asarray(term, np.float64) for term in part.add)


def norm64(x, norm):
    x = np.asarray(x, np.float64)
    if norm.bias is not None:
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + norm.eps) * np.asarray(norm.weight)
    return x if norm.bias is None else x + np.asarray(norm.bias)


def case(num_rows, num_in=304, dtype=jnp.float32, seed=0):
    """x and four parts: plain, gated with biases, with all of the epilogue, one output wide."""
    rng = np.random.default_rng(seed)

    def array(*shape, as_type=dtype, scale=1.0):
        return jnp.asarray(rng.standard_normal(shape) * scale, as_type)

    def weight(outputs, as_type=dtype):
        return array(outputs, num_in, as_type=as_type, scale=num_in**-0.5)

    x = array(num_rows, num_in)
    parts = [
        Dense(weight=weight(37), dtype=dtype),
        Dense(weight=weight(20), bias=array(20), up=weight(20), up_bias=array(20)),
        Dense(
            weight=weight(24),
            scale=array(num_rows, 1, as_type=jnp.float32),
            terms=array(num_rows, 3, 24, as_type=jnp.float32),
            add=(array(num_rows, 24, as_type=jnp.float32), array(num_rows, 24)),
            dtype=dtype,
        ),
        Dense(weight=weight(1, jnp.float32), widen=True),
    ]
    return x, parts


def norms(num_in, dtype=jnp.float32):
    rng = np.random.default_rng(5)
    weight, bias = (jnp.asarray(rng.standard_normal(num_in), dtype) for _ in range(2))
    return {"rms": Norm(weight=weight, eps=EPS), "layer": Norm(weight=weight, bias=bias, eps=EPS)}


def error(value, expected):
    return np.linalg.norm(np.asarray(value, np.float64) - expected) / np.linalg.norm(expected)


@functools.cache
def kernel(name, **options):
    function = getattr(pallas_triton, name)
    return jax.jit(functools.partial(function, config=SMALL, interpret=True, **options))


@pytest.mark.parametrize("num_rows", [1, 2, 17, 70])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_match_float64(num_rows, dtype):
    x, parts = case(num_rows, dtype=dtype)
    for value, part in zip(kernel("rows")(x, parts), parts, strict=True):
        expected = dense64(np.asarray(x, np.float64), part, part.compute_dtype(dtype))
        assert value.dtype == part.dtype
        assert error(value, expected) < (FLOAT32 if dtype == jnp.float32 else BFLOAT16)


@pytest.mark.parametrize("num_in", [16, 256, 304])
@pytest.mark.parametrize("kind", [None, "rms", "layer"])
def test_vector_matches_float64(num_in, kind):
    x, parts = case(1, num_in)
    norm = kind and norms(num_in)[kind]
    *values, kept = (
        kernel("vector", keep_normed=True)(x, parts, norm)
        if norm
        else [*kernel("vector")(x, parts), x]
    )
    inputs = norm64(x, norm) if norm else np.asarray(x, np.float64)
    assert error(kept, inputs) < FLOAT32
    for value, part in zip(values, parts, strict=True):
        assert error(value, dense64(inputs, part, jnp.float32)) < FLOAT32


def test_vector_rounds_the_norm_like_the_reference():
    x, parts = case(1, 256, jnp.bfloat16)
    norm = norms(256, jnp.bfloat16)["rms"]
    *values, kept = kernel("vector", keep_normed=True)(x, parts, norm)
    expected = reference.normalize(x, norm)
    np.testing.assert_array_equal(kept.astype(jnp.float32), expected.astype(jnp.float32))
    for value, plain in zip(values, reference.products(expected, parts), strict=True):
        assert error(value, np.asarray(plain, np.float64)) < BFLOAT16


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_of_rows_matches_float64(kind):
    x, _ = case(5)
    norm = norms(304)[kind]
    assert error(kernel("normalize")(x, norm), norm64(x, norm)) < FLOAT32


def test_the_reference_is_taken_without_a_gpu():
    x, parts = case(3)
    values = api.products(x, parts, keep_input=True)
    assert values[-1] is x
    for value, expected in zip(values, reference.products(x, parts), strict=False):
        np.testing.assert_array_equal(value, expected)
    norm = norms(304)["rms"]
    deferred = api.normalized(x[:1], norm)
    assert not isinstance(deferred, Normalized)
    np.testing.assert_array_equal(deferred, reference.normalize(x[:1], norm))


def test_a_plain_product_is_contract():
    x, parts = case(3, dtype=jnp.bfloat16)
    [value] = reference.products(x, [dataclasses.replace(parts[0], dtype=jnp.float32)])
    np.testing.assert_array_equal(value, contract(x, parts[0].weight))


def test_a_deferred_norm_is_an_array_where_one_is_wanted():
    x, parts = case(1)
    deferred = Normalized(x, norms(304)["rms"])
    expected = reference.normalize(x, deferred.norm)
    np.testing.assert_array_equal(jnp.asarray(deferred), expected)
    assert (deferred.shape, deferred.ndim, deferred.dtype) == (x.shape, 2, x.dtype)
    [value] = api.products(deferred, parts[:1])
    np.testing.assert_array_equal(value, reference.products(expected, parts[:1])[0])


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"implementation": "rows"}, NotImplementedError),
        ({"implementation": "vector"}, ValueError),
        ({"implementation": "fast"}, ValueError),
    ],
)
def test_refuses_what_it_cannot_run(options, wrong):
    x, parts = case(2)
    with pytest.raises(wrong):
        api.products(x, parts, **options)


def test_the_shipped_table_is_what_its_shapes_get():
    for entry in json.loads((TUNED_FOLDER / "nvidia_h200.json").read_text()):
        inputs, outputs = entry["match"]["inputs"], entry["match"]["outputs"]
        config = config_for(inputs, outputs, "bfloat16", "NVIDIA H200")
        assert config.early_launch
        assert dataclasses.asdict(config).items() >= entry["config"].items()
        checked = config_for(inputs, outputs, "float32", "NVIDIA H200")
        assert checked.rows_in == 32
        assert checked.vector_out == config.vector_out


def test_config_fits_any_supported_shape():
    for num_in in (16, 48, 2048, 10944):
        config = config_for(num_in, 64, "bfloat16", "some device")
        assert num_in % config.rows_in == 0
    assert "multiple of 16" in unsupported_reason(40, {"bfloat16"})
    assert "int8" in unsupported_reason(64, {"bfloat16", "int8"})
    assert unsupported_reason(64, {"bfloat16", "float32"}) is None


@pytest.mark.parametrize("kind", KINDS)
def test_routing_kernel_follows_the_plain_rule(kind):
    check_routing(kind, interpret=True)


def test_masked_rows_choose_no_expert():
    config = ModelConfig.from_hf(tiny_config("mixtral"))
    logits = jnp.ones((1, 2, config.num_experts))
    experts, _ = choose_experts(config, logits, jnp.array([[True, False]]))
    assert experts[0, 1].tolist() == [config.no_expert] * config.top_k
    assert experts[0, 0].tolist() == [0, 1]


@pytest.mark.parametrize("num_rows", [1, 17])
def test_terms_are_summed_before_they_are_added(num_rows):
    x, parts = case(num_rows)
    part = parts[2]
    total = sum(part.terms[:, number] for number in range(3))
    apart = dataclasses.replace(part, terms=None, add=(total, *part.add))
    for name in ("rows", "vector") if num_rows == 1 else ("rows",):
        values = kernel(name)(x, [part]), kernel(name)(x, [apart])
        np.testing.assert_array_equal(*(value[0] for value in values))
