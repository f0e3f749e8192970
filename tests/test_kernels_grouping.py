"""Grouping choices by expert: plain JAX, and the kernel interpreted on the CPU against it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.constants import NOT_RESIDENT
from pallas_kernels.expert_ffn import grouping, triton_grouping
from pallas_kernels.expert_ffn.api import expert_ffn
from pallas_kernels.expert_ffn.slot_rows import slot_rows
from pallas_kernels.nested_ffn.arithmetic import arrange
from pallas_kernels.nested_ffn.triton_inputs import arrange_inputs
from pallas_kernels.routing import RoutingRule, choose_experts

FIELDS = ("block_expert", "block_choices", "rank", "misses")


@functools.cache
def compiled(function, block_rows, **options):
    return jax.jit(functools.partial(function, block_rows=block_rows, **options))


def assert_kernel_agrees(experts, slot_row, block_rows):
    experts, slot_row = jnp.asarray(experts), jnp.asarray(slot_row)
    assert triton_grouping.supported(experts.size, slot_row.size)
    plain = compiled(grouping.group_choices, block_rows)(experts, slot_row)
    kernel = compiled(triton_grouping.group_choices, block_rows, interpret=True)(experts, slot_row)
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(kernel, field), getattr(plain, field), field)
    return plain


def random_case(seed, num_rows, top_k, num_experts, missing, masked, popular):
    """Rows of distinct experts but for `masked` of them; few experts are chosen where `popular`."""
    rng = np.random.default_rng(seed)
    most = max(top_k, num_experts // 8) if popular else num_experts
    experts = np.array([rng.permutation(most)[:top_k] for _ in range(num_rows)], np.int32)
    experts[rng.random(num_rows) < masked] = num_experts
    slot_row = rng.permutation(num_experts + 3)[:num_experts].astype(np.int32)
    slot_row[rng.random(num_experts) < missing] = NOT_RESIDENT
    return experts, slot_row


# Few shapes, since each is compiled, and many cases of them.
SHAPES = [
    (1, 6, 64, 16),
    (9, 6, 64, 16),
    (17, 6, 64, 8),
    (9, 2, 16, 16),
    (5, 3, 5, 4),
    (70, 2, 7, 32),
    (3, 8, 512, 16),
]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SHAPES),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.booleans(),
)
def test_kernel_agrees_with_plain_grouping(shape, seed, missing, masked, popular):
    num_rows, top_k, num_experts, block_rows = shape
    case = random_case(seed, num_rows, top_k, num_experts, missing, masked, popular)
    assert_kernel_agrees(*case, block_rows)


@pytest.mark.parametrize("shape", [(544, 6, 64, 64), (256, 8, 60, 64), (300, 4, 128, 16)], ids=str)
def test_kernel_agrees_for_many_rows(shape):
    num_rows, top_k, num_experts, block_rows = shape
    assert_kernel_agrees(*random_case(1, num_rows, top_k, num_experts, 0.2, 0.1, False), block_rows)


def test_kernel_agrees_where_a_row_names_an_expert_twice():
    experts = np.array([[2, 2, 1], [0, 2, 0], [3, 3, 3]], np.int32)
    assert_kernel_agrees(experts, np.array([4, NOT_RESIDENT, 0, 1], np.int32), 2)


def test_sizes_beyond_the_kernel_are_grouped_plainly():
    experts, slot_row = random_case(2, 40, 2, 600, 0.1, 0.1, False)
    assert not triton_grouping.supported(experts.size, slot_row.size)
    experts, slot_row = jnp.asarray(experts), jnp.asarray(slot_row)
    groups = triton_grouping.group_choices(experts, slot_row, 16, interpret=True)
    plain = grouping.group_choices(experts, slot_row, 16)
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(groups, field), getattr(plain, field), field)


def test_each_choice_is_listed_once_under_its_expert():
    experts, slot_row = random_case(3, 10, 3, 6, 0.0, 0.2, False)
    slot_row[1] = NOT_RESIDENT
    groups = assert_kernel_agrees(experts, slot_row, 4)
    flat = experts.reshape(-1)
    valid = (flat < 6) & (slot_row[np.minimum(flat, 5)] != NOT_RESIDENT)
    seen, previous = [], -1
    for expert, block in zip(groups.block_expert, np.asarray(groups.block_choices), strict=True):
        used = block[block < experts.size]
        assert expert >= previous
        previous = int(expert)
        if expert == 6:
            assert not valid[used].any()
        else:
            assert used.size
            assert (flat[used] == expert).all()
        seen += used.tolist()
    assert sorted(seen) == list(range(experts.size))
    order = experts.argsort(-1, kind="stable").argsort(-1)
    np.testing.assert_array_equal(groups.rank, order.reshape(-1))
    chosen = set(flat[flat < 6].tolist())
    assert groups.misses == sum(slot_row[expert] == NOT_RESIDENT for expert in chosen)


def test_example_of_the_description():
    experts = jnp.array([[0, 2], [2, 0], [2, 9]], jnp.int32)
    groups = grouping.group_choices(experts, jnp.arange(3, dtype=jnp.int32), 2)
    blocks = groups.block_choices.tolist()
    assert groups.block_expert.tolist()[:4] == [0, 2, 2, 3]
    assert blocks[:4] == [[0, 3], [1, 2], [4, 6], [5, 6]]
    assert groups.misses == 0


def test_block_bound_holds_for_the_worst_spread():
    # 5 choices of 3 experts in blocks of 2: 3 + 1 + 1 choices need 4 blocks, 2 + 2 + 1 need 3.
    assert grouping.most_blocks(5, 1, 3, 2) >= 4
    assert grouping.most_blocks(2, 1, 64, 16) == 2


def test_misses_come_with_the_experts_when_asked():
    experts, slot_row = random_case(4, 6, 2, 5, 0.5, 0.3, False)
    x, weights = jnp.ones((6, 8)), jnp.ones((6, 2))
    slots = jnp.ones((8, 3 * 4 * 8))
    arguments = (x, jnp.asarray(experts), weights, slots, jnp.asarray(slot_row))
    total, misses = expert_ffn(*arguments, with_misses=True)
    np.testing.assert_array_equal(total, expert_ffn(*arguments))
    chosen = set(experts[experts < 5].tolist())
    assert misses == sum(slot_row[expert] == NOT_RESIDENT for expert in chosen)


def test_rows_of_a_slot_table():
    table = jnp.arange(3 * 60, dtype=jnp.int32).reshape(3, 60)
    for rows in (slot_rows(table), slot_rows(table, interpret=True)):
        assert len(rows) == 3
        np.testing.assert_array_equal(jnp.stack(rows), table)


RULES = [
    RoutingRule(kind="softmax", top_k=6),
    RoutingRule(kind="softmax", top_k=3, normalize_weights=True, scaling_factor=2.5),
    RoutingRule(kind="group_limited", top_k=4, num_groups=6, top_groups=3),
    RoutingRule(kind="sparse_mixer", top_k=2, jitter=0.3),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.kind}-{rule.top_k}")
@pytest.mark.parametrize("num_rows", [1, 9, 17])
def test_routing_and_grouping_in_one_kernel(rule, num_rows):
    rng = np.random.default_rng(6)
    logits = rng.standard_normal((num_rows, 60)).astype(np.float32)
    logits[0, 20:40] = logits[0, :20]
    mask = jnp.asarray(rng.random(num_rows) < 0.7)
    _, slot_row = random_case(7, 1, 1, 60, 0.3, 0.0, False)
    logits, slot_row = jnp.asarray(logits), jnp.asarray(slot_row)
    assert triton_grouping.routes(num_rows, 60, rule.top_k)
    experts, weights, groups = triton_grouping.route_and_group(
        logits, mask, slot_row, rule, 16, interpret=True
    )
    expected, expected_weights = choose_experts(logits, mask, rule, interpret=True)
    np.testing.assert_array_equal(experts, expected)
    np.testing.assert_array_equal(weights, expected_weights)
    expected = grouping.group_choices(expected, slot_row, 16)
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(groups, field), getattr(expected, field), field)


def test_many_rows_are_routed_and_grouped_apart():
    assert not triton_grouping.routes(33, 64, 6)
    assert not triton_grouping.routes(17, 256, 8)


@pytest.mark.parametrize("block_rows", [8, 32])
def test_inputs_of_blocks_and_rows_in_one_kernel(block_rows):
    experts, slot_row = random_case(8, 9, 2, 5, 0.3, 0.2, False)
    groups = grouping.group_choices(jnp.asarray(experts), jnp.asarray(slot_row), block_rows)
    x = jax.random.normal(jax.random.key(0), (9, 384), jnp.bfloat16)
    arranged, inputs = arrange_inputs(x, groups.block_choices, 2, 128, interpret=True)
    np.testing.assert_array_equal(arranged, arrange(x, 128))
    rows = np.asarray(groups.block_choices).reshape(-1, block_rows // 8, 8) // 2
    padded = np.concatenate([np.asarray(x, np.float32), np.zeros((1, 384), np.float32)])
    np.testing.assert_array_equal(inputs.astype(np.float32), padded[rows].swapaxes(2, 3))
