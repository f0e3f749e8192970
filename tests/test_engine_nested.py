"""Nested and plain experts: the same output, token for token; nested ones in half the bytes."""

from pathlib import Path

import jax.numpy as jnp
import pytest

from convert import convert_checkpoint
from tests.conftest import TINY_SOURCE
from tests.engine_cases import (
    ALL,
    FEW,
    PROMPTS,
    QUARTER,
    assert_slots_match_store,
    load_tiny,
    plain_tokens,
    run,
)


@pytest.fixture(scope="module")
def plain_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model with plain experts; `tiny_directory` has nested ones."""
    target = tmp_path_factory.mktemp("plain") / "model"
    return convert_checkpoint(TINY_SOURCE, target, expert_format="plain").path


def test_plain_decoding_of_both_formats_is_the_same(plain_directory, tiny_directory, plain):
    assert load_tiny(tiny_directory, ALL).pool.slots.dtype == jnp.int32
    assert load_tiny(plain_directory, ALL).pool.slots.dtype == jnp.bfloat16
    assert plain_tokens(plain_directory) == plain


@pytest.mark.parametrize(
    ("slots", "options"),
    [
        (QUARTER, {"policy": "lookahead"}),
        pytest.param(QUARTER, {"policy": "sp-e", "batch_size": 3}, marks=pytest.mark.long),
        (QUARTER, {"policy": "lru"}),
        (FEW, {"policy": "lookahead"}),
    ],
)
def test_policies_and_slots_change_neither(plain_directory, tiny_directory, slots, options):
    expected = plain_tokens(plain_directory)
    for directory in (plain_directory, tiny_directory):
        model = load_tiny(directory, slots)
        assert run(model, PROMPTS[:3], **options).tokens == expected[:3]
        assert_slots_match_store(model)


def test_samples_are_the_same(plain_directory, tiny_directory):
    options = {"temperature": 1.0, "seed": 7}
    plain, nested = (
        run(load_tiny(directory), PROMPTS[:2], **options)
        for directory in (plain_directory, tiny_directory)
    )
    assert nested.tokens == plain.tokens
    assert nested.stats.accepted == plain.stats.accepted


def test_a_budget_holds_more_nested_experts(plain_directory, tiny_directory):
    plain, nested = (load_tiny(d, ALL).ledger for d in (plain_directory, tiny_directory))
    assert nested.draft_bytes == plain.draft_bytes
    assert plain.expert_bytes > 1.8 * nested.expert_bytes
    assert nested.expert_bytes == load_tiny(tiny_directory, ALL).pool.store.expert_bytes
