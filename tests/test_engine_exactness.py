"""Greedy output never depends on speculation, policy, cache size or the draft's quality."""

import pytest

from specter_jax.offload import POLICIES
from tests.engine_cases import (
    ALL,
    PROMPTS,
    QUARTER,
    assert_slots_match_store,
    load_tiny,
    plain_tokens,
    run,
    wrong_draft,
)


@pytest.fixture(scope="module")
def plain(tiny_directory):
    return plain_tokens(tiny_directory)


@pytest.mark.parametrize("depth", [0, 1, 3, 8, 16])
def test_every_policy_and_depth_gives_the_plain_output(tiny_directory, plain, depth):
    model = load_tiny(tiny_directory)
    for policy in POLICIES:
        assert run(model, PROMPTS, depth=depth, policy=policy).tokens == plain, policy


@pytest.mark.parametrize("slots", [4, 6, 157, ALL])
def test_any_number_of_slots_gives_the_plain_output(tiny_directory, plain, slots):
    model = load_tiny(tiny_directory, slots)
    for policy in POLICIES:
        assert run(model, PROMPTS[:2], policy=policy).tokens == plain[:2], policy
    assert_slots_match_store(model)


@pytest.mark.parametrize("slots", [6, QUARTER, ALL])
def test_a_wrong_draft_costs_acceptance_but_not_exactness(tiny_directory, plain, slots):
    model = load_tiny(tiny_directory, slots)
    with wrong_draft(model):
        result = run(model, PROMPTS)
    assert result.tokens == plain
    assert result.stats.acceptance_rate < 0.6
    assert result.stats.iterations > run(model, PROMPTS).stats.iterations


def test_a_long_used_cache_stays_exact(tiny_directory, plain):
    model = load_tiny(tiny_directory)
    for turn in range(6):
        order = PROMPTS[turn % 4 :] + PROMPTS[: turn % 4]
        tokens = run(model, order, depth=(3, 8)[turn % 2]).tokens
        assert tokens == plain[turn % 4 :] + plain[: turn % 4]
    assert_slots_match_store(model)


@pytest.mark.parametrize("depth", [0, 3])
def test_rows_of_a_batch_equal_single_sequences(tiny_directory, plain, depth):
    result = run(load_tiny(tiny_directory), PROMPTS[:3], depth=depth, batch_size=3)
    assert result.tokens == plain[:3]
    assert len({len(prompt) for prompt in PROMPTS[:3]}) == 3


def test_auto_depth_gives_the_plain_output(tiny_directory, plain):
    result = run(load_tiny(tiny_directory), PROMPTS[:2], depth="auto")
    assert result.tokens == plain[:2]
    assert len(result.stats.depths) > 1
