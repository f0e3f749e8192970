"""The next draft is dispatched behind the verification: nothing of it shows in the output."""

import jax
import pytest

from specter_jax.controller import DepthController
from specter_jax.engine import decode, drafting
from tests.engine_cases import ALL, MANY, PROMPTS, QUARTER, run, wrong_draft
from tests.engine_cases import load_in_stretches as load_tiny


def count_drafts(monkeypatch, begins=True):
    """Counts drafts begun early and dispatched in all; `begins=False` keeps any from being."""
    counts = {"begun": 0, "first": 0}
    begin, dispatch = decode.begin_draft, drafting._dispatch

    def begin_draft(*args):
        if begins:
            counts["begun"] += 1
            begin(*args)

    def _dispatch(ctx, state, start, probs, first, count):
        counts["first"] += first == 0
        return dispatch(ctx, state, start, probs, first, count)

    monkeypatch.setattr(decode, "begin_draft", begin_draft)
    monkeypatch.setattr(drafting, "_dispatch", _dispatch)
    return counts


@pytest.mark.parametrize("slots", [QUARTER, MANY, ALL])
def test_output_and_books_are_those_of_drafts_that_wait(tiny_directory, plain, monkeypatch, slots):
    model = load_tiny(tiny_directory, slots)
    run(model, PROMPTS[:1])
    results = []
    for begins in (True, False):
        with monkeypatch.context() as patch, wrong_draft(model):
            counts = count_drafts(patch, begins)
            results.append(run(model, PROMPTS))
        assert (counts["begun"] > 0) == begins
    early, late = results
    assert early.tokens == late.tokens == plain
    for name in ("iterations", "drafted", "accepted", "judged", "expert_choices"):
        assert getattr(early.stats, name) == getattr(late.stats, name), name


def test_sampled_output_is_the_same(tiny_directory, monkeypatch):
    model = load_tiny(tiny_directory, QUARTER)
    options = dict(temperature=0.8, seed=3)
    early = run(model, PROMPTS[:2], **options).tokens
    counts = count_drafts(monkeypatch, begins=False)
    assert run(model, PROMPTS[:2], **options).tokens == early
    assert counts["first"] > 0


def test_a_draft_is_begun_again_after_a_miss_and_never_past_the_end(
    tiny_directory, plain, monkeypatch
):
    model = load_tiny(tiny_directory, MANY)
    with wrong_draft(model):
        run(model, PROMPTS[:1])
        counts = count_drafts(monkeypatch)
        stats = run(model, PROMPTS).stats
    assert stats.resumes > 0
    # Each iteration but a sequence's first finds its draft begun, unless it is near the end; what
    # lacked an expert began one in vain.
    assert counts["first"] >= stats.iterations
    assert counts["begun"] >= counts["first"] - stats.iterations
    assert run(model, PROMPTS[:1], max_new_tokens=2).tokens[0] == plain[0][:2]


def test_with_every_expert_resident_verification_follows_the_draft_at_once(
    tiny_directory, monkeypatch
):
    model = load_tiny(tiny_directory, ALL)
    run(model, PROMPTS[:1], max_new_tokens=24)
    begun = []
    begin = decode.begin_verification

    def begin_verification(ctx, state, depth):
        begin(ctx, state, depth)
        begun.append(state.begun.verified is not None)

    monkeypatch.setattr(decode, "begin_verification", begin_verification)
    with wrong_draft(model):
        early = run(model, PROMPTS, max_new_tokens=24)
    assert begun
    assert all(begun)
    monkeypatch.setattr(decode, "begin_verification", lambda *args: None)
    with wrong_draft(model):
        late = run(model, PROMPTS, max_new_tokens=24)
    assert early.tokens == late.tokens
    for name in ("iterations", "drafted", "accepted", "judged", "resident_hits"):
        assert getattr(early.stats, name) == getattr(late.stats, name), name


@pytest.mark.long
def test_batches_and_changing_depths_too(tiny_directory, monkeypatch):
    """Rows that end at different moments, and a depth that changes on the way."""
    model = load_tiny(tiny_directory, ALL)
    runs = [
        (PROMPTS[:3], {"batch_size": 3}),
        (PROMPTS[:2], {"depth": "auto"}),
    ]
    early = [run(model, prompts, max_new_tokens=24, **options).tokens for prompts, options in runs]
    monkeypatch.setattr(decode, "begin_verification", lambda *args: None)
    late = run(model, PROMPTS[:3], max_new_tokens=24).tokens
    assert early == [late, late[:2]]


@pytest.mark.long
def test_no_draft_is_begun_before_a_plain_iteration_that_was_planned(tiny_directory, monkeypatch):
    model = load_tiny(tiny_directory, ALL)
    model.controllers.clear()
    depths, begun = [], []
    original = decode.draft

    def draft(ctx, state, depth, most):
        depths.append(depth)
        begun.append(state.begun is not None)
        return original(ctx, state, depth, most)

    monkeypatch.setattr(decode, "draft", draft)
    run(model, PROMPTS[:1], depth="auto", max_new_tokens=24)
    assert depths[:4] == [4, 0, 4, 0]
    assert not any(early for depth, early in zip(depths, begun, strict=True) if depth == 0)


def test_a_draft_that_is_not_wanted_is_over_before_plain_decoding_is_timed(
    tiny_directory, plain, monkeypatch
):
    # Before the controller is another one.
    expected = plain
    model = load_tiny(tiny_directory, ALL)
    turns = iter([4, 0, 4, 0, 4, 4, 4, 4, 4, 4, 4, 4])
    controller = DepthController(fixed=4)
    monkeypatch.setattr(controller, "next_depth", lambda: next(turns))
    monkeypatch.setattr(
        "specter_jax.api.DepthController", lambda *args, **options: controller, raising=False
    )
    model.controllers.clear()
    waited = []
    ready = jax.block_until_ready
    monkeypatch.setattr(decode.jax, "block_until_ready", lambda x: waited.append(1) or ready(x))
    assert run(model, PROMPTS[:1], depth=4).tokens == expected[:1]
    assert waited
