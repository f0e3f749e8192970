"""The draft experts' Triton kernels, interpreted on the CPU, against float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.draft_experts import prepare_draft_layer
from pallas_kernels.draft_experts.arithmetic import pack_tables
from pallas_kernels.draft_experts.config import config_for, unsupported_reason
from pallas_kernels.draft_experts.pallas_triton import draft_experts, draft_routed
from pallas_kernels.routing import RoutingRule, choose_experts, compares
from tests import kernel_cases as cases

# Tables within 0.4 % of their largest entry and bytes for activations in three products.
ROUNDING = 2e-2
# Float32 against float64, and now and then an activation that rounds to the other neighbour.
SAME_ROUNDING = 2e-3


@functools.cache
def compiled(config):
    return jax.jit(functools.partial(draft_experts, config=config, interpret=True))


def run(x, experts, weights, layer, **changes):
    hidden, inner = x.shape[1], layer["down_codes"].shape[2] * 8
    config = dataclasses.replace(config_for(hidden, inner, "none"), **changes)
    layer = {name: jnp.asarray(value) for name, value in layer.items()}
    return np.asarray(compiled(config)(*cases.device(x, experts, weights), layer))


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    sizes = cases.Sizes()
    layer = cases.draft_layer(rng, sizes)
    experts, weights = cases.choices(rng, sizes, 3)
    x = rng.standard_normal((3, sizes.hidden), np.float32)
    return x, experts, weights, layer


def test_close_to_exact_products_of_the_decoded_weights(case):
    assert cases.error(run(*case), cases.draft_float64(*case)) < ROUNDING


def test_equals_float64_on_the_same_rounded_tables_and_activations(case):
    expected = cases.draft_float64(*case, rounded=True)
    assert cases.error(run(*case), expected) < SAME_ROUNDING


@pytest.mark.parametrize(
    "changes",
    [
        {"gate_up_rows": 32, "gate_up_chunk_words": 4, "gate_up_ahead": 2},
        {"gate_up_words": 8, "gate_up_chunk_words": 8},
        {"down_rows": 16, "down_chunks": 4, "down_ahead": 1},
        {"down_chunk_words": 4, "down_chunks": 2, "down_ahead": 0},
    ],
)
def test_block_shapes_change_rounding_only(case, changes):
    # Another order of summation in float32 may move an activation to the neighbouring byte.
    assert cases.error(run(*case, **changes), run(*case)) < SAME_ROUNDING


def test_a_choice_of_no_expert_adds_nothing(case):
    x, experts, weights, layer = case
    experts = experts.copy()
    experts[1] = cases.Sizes().num_experts
    experts[2, 0] = cases.Sizes().num_experts + 7
    value = run(x, experts, weights, layer)
    assert not value[1].any()
    assert cases.error(value, cases.draft_float64(x, experts, weights, layer)) < ROUNDING


def test_rows_do_not_depend_on_other_rows_and_runs_repeat(case):
    x, experts, weights, layer = case
    value = run(x, experts, weights, layer)
    np.testing.assert_array_equal(run(x, experts, weights, layer), value)
    np.testing.assert_array_equal(run(x[1:2], experts[1:2], weights[1:2], layer)[0], value[1])


def test_an_outlier_costs_precision_in_its_own_block_only(case):
    x, experts, weights, layer = case
    x = x.copy()
    x[:, 5] = 30
    value = run(x, experts, weights, layer)
    exact = cases.draft_float64(x, experts, weights, layer)
    # The outlier's own weights weigh as much as all others: their table error is not averaged.
    assert cases.error(value, exact) < 2 * ROUNDING
    assert cases.error(value, cases.draft_float64(x, experts, weights, layer, True)) < SAME_ROUNDING


def test_zero_row_gives_zero(case):
    x, experts, weights, layer = case
    assert not run(np.zeros_like(x), experts, weights, layer).any()


def test_packed_tables_can_be_made_ahead(case):
    x, experts, weights, layer = case
    packed = pack_tables(jnp.asarray(layer["tables"]))
    assert packed["table_bytes"].dtype == jnp.int32
    np.testing.assert_array_equal(
        run(x, experts, weights, {**layer, **packed}), run(x, experts, weights, layer)
    )


def test_packed_tables_hold_the_nearest_halves():
    tables = np.random.default_rng(1).uniform(0.01, 0.95, (2, 3, 8)).astype(np.float32)
    packed = pack_tables(jnp.asarray(tables))
    numbers = np.asarray(packed["table_bytes"]).view(np.uint8).reshape(tables.shape)
    values = (numbers + 0.5) * np.asarray(packed["table_steps"])[..., None]
    assert (np.abs(values - tables) <= tables.max(-1, keepdims=True) / 254.9).all()


def test_unsupported_sizes_are_named():
    assert unsupported_reason(128, 96, 32, 32) is None
    assert "inner size must be a multiple of 32, got 40" in unsupported_reason(128, 40, 32, 40)
    assert "scale group of down" in unsupported_reason(128, 96, 32, 48)


def test_prepared_layers_give_the_same_bits(case):
    x, experts, weights, layer = case
    prepared = prepare_draft_layer({name: jnp.asarray(value) for name, value in layer.items()})
    assert prepared["table_bytes"].nbytes + prepared["table_steps"].nbytes == 36 * len(
        layer["tables"]
    )
    np.testing.assert_array_equal(run(x, experts, weights, prepared), run(*case))


RULES = [
    RoutingRule(kind="softmax", top_k=3),
    RoutingRule(kind="softmax", top_k=2, normalize_weights=True, scaling_factor=2.5),
    RoutingRule(kind="sparse_mixer", top_k=2, jitter=0.3),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kind}-{rule.top_k}")
def test_routing_inside_chooses_as_the_routing_kernel_does(rule):
    rng = np.random.default_rng(5)
    sizes = cases.Sizes(num_experts=20)
    assert compares(rule, sizes.num_experts)
    layer = cases.draft_layer(rng, sizes)
    x = rng.standard_normal((4, sizes.hidden), np.float32)
    logits = rng.standard_normal((4, sizes.num_experts)).astype(np.float32)
    logits[1, 3:9] = logits[1].max() + 1  # ties go to the lower id
    mask = np.array([True, True, False, True])
    experts, weights = choose_experts(*cases.device(logits, mask), rule, interpret=True)
    layer = {name: jnp.asarray(value) for name, value in layer.items()}
    config = config_for(sizes.hidden, sizes.inner, "none")
    value, chosen = jax.jit(
        functools.partial(draft_routed, rule=rule, config=config, interpret=True)
    )(*cases.device(x, logits, mask), layer)
    np.testing.assert_array_equal(chosen, experts)
    assert (np.asarray(chosen)[2] == sizes.num_experts).all()
    expected = compiled(config)(jnp.asarray(x), experts, weights, layer)
    assert not value[2].any()
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-4)


def test_rules_that_are_not_compared():
    assert not compares(RoutingRule(kind="group_limited", top_k=2, num_groups=2), 16)
    assert not compares(RULES[0], 65)
    assert compares(RULES[0], 64)
