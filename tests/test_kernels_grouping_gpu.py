"""Grouping and routing inside other kernels on a real GPU; run by scripts/test_gpu.sh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.constants import NOT_RESIDENT
from pallas_kernels.draft_experts import draft_experts, draft_routed, routes
from pallas_kernels.expert_ffn import grouping, triton_grouping
from pallas_kernels.expert_ffn.api import expert_ffn
from pallas_kernels.expert_ffn.slot_rows import slot_rows
from pallas_kernels.nested_ffn.arithmetic import arrange
from pallas_kernels.nested_ffn.triton_inputs import arrange_inputs
from pallas_kernels.routing import RoutingRule, choose_experts

pytestmark = pytest.mark.gpu

SHAPES = [
    (1, 6, 64, 16),
    (9, 6, 64, 16),
    (17, 6, 64, 8),
    (9, 4, 60, 16),
    (9, 2, 16, 16),
    (17, 8, 128, 16),
    (9, 8, 512, 16),
    (544, 6, 64, 64),
    (544, 8, 128, 64),
]


@pytest.fixture(autouse=True)
def gpu():
    if not tuning.is_cuda_gpu():
        pytest.skip("needs an NVIDIA GPU")


def random_case(seed, num_rows, top_k, num_experts, missing):
    rng = np.random.default_rng(seed)
    experts = np.array([rng.permutation(num_experts)[:top_k] for _ in range(num_rows)], np.int32)
    experts[rng.random(num_rows) < 0.2] = num_experts
    slot_row = rng.permutation(num_experts + 3)[:num_experts].astype(np.int32)
    slot_row[rng.random(num_experts) < missing] = NOT_RESIDENT
    return jnp.asarray(experts), jnp.asarray(slot_row)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_agrees_with_plain_grouping(shape):
    num_rows, top_k, num_experts, block_rows = shape
    plain, kernel = (
        jax.jit(functools.partial(function, block_rows=block_rows))
        for function in (grouping.group_choices, triton_grouping.group_choices)
    )
    assert triton_grouping.supported(num_rows * top_k, num_experts)
    for seed, missing in enumerate((0.0, 0.1, 0.5, 1.0)):
        case = random_case(seed, num_rows, top_k, num_experts, missing)
        expected, groups = plain(*case), kernel(*case)
        for field in ("block_expert", "block_choices", "rank", "misses"):
            np.testing.assert_array_equal(getattr(groups, field), getattr(expected, field), field)


def test_choices_of_nothing_are_zeros_whatever_memory_held():
    experts, slot_row = random_case(7, 40, 2, 16, 0.5)
    key = jax.random.key(0)
    x = jax.random.normal(key, (40, 128), jnp.bfloat16)
    slots = jax.random.normal(key, (19, 3 * 64 * 128), jnp.bfloat16)
    weights = jnp.ones((40, 2))
    call = functools.partial(expert_ffn, compute_dtype=jnp.bfloat16)
    kernels = jax.jit(functools.partial(call, implementation="pallas", with_misses=True))
    reference = jax.jit(functools.partial(call, implementation="reference"))
    expected = reference(x, experts, weights, slots, slot_row)
    nothing = ((experts >= 16) | (slot_row[jnp.minimum(experts, 15)] == NOT_RESIDENT)).all(-1)
    assert nothing.any()
    for _ in range(3):
        # Memory that the outputs may come to lie in.
        jax.block_until_ready(jnp.full((200, 128), jnp.nan))
        total, misses = kernels(x, experts, weights, slots, slot_row)
        assert not total[nothing].any()
        assert jnp.linalg.norm(total - expected) < 1e-2 * jnp.linalg.norm(expected)
        assert misses == grouping.count_misses(experts, slot_row)


def test_rows_of_a_slot_table():
    table = jnp.arange(26 * 60, dtype=jnp.int32).reshape(26, 60)
    np.testing.assert_array_equal(jnp.stack(jax.jit(slot_rows)(table)), table)


@pytest.mark.parametrize(
    ("hidden", "inner", "num_experts", "rule"),
    [
        (2048, 1408, 64, RoutingRule(kind="softmax", top_k=6)),
        (256, 128, 60, RoutingRule(kind="softmax", top_k=4, normalize_weights=True)),
        (256, 128, 16, RoutingRule(kind="sparse_mixer", top_k=2, jitter=0.1)),
    ],
    ids=["deepseek-v2-lite", "normalized", "sparse-mixer"],
)
@pytest.mark.parametrize("num_rows", [1, 5])
def test_draft_routes_as_the_routing_kernel_does(hidden, inner, num_experts, rule, num_rows):
    keys = jax.random.split(jax.random.key(3), 8)

    def codes(key, *shape):
        return jax.random.randint(key, shape, -(1 << 31), (1 << 31) - 1, jnp.int32)

    def scales(key, *shape):
        return jax.random.uniform(key, shape, minval=0.01, maxval=0.03).astype(jnp.bfloat16)

    tables = jnp.broadcast_to(jnp.linspace(0.1, 1.0, 8), (num_experts, 3, 8))
    layer = {
        "gate_up_codes": codes(keys[0], num_experts, 2 * inner, hidden // 8),
        "gate_up_scales": scales(keys[1], num_experts, 2 * inner, hidden // 128),
        "down_codes": codes(keys[2], num_experts, hidden, inner // 8),
        "down_scales": scales(keys[3], num_experts, hidden, inner // 128),
        "tables": tables,
    }
    x = jax.random.normal(keys[4], (num_rows, hidden), jnp.bfloat16)
    logits = jax.random.normal(keys[5], (num_rows, num_experts))
    mask = jnp.arange(num_rows) != 3
    assert routes(x, layer, rule)
    value, chosen = jax.jit(functools.partial(draft_routed, rule=rule))(x, logits, mask, layer)
    experts, weights = jax.jit(functools.partial(choose_experts, rule=rule))(logits, mask)
    np.testing.assert_array_equal(chosen, experts)
    expected = jax.jit(draft_experts)(x, experts, weights, layer)
    assert jnp.linalg.norm(value - expected) < 1e-3 * jnp.linalg.norm(expected)
    assert not value[~mask].any()


@pytest.mark.parametrize(
    ("num_experts", "rule"),
    [
        (64, RoutingRule(kind="softmax", top_k=6)),
        (60, RoutingRule(kind="softmax", top_k=4, normalize_weights=True, scaling_factor=2.5)),
        (160, RoutingRule(kind="group_limited", top_k=6, num_groups=8, top_groups=3)),
        (16, RoutingRule(kind="sparse_mixer", top_k=2, jitter=0.1)),
    ],
    ids=["softmax", "normalized", "group-limited", "sparse-mixer"],
)
@pytest.mark.parametrize("num_rows", [2, 9, 16])
def test_routing_and_grouping_in_one_kernel_keep_bits(num_experts, rule, num_rows):
    keys = jax.random.split(jax.random.key(num_rows), 2)
    logits = jax.random.normal(keys[0], (544, num_experts)) * 3
    mask = jax.random.uniform(keys[1], (544,)) < 0.8
    _, slot_row = random_case(9, 1, 1, num_experts, 0.3)
    assert triton_grouping.routes(num_rows, num_experts, rule.top_k)
    together = jax.jit(functools.partial(triton_grouping.route_and_group, rule=rule, block_rows=16))
    experts, weights, groups = together(logits[:num_rows], mask[:num_rows], slot_row)
    # Among 544 rows, by the kernel of one program a row.
    apart = jax.jit(functools.partial(choose_experts, rule=rule))(logits, mask)
    np.testing.assert_array_equal(experts, apart[0][:num_rows])
    np.testing.assert_array_equal(weights, apart[1][:num_rows])
    expected = grouping.group_choices(experts, slot_row, 16)
    for field in ("block_expert", "block_choices", "rank", "misses"):
        np.testing.assert_array_equal(getattr(groups, field), getattr(expected, field), field)


@pytest.mark.parametrize("block_rows", [8, 64])
def test_nested_inputs(block_rows):
    experts, slot_row = random_case(8, 9, 6, 64, 0.3)
    groups = grouping.group_choices(experts, slot_row, block_rows)
    x = jax.random.normal(jax.random.key(0), (9, 2048), jnp.bfloat16)
    call = jax.jit(functools.partial(arrange_inputs, top_k=6, block_in=128))
    arranged, inputs = call(x, groups.block_choices)
    np.testing.assert_array_equal(arranged, arrange(x, 128))
    rows = groups.block_choices.reshape(-1, block_rows // 8, 8) // 6
    expected = x.at[rows].get(mode="fill", fill_value=0).swapaxes(2, 3)
    np.testing.assert_array_equal(inputs, expected)
