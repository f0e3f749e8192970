"""The nested expert FFN's Triton kernels, interpreted on the CPU, against float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import int4
from pallas_kernels.constants import NOT_RESIDENT
from pallas_kernels.expert_ffn.config import unsupported_reason
from pallas_kernels.nested import NestedLayout, decode_numpy, encode, num_escapes, with_capacity
from pallas_kernels.nested_ffn import arithmetic
from pallas_kernels.nested_ffn.config import VARIANTS, NestedFFNConfig, config_for
from pallas_kernels.nested_ffn.pallas_triton import nested_ffn
from tests import kernel_cases as cases

SIZES = cases.Sizes(hidden=64, inner=96, num_experts=4, top_k=2, group=32)
SMALL = NestedFFNConfig(block_rows=8, block_out=16, block_in=32, quads=1)
FLOAT32 = 1e-5  # sums of up to 96 float32 products
BFLOAT16 = 1e-2  # eight bits of inputs, twice
SLOTS = SIZES.num_experts + 1
CAPACITY = 3 * SIZES.hidden * SIZES.inner // 128 * 128  # room for any weights
ROWS = 9  # one number wherever possible: each compiles for seconds


def draft_of(packed, group):
    """Codes and scales of gate and up, and of down."""
    split = 2 * SIZES.inner * SIZES.hidden
    gate_up = int4.encode(packed[:split].reshape(2 * SIZES.inner, SIZES.hidden), group)
    down = int4.encode(packed[split:].reshape(SIZES.hidden, SIZES.inner), group)
    return *gate_up[:2], *down[:2]


@functools.cache
def experts_of(kind, group=SIZES.group):
    """bf16 weights float32 [experts, 3FH], slots of nested words, slot_row and the draft."""
    rng = np.random.default_rng(7)
    size = 3 * SIZES.inner * SIZES.hidden
    weights = rng.standard_normal((SIZES.num_experts, size), np.float32) / 8
    if kind == "heavy":  # most weights are escapes, far more of them in some rows than in others
        weights *= 10.0 ** -rng.uniform(0, 6, weights.shape).astype(np.float32)
        weights.reshape(SIZES.num_experts, -1, 32)[:, ::5] = 0
    if kind == "tiny":  # scales too small to have bases
        weights.reshape(SIZES.num_experts, -1, 64)[:, ::3] *= np.float32(2.0**-119)
    weights = weights.astype(ml_dtypes.bfloat16)
    drafts = [draft_of(packed, group) for packed in weights]
    words = [encode(packed, d[1], d[3]) for packed, d in zip(weights, drafts, strict=True)]
    order = rng.permutation(SLOTS)[: SIZES.num_experts].astype(np.int32)
    slots = None
    for place, packed in zip(order, words, strict=True):
        padded = with_capacity(packed, SIZES.hidden, SIZES.inner, CAPACITY)
        if slots is None:
            slots = rng.integers(-(2**31), 2**31, (SLOTS, len(padded))).astype(np.int32)
        slots[place] = padded
    names = ("gate_up_codes", "gate_up_scales", "down_codes", "down_scales")
    draft = {
        name: np.stack(part) for name, part in zip(names, zip(*drafts, strict=True), strict=True)
    }
    return weights.astype(np.float32), slots, order, draft


@functools.cache
def compiled(config, dtype):
    return jax.jit(
        functools.partial(nested_ffn, compute_dtype=dtype, config=config, interpret=True)
    )


def run(
    x, experts, weights, slots, slot_row, draft, *, dtype=jnp.float32, config=SMALL, start=None
):
    arrays = cases.device(x, experts, weights, slots, slot_row)
    draft = {name: jnp.asarray(array) for name, array in draft.items()}
    start = None if start is None else jnp.asarray(start)
    return np.asarray(compiled(config, dtype)(*arrays, draft, start))


def random_rows(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    experts, weights = cases.choices(rng, SIZES, num_rows)
    x = rng.standard_normal((num_rows, SIZES.hidden), np.float32)
    return x, experts, weights


@pytest.mark.parametrize("kind", ["normal", "heavy", "tiny"])
def test_matches_float64(kind):
    plain, slots, slot_row, draft = experts_of(kind)
    rows = random_rows(ROWS)
    expected = cases.ffn_float64(*rows, plain, np.arange(SIZES.num_experts))
    assert cases.error(run(*rows, slots, slot_row, draft), expected) < FLOAT32


def test_matches_float64_in_bfloat16_with_groups_narrower_than_a_step():
    plain, slots, slot_row, draft = experts_of("heavy", 8)
    rows = random_rows(ROWS)
    expected = cases.ffn_float64(*rows, plain, np.arange(SIZES.num_experts))
    config = NestedFFNConfig(block_rows=16, block_out=16, block_in=16, quads=2)
    value = run(*rows, slots, slot_row, draft, dtype=jnp.bfloat16, config=config)
    assert cases.error(value, expected) < BFLOAT16


def config_of(variant, num_rows, dtype_name="float32"):
    counts = dict(num_choices=num_rows * SIZES.top_k, num_experts=SIZES.num_experts)
    sizes = (SIZES.hidden, SIZES.inner, dtype_name, "none")
    return config_for(*sizes, **counts, variant=variant)


@pytest.mark.parametrize(  # the others differ in stages only
    "variant", [pytest.param("group_narrow", marks=pytest.mark.long), "pair"]
)
def test_variants_match_float64_and_rows_alone_are_as_close(variant):
    """A row's bits in blocks of other heights are the GPU tests' matter.

    Interpreted, a block's product is XLA's own on this CPU, whose order of summing may depend on
    the height.
    """
    plain, slots, slot_row, draft = experts_of("heavy")
    x, experts, weights = random_rows(ROWS)
    expected = cases.ffn_float64(x, experts, weights, plain, np.arange(SIZES.num_experts))
    some = config_of(variant, ROWS)
    value = run(x, experts, weights, slots, slot_row, draft, config=some)
    assert cases.error(value, expected) < FLOAT32
    one = slice(4, 5)
    few = config_of(variant, 1)
    assert few.block_rows == 4 < some.block_rows
    alone = run(x[one], experts[one], weights[one], slots, slot_row, draft, config=few)
    assert cases.error(alone, expected[one]) < FLOAT32


def test_narrow_blocks_in_bfloat16():
    plain, slots, slot_row, draft = experts_of("heavy")
    rows = random_rows(ROWS)
    expected = cases.ffn_float64(*rows, plain, np.arange(SIZES.num_experts))
    config = NestedFFNConfig(block_rows=4, block_out=16, block_in=32, num_warps=2)
    value = run(*rows, slots, slot_row, draft, dtype=jnp.bfloat16, config=config)
    assert cases.error(value, expected) < BFLOAT16


def test_all_rows_on_one_expert_take_several_blocks():
    plain, slots, slot_row, draft = experts_of("normal")
    x, _, weights = random_rows(ROWS)
    rows = x, np.array([[2, SIZES.num_experts]] * ROWS, np.int32), weights
    expected = cases.ffn_float64(*rows, plain, np.arange(SIZES.num_experts))
    assert cases.error(run(*rows, slots, slot_row, draft), expected) < FLOAT32


def test_experts_that_are_not_resident_and_masked_rows_add_nothing():
    plain, slots, slot_row, draft = experts_of("normal")
    x, experts, weights = random_rows(ROWS)
    experts[4] = SIZES.num_experts
    ids = np.arange(SIZES.num_experts)
    resident = np.where(ids == 1, NOT_RESIDENT, slot_row)
    value = run(x, experts, weights, slots, resident, draft)
    expected = cases.ffn_float64(x, experts, weights, plain, np.where(ids == 1, NOT_RESIDENT, ids))
    assert not value[4].any()
    assert cases.error(value, expected) < FLOAT32
    start = np.random.default_rng(1).standard_normal(x.shape, np.float32)
    none = np.full_like(slot_row, NOT_RESIDENT)
    value = run(x, experts, weights, slots, none, draft, start=start)
    np.testing.assert_array_equal(value, start)


def test_a_row_has_the_same_bits_alone_and_in_any_slot():
    _, slots, slot_row, draft = experts_of("heavy")
    x, experts, weights = random_rows(ROWS)
    value = run(x, experts, weights, slots, slot_row, draft)
    for row in (0, ROWS - 1):
        one = slice(row, row + 1)
        alone = run(x[one], experts[one], weights[one], slots, slot_row, draft)
        np.testing.assert_array_equal(alone[0], value[row])
    order = np.random.default_rng(2).permutation(SLOTS)
    places = np.argsort(order).astype(np.int32)
    moved = run(x, experts, weights, slots[order], places[slot_row], draft)
    np.testing.assert_array_equal(moved, value)


def test_tiles_hold_the_decoded_weights():
    """Every weight that is no escape comes out of the tile arithmetic bit for bit."""
    plain, slots, slot_row, draft = experts_of("heavy")
    words = slots[slot_row[0]]
    layout = NestedLayout.from_words(SIZES.hidden, SIZES.inner, len(words))
    assert num_escapes(words, layout) > layout.num_weights // 4
    parts = [draft[name][0] for name in draft]
    expected = decode_numpy(words, *parts)
    np.testing.assert_array_equal(expected.astype(np.float32), plain[0])

    rows = 2 * SIZES.inner
    expected = expected[: rows * SIZES.hidden].reshape(rows, SIZES.hidden)
    codes, scales = parts[0], jnp.asarray(parts[1])
    remainders = words[: rows * SIZES.hidden // 4].reshape(rows, -1, 2)
    per_word = jnp.repeat(scales, SIZES.group // 8, axis=1)
    pairs = arithmetic.decode_words(
        jnp.asarray(codes),
        jnp.asarray(remainders[..., 0]),
        jnp.asarray(remainders[..., 1]),
        arithmetic.base_tables(per_word, True),
        True,
    )
    tile = np.asarray(arithmetic.tile_of(pairs))
    expected = np.asarray(arithmetic.arrange(jnp.asarray(expected), SIZES.hidden))
    same = tile.view(np.uint16) == expected.view(np.uint16)
    starts = words[layout.row_starts :][: rows + 1]
    np.testing.assert_array_equal((~same).sum(1) <= np.diff(starts), True)
    assert same.any()


def test_arranged_places():
    inputs = np.arange(256)
    arranged = np.asarray(arithmetic.arrange(jnp.asarray(inputs), 64))
    np.testing.assert_array_equal(arranged[arithmetic.arranged_place(inputs, 64)], inputs)
    np.testing.assert_array_equal(arranged[:4], [0, 1, 8, 9])


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_row_blocks_depend_on_the_number_of_rows(variant):
    counts = (1, 9, 17, 70, 544)
    configs = [
        config_for(
            2048,
            1408,
            "bfloat16",
            "none",
            num_choices=rows * 6,
            num_experts=64,
            variant=variant,
        )
        for rows in counts
    ]
    blocks = [config.block_rows for config in configs]
    assert blocks == sorted(blocks)
    limits = VARIANTS[variant]
    assert (blocks[0], blocks[-1]) == (limits.least_rows, limits.most_rows)
    assert len({dataclasses.replace(config, block_rows=8) for config in configs}) == 1
    # One weight row a thread, and one instruction whatever the rows.
    assert all(2 * config.block_out == 32 * config.num_warps for config in configs)
    least = 16 if configs[0].num_warps == 4 else 8
    assert all(config.product_rows == max(config.block_rows, least) for config in configs)


def test_sizes_that_do_not_fit_are_refused():
    assert unsupported_reason(2048, 1408, "bfloat16") is None
    assert "multiple" in unsupported_reason(2048, 1400, "bfloat16")
    assert "float64" in unsupported_reason(2048, 1408, "float64")
