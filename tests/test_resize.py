"""`Model.resize`: another budget without loading again, and the same output."""

import warnings

import pytest

import specter_jax as sj
from specter_jax.errors import BudgetError, InvalidRequestError
from tests.engine_cases import CONTEXT, PROMPTS, load_tiny, run


def test_a_resized_model_gives_the_same_output(tiny_directory, plain):
    # A model of its own: others share what `load_tiny` gives.
    model = sj.load(tiny_directory, expert_slots=40, dtype="float32", max_context=CONTEXT)
    run(model, PROMPTS[:1])
    for slots in (24, 160):
        model.resize(expert_slots=slots)
        assert model.pool.num_slots == model.ledger.num_slots == model.runtime.num_slots == slots
        assert int(model.pool.cache.resident.sum()) == slots
        assert run(model, PROMPTS[:1]).tokens == plain[:1]


def test_a_budget_that_is_too_small_leaves_the_model_as_it_is(tiny_directory, plain):
    model = load_tiny(tiny_directory)
    before = model.pool.num_slots
    with pytest.raises(BudgetError, match="too small"):
        model.resize(gpu_memory="1MiB")
    with pytest.raises(BudgetError, match="one token needs 4"):
        model.resize(expert_slots=3)
    with pytest.raises(BudgetError, match="both given"):
        model.resize(gpu_memory="8GiB", expert_slots=30)
    assert model.pool.num_slots == before
    assert run(model, PROMPTS[:1]).tokens == plain[:1]


def test_more_slots_than_experts_are_said_not_to_be_used(tiny_directory):
    said = "expert_slots is 500, but the model has 160 experts: 160 slots are used"
    with pytest.warns(RuntimeWarning, match=said) as told:
        model = sj.load(tiny_directory, expert_slots=500, dtype="float32", max_context=CONTEXT)
    assert [warning.filename for warning in told] == [__file__]
    model.resize(expert_slots=40)
    with pytest.warns(RuntimeWarning, match=said) as told:
        model.resize(expert_slots=500)
    assert [warning.filename for warning in told] == [__file__]
    assert model.pool.num_slots == 160
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.resize(expert_slots=160)
        model.resize(gpu_memory="8GiB")


def test_a_generating_model_is_not_resized(tiny_directory):
    model = load_tiny(tiny_directory)
    with model.exclusive(), pytest.raises(InvalidRequestError, match="generating already"):
        model.resize(expert_slots=30)


def test_a_policy_whose_cache_was_not_filled_is_taken_up_again(tiny_directory, monkeypatch):
    model = load_tiny(tiny_directory)
    model.use_policy("lookahead")

    def interrupted():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.pool, "fill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.use_policy("lru")
    model.use_policy("lru")
    assert int(model.pool.cache.resident.sum()) == model.pool.num_slots
    model.use_policy("lookahead")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_a_resize_that_fails_leaves_a_model_that_works(
    tiny_directory, plain, monkeypatch, error, policy
):
    model = sj.load(tiny_directory, expert_slots=40, dtype="float32", max_context=CONTEXT)

    def fails(*arguments):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("specter_jax.model._make_pool", fails)
        with pytest.raises(error):
            model.resize(expert_slots=80)
    assert model.pool.num_slots == model.ledger.num_slots == 40
    assert run(model, PROMPTS[:1], policy=policy).tokens == plain[:1]
    assert int(model.pool.cache.resident.sum()) == 40
