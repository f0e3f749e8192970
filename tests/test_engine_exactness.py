"""Greedy output never depends on speculation, policy, cache size or the draft's quality."""

import jax
import numpy as np
import pytest

from specter_jax.offload import POLICIES
from tests.engine_cases import (
    ALL,
    FEW,
    MANY,
    PROMPTS,
    QUARTER,
    assert_slots_match_store,
    run,
    wrong_draft,
)
from tests.engine_cases import load_in_stretches as load_tiny


@pytest.mark.parametrize("depth", [0, 1, 3, 8, pytest.param(16, marks=pytest.mark.long)])
def test_every_policy_and_depth_gives_the_plain_output(tiny_directory, plain, depth):
    model = load_tiny(tiny_directory)
    assert run(model, PROMPTS, depth=depth).tokens == plain
    for policy in POLICIES:
        assert run(model, PROMPTS[1:2], depth=depth, policy=policy).tokens == plain[1:2], policy


@pytest.mark.parametrize("slots", [FEW, pytest.param(MANY, marks=pytest.mark.long), ALL])
def test_any_number_of_slots_gives_the_plain_output(tiny_directory, plain, slots):
    model = load_tiny(tiny_directory, slots)
    for policy in POLICIES:
        assert run(model, PROMPTS[:1], policy=policy).tokens == plain[:1], policy
    assert_slots_match_store(model)


@pytest.mark.parametrize("slots", [FEW, QUARTER, ALL])
def test_a_wrong_draft_costs_acceptance_but_not_exactness(tiny_directory, plain, slots):
    model = load_tiny(tiny_directory, slots)
    with wrong_draft(model):
        result = run(model, PROMPTS)
    assert result.tokens == plain
    assert 0.1 < result.stats.acceptance_rate < 0.7
    assert result.stats.iterations > run(model, PROMPTS).stats.iterations


def test_a_long_used_cache_stays_exact(tiny_directory, plain):
    model = load_tiny(tiny_directory)
    for turn in range(3):
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
    result = run(load_tiny(tiny_directory), PROMPTS[:1], depth="auto")
    assert result.tokens == plain[:1]
    assert len(result.stats.depths) > 1


def routing_of_verifications(model, monkeypatch):
    """Every verification's routing of the tokens that count, and the statistics."""
    from specter_jax.engine import verification

    seen = []
    original = verification.verify

    def verify(ctx, state, drafted, *rest):
        result = original(ctx, state, drafted, *rest)
        chosen, count = result[1], int(drafted.num_drafted[0]) + 1
        seen.append([chosen[m][0, :count].tolist() for m in sorted(chosen)])
        return result

    with monkeypatch.context() as patch, wrong_draft(model):
        patch.setattr("specter_jax.engine.decode.verify", verify)
        stats = run(model, PROMPTS).stats
    return seen, stats


@pytest.mark.parametrize("slots", [FEW, MANY])
def test_a_miss_changes_no_routing(tiny_directory, monkeypatch, slots):
    """Routing tells more than tokens: a state that lacks an expert's part soon routes otherwise."""
    expected, full = routing_of_verifications(load_tiny(tiny_directory, ALL), monkeypatch)
    got, stats = routing_of_verifications(load_tiny(tiny_directory, slots), monkeypatch)
    assert got == expected
    assert full.resumes == 0
    assert stats.demand_misses > 0
    # With few slots nothing fits, and verification goes layer by layer from the start.
    assert (stats.resumes > 0) == (slots == MANY)


@pytest.mark.parametrize("rerun_before", [0.0, 1.0])
def test_a_miss_is_made_up_for_by_layers_or_by_another_run(
    tiny_directory, plain, monkeypatch, rerun_before
):
    from specter_jax.engine import verification

    model = load_tiny(tiny_directory, MANY)
    run(model, PROMPTS)  # what a warm-up runs is not counted
    programs, layered = [], []
    one_program, run_layers = verification.one_program, verification.run_layers
    monkeypatch.setattr(verification, "_RERUN_BEFORE", rerun_before)
    monkeypatch.setattr(
        verification, "one_program", lambda *args: programs.append(1) or one_program(*args)
    )
    monkeypatch.setattr(
        verification, "run_layers", lambda *args: layered.append(1) or run_layers(*args)
    )
    with wrong_draft(model):
        result = run(model, PROMPTS)
    assert result.tokens == plain
    stats = result.stats
    assert stats.resumes > 0
    assert stats.demand_misses > 0
    more = len(programs) + len(layered) - stats.iterations
    if rerun_before:
        assert stats.resumes <= more <= 3 * stats.resumes
        assert len(programs) > stats.iterations
    else:
        assert more == stats.resumes
        assert len(programs) <= stats.iterations


@pytest.mark.parametrize("value", [float("nan"), 1e30])
def test_a_draft_that_overflows_changes_no_output(tiny_directory, plain, value):
    """What it leaves in the KV behind the verified tokens must not reach them."""
    model = load_tiny(tiny_directory)
    right = model.params["draft"]

    def broken(layer):
        tables = np.array(layer["tables"])
        tables[::4] = value
        return layer | {"tables": jax.device_put(tables, layer["tables"].sharding)}

    model.params["draft"] = {name: broken(layer) for name, layer in right.items()}
    try:
        # Deeper than verification's blocks of four tokens on the CPU.
        assert run(model, PROMPTS[:2], depth=8).tokens == plain[:2]
    finally:
        model.params["draft"] = right


def test_experts_fetched_just_before_verification_count_as_waited_for(tiny_directory, monkeypatch):
    from specter_jax.engine import verification

    model = load_tiny(tiny_directory, MANY)
    run(model, PROMPTS[:1], depth=2)
    late = []
    original = verification._bring_all

    def bring_all(*args):
        brought = original(*args)
        late.append(len(brought or ()))
        return brought

    monkeypatch.setattr(verification, "_bring_all", bring_all)
    stats = run(model, PROMPTS, depth=2).stats
    assert sum(late) > 0
    # The draft names hardly any expert that is not used then.
    assert stats.demand_misses >= 0.8 * sum(late)
