"""The ledger: it adds up, agrees with what is allocated, and more memory never buys less."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specter_jax as sj
from specter_jax import models
from specter_jax.checkpoint import open_checkpoint
from specter_jax.engine.batch import Batch
from specter_jax.errors import BudgetError, InvalidRequestError
from specter_jax.memory import plan_memory
from specter_jax.model import plan
from specter_jax.runtime_config import RuntimeConfig, kv_capacity
from specter_jax.sizes import format_size, parse_size
from tests.engine_cases import CONTEXT, load_tiny


@pytest.fixture(scope="module")
def checkpoint(tiny_directory):
    return open_checkpoint(tiny_directory)


def plan_for(checkpoint, **options):
    settings = {
        "budget": None,
        "expert_slots": None,
        "dtype": "bfloat16",
        "max_context": 512,
        "max_batch": 1,
    }
    return plan(checkpoint, **(settings | options))


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_without_limits_every_expert_has_a_slot(checkpoint):
    ledger, runtime = plan_for(checkpoint)
    config = checkpoint.config
    assert ledger.num_slots == config.num_moe_layers * config.num_experts == runtime.num_slots


@pytest.mark.parametrize("extra_slots", [0, 1, 17])
def test_a_budget_is_spent_to_within_one_slot(checkpoint, extra_slots):
    least = plan_for(checkpoint, expert_slots=checkpoint.config.top_k)[0].total_bytes
    expert = plan_for(checkpoint)[0].expert_bytes
    budget = least + extra_slots * expert + expert // 2
    ledger, _ = plan_for(checkpoint, budget=budget)
    assert ledger.num_slots == checkpoint.config.top_k + extra_slots
    assert budget - expert < ledger.total_bytes <= budget


def test_the_parts_add_up(checkpoint):
    ledger, _ = plan_for(checkpoint, expert_slots=40)
    parts = (
        ledger.shared_bytes,
        ledger.draft_bytes,
        ledger.kv_bytes,
        ledger.staging_bytes,
        ledger.workspace_bytes,
    )
    assert min(parts) > 0
    assert ledger.total_bytes == sum(parts) + 40 * ledger.expert_bytes


@pytest.mark.parametrize("short_of", [1, 10**6])
def test_too_small_a_budget_names_one_that_is_enough(checkpoint, short_of):
    least = plan_for(checkpoint, expert_slots=checkpoint.config.top_k)[0].total_bytes
    with pytest.raises(BudgetError, match="needs at least") as raised:
        plan_for(checkpoint, budget=least - short_of)
    message = str(raised.value)
    assert format_size(least, round_up=True) in message
    assert "\n" not in message
    assert plan_for(checkpoint, budget=least)[0].num_slots == checkpoint.config.top_k


def test_the_size_that_an_error_names_can_be_given_as_the_budget(checkpoint):
    with pytest.raises(BudgetError) as raised:
        plan_for(checkpoint, budget=1)
    named = str(raised.value).split("needs at least ")[1].split(" (")[0]
    plan_for(checkpoint, budget=parse_size(named.replace(" ", "")))


def test_as_many_slots_as_top_k_are_the_fewest(checkpoint):
    top_k = checkpoint.config.top_k
    assert plan_for(checkpoint, expert_slots=top_k)[0].num_slots == top_k
    for slots in (top_k - 1, 0, -3):
        with pytest.raises(BudgetError, match=f"needs {top_k}"):
            plan_for(checkpoint, expert_slots=slots)


def test_more_slots_than_experts_are_not_allocated(checkpoint):
    config = checkpoint.config
    with pytest.warns(RuntimeWarning, match="expert_slots is 1000000, but the model has 160"):
        ledger, _ = plan_for(checkpoint, expert_slots=10**6)
    assert ledger.num_slots == config.num_moe_layers * config.num_experts


def test_budget_and_slots_exclude_each_other(checkpoint):
    with pytest.raises(BudgetError, match="both"):
        plan_for(checkpoint, budget=10**10, expert_slots=40)


@pytest.mark.parametrize("max_context", [0, 1, 2049, -5])
def test_a_context_the_model_does_not_have_is_refused(checkpoint, max_context):
    with pytest.raises(InvalidRequestError, match="2 to 2048"):
        plan_for(checkpoint, max_context=max_context)


def test_max_batch_and_dtype_are_checked(checkpoint, tiny_directory):
    with pytest.raises(InvalidRequestError, match="max_batch"):
        plan_for(checkpoint, max_batch=0)
    with pytest.raises(InvalidRequestError, match="bfloat16, float32"):
        sj.load(tiny_directory, dtype="float16")


COMMON = {"itemsize": 2, "prefill_tokens": 2048}


@settings(max_examples=60, deadline=None)
@given(
    budget=st.integers(0, 2**33),
    more=st.integers(0, 2**32),
    expert_bytes=st.integers(1, 2**25),
    max_context=st.integers(2, 2048),
    max_batch=st.integers(1, 8),
)
def test_a_bigger_budget_never_buys_fewer_slots(
    checkpoint, budget, more, expert_bytes, max_context, max_batch
):
    def slots(gpu_memory):
        try:
            ledger = plan_memory(
                config=checkpoint.config,
                shared_bytes=2**20,
                draft_bytes=2**20,
                expert_bytes=expert_bytes,
                max_context=max_context,
                max_batch=max_batch,
                gpu_memory=gpu_memory,
                **COMMON,
            )
        except BudgetError:
            return 0
        assert ledger.total_bytes <= gpu_memory
        return ledger.num_slots

    assert slots(budget) <= slots(budget + more)


@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    max_context=st.integers(2, 3000),
    rows=st.integers(1, 4),
    prefill_tokens=st.sampled_from([64, 256, 2048]),
)
def test_no_batch_needs_more_kv_than_was_set_aside(data, max_context, rows, prefill_tokens):
    lengths = data.draw(st.lists(st.integers(1, max_context - 1), min_size=rows, max_size=rows))
    limits = [data.draw(st.integers(1, max_context - length)) for length in lengths]
    prompts = [np.zeros(length, np.int32) for length in lengths]
    runtime = RuntimeConfig(num_slots=4, prefill_tokens=prefill_tokens, max_context=max_context)
    batch = Batch(prompts=prompts, limits=limits, draws=None, kv_dtype="float32")
    capacity = batch.capacity(runtime)
    assert capacity <= kv_capacity(max_context, max_context)
    assert capacity >= max(map(sum, zip(lengths, limits, strict=True)))


def test_sizes_are_those_of_the_arrays_allocated(tiny_directory):
    model = load_tiny(tiny_directory)
    ledger = model.ledger
    assert ledger.shared_bytes == nbytes(model.params["shared"])
    assert ledger.draft_bytes == nbytes(model.params["draft"])
    assert ledger.slot_bytes == model.pool.slots.nbytes
    assert ledger.expert_bytes == model.pool.store.expert_bytes
    assert ledger.max_in_flight == model.pool.max_in_flight
    capacity = kv_capacity(CONTEXT, CONTEXT)
    kv = models.init_kv(model.config, model.runtime.max_batch, capacity, model.dtype)
    assert ledger.kv_bytes == nbytes(kv)


def test_workspace_covers_the_temporaries_of_a_prefill_layer(tiny_directory):
    """XLA's own figure for the attention of a layer over the longest prompt."""
    checkpoint = open_checkpoint(tiny_directory)
    config, context = checkpoint.config, 512
    ledger, _ = plan_for(checkpoint, dtype="float32", max_context=context)
    model = load_tiny(tiny_directory)
    capacity = kv_capacity(context, context)
    kv = models.init_kv(config, 1, capacity, "float32")
    hidden = jax.ShapeDtypeStruct((1, context, config.hidden_size), np.float32)
    compiled = model.programs.route.lower(
        config.moe_layers[0],
        True,
        model.params["shared"][f"layers_{config.moe_layers[0]:02d}"],
        kv[0],
        hidden,
        np.zeros(1, np.int32),
        np.ones((1, context), bool),
        None,
    ).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= ledger.workspace_bytes
