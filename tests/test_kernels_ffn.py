"""The expert FFN's Triton kernels, interpreted on the CPU, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.constants import NOT_RESIDENT
from pallas_kernels.expert_ffn.config import ExpertFFNConfig, config_for
from pallas_kernels.expert_ffn.pallas_triton import expert_ffn
from tests import kernel_cases as cases

SIZES = cases.Sizes(hidden=64, inner=48)
SMALL = ExpertFFNConfig(block_rows=4, block_out=16, block_in=16)
FLOAT32 = 1e-5  # sums of up to 64 float32 products
BFLOAT16 = 1e-2  # eight bits of inputs, twice


@functools.cache
def compiled(config, dtype):
    return jax.jit(
        functools.partial(expert_ffn, compute_dtype=dtype, config=config, interpret=True)
    )


def run(x, experts, weights, slots, slot_row, accumulate=None, dtype=jnp.float32):
    if accumulate is not None:
        accumulate = jnp.asarray(accumulate)
    x, experts, weights, slots, slot_row = cases.device(x, experts, weights, slots, slot_row)
    call = compiled(SMALL, dtype)
    return np.asarray(call(x, experts, weights, slots.astype(dtype), slot_row, accumulate))


def random_case(num_rows, missing=(), seed=0):
    rng = np.random.default_rng(seed)
    slots, slot_row = cases.slots_and_rows(rng, SIZES, missing)
    experts, weights = cases.choices(rng, SIZES, num_rows)
    x = rng.standard_normal((num_rows, SIZES.hidden), np.float32)
    return x, experts, weights, slots, slot_row


@pytest.mark.parametrize("num_rows", [1, 2, 7, 13])
def test_matches_float64(num_rows):
    case = random_case(num_rows)
    assert cases.error(run(*case), cases.ffn_float64(*case)) < FLOAT32


def test_matches_float64_in_bfloat16():
    case = random_case(5)
    assert cases.error(run(*case, dtype=jnp.bfloat16), cases.ffn_float64(*case)) < BFLOAT16


@pytest.mark.parametrize("expert", [0, 4])
def test_all_rows_on_one_expert(expert):
    x, experts, weights, slots, slot_row = random_case(11)
    experts = np.full((11, 1), expert, np.int32)
    case = (x, experts, weights[:, :1], slots, slot_row)
    assert cases.error(run(*case), cases.ffn_float64(*case)) < FLOAT32


def test_experts_that_are_not_resident_and_masked_rows_add_nothing():
    x, experts, weights, slots, slot_row = random_case(9, missing=(1, 3))
    experts[4] = SIZES.num_experts
    case = (x, experts, weights, slots, slot_row)
    value = run(*case)
    assert not value[4].any()
    assert cases.error(value, cases.ffn_float64(*case)) < FLOAT32


def test_nothing_resident_leaves_the_accumulator():
    x, experts, weights, slots, slot_row = random_case(3)
    start = np.random.default_rng(1).standard_normal((3, SIZES.hidden), np.float32)
    value = run(x, experts, weights, slots, np.full_like(slot_row, NOT_RESIDENT), start)
    np.testing.assert_array_equal(value, start)


def test_groups_of_experts_add_up_to_the_same_bits():
    x, experts, weights, slots, slot_row = random_case(9)
    ids = np.arange(SIZES.num_experts)
    first = np.where(ids < 2, slot_row, NOT_RESIDENT)
    second = np.where(ids >= 2, slot_row, NOT_RESIDENT)
    total = run(x, experts, weights, slots, first)
    total = run(x, experts, weights, slots, second, total)
    np.testing.assert_array_equal(total, run(x, experts, weights, slots, slot_row))


def test_a_row_has_the_same_bits_alone_and_in_any_slot():
    x, experts, weights, slots, slot_row = random_case(9)
    value = run(x, experts, weights, slots, slot_row)
    order = np.random.default_rng(2).permutation(len(slots))
    places = np.argsort(order)
    for row in (0, 8):
        alone = run(x[[row]], experts[[row]], weights[[row]], slots, slot_row)
        np.testing.assert_array_equal(alone[0], value[row])
    moved = run(x, experts, weights, slots[order], places[slot_row].astype(np.int32))
    np.testing.assert_array_equal(moved, value)


def test_only_row_blocks_depend_on_the_number_of_rows():
    shapes = [
        config_for(2048, 1408, "bfloat16", "none", num_choices=rows * 6, num_experts=64)
        for rows in (1, 544)
    ]
    assert shapes[0].block_rows == 16
    assert shapes[1].block_rows == 64
    assert len({(s.block_out, s.block_in, s.num_warps) for s in shapes}) == 1
