"""Several layers of a verification in one program: the same output, fewer programs."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from specter_jax import models
from specter_jax.engine import layered, stretches
from tests.engine_cases import ALL, MANY, PROMPTS, QUARTER, run, wrong_draft
from tests.engine_cases import load_in_stretches as load_tiny


def watched(monkeypatch):
    """Records (first layer, layers asked for, layers done) of every stretch."""
    seen = []
    original = layered.run_stretch

    def run_stretch(ctx, kv, hidden, m, length, *rest):
        outcome = original(ctx, kv, hidden, m, length, *rest)
        seen.append((m, length, len(outcome.chosen)))
        return outcome

    monkeypatch.setattr(layered, "run_stretch", run_stretch)
    return seen


@pytest.mark.parametrize(("policy", "slots"), [("lookahead", QUARTER), ("sp-l", 120)])
def test_layers_run_together_and_give_the_plain_output(
    tiny_directory, plain, monkeypatch, policy, slots
):
    model = load_tiny(tiny_directory, slots)
    run(model, PROMPTS[:1], policy=policy)
    seen = watched(monkeypatch)
    assert run(model, PROMPTS, policy=policy).tokens == plain
    assert any(done > 1 for *_, done in seen)


@pytest.mark.parametrize("slots", [QUARTER, MANY])
def test_a_stretch_that_lacks_an_expert_goes_on_from_there(
    tiny_directory, plain, monkeypatch, slots
):
    model = load_tiny(tiny_directory, slots)
    with wrong_draft(model):
        run(model, PROMPTS[:1])
        seen = watched(monkeypatch)
        result = run(model, PROMPTS)
    assert result.tokens == plain
    assert any(done < length for _, length, done in seen)
    assert result.stats.demand_misses > 0


def test_no_layers_run_together_where_each_routing_is_wanted(tiny_directory, plain, monkeypatch):
    model = load_tiny(tiny_directory, QUARTER)
    seen = watched(monkeypatch)
    assert run(model, PROMPTS[:1], policy="sp-e").tokens == plain[:1]
    assert not seen


def test_where_dispatching_is_cheap_layers_run_alone(tiny_directory, plain, monkeypatch):
    model = load_tiny(tiny_directory, QUARTER)
    monkeypatch.setattr(model, "runtime", dataclasses.replace(model.runtime, stretches=None))
    seen = watched(monkeypatch)
    assert run(model, PROMPTS[:1]).tokens == plain[:1]
    assert not seen


def test_uses_are_booked_as_layer_by_layer(tiny_directory, monkeypatch):
    model = load_tiny(tiny_directory, QUARTER)
    together = run(model, PROMPTS).stats
    monkeypatch.setattr(stretches, "STRETCHES", ())
    alone = run(model, PROMPTS).stats

    def uses(stats):
        return stats.resident_hits + stats.prefetch_hits + stats.demand_misses

    assert uses(together) == uses(alone)
    assert together.expert_matches == alone.expert_matches


def test_bits_are_those_of_the_whole_program(tiny_directory):
    model = load_tiny(tiny_directory, QUARTER)
    config, shared = model.config, model.params["shared"]
    store, draft = model.pool.store, model.params["draft"]
    count = 3
    layers = config.moe_layers[1 : 1 + count]
    slots = jax.numpy.stack(
        [
            np.asarray(store.get(m, e))
            for m in range(1, 1 + count)
            for e in range(config.num_experts)
        ]
    )
    table = np.arange(count * config.num_experts, dtype=np.int32).reshape(count, -1)
    rng = np.random.default_rng(0)
    hidden = jax.numpy.asarray(rng.normal(size=(1, 4, config.hidden_size)), jax.numpy.float32)
    lengths, mask = np.zeros(1, np.int32), np.ones((1, 4), bool)
    kv = models.init_kv(config, 1, 16, jax.numpy.float32)

    names = [models.layer_name(layer) for layer in layers]
    out, _ = model.programs.stretch(
        tuple(config.representatives[layer] for layer in layers),
        False,
        tuple(shared[name] for name in names),
        tuple(draft[name] for name in names),
        tuple(jax.tree.map(jax.numpy.copy, kv[layer]) for layer in layers),
        hidden,
        slots,
        table,
        lengths,
        mask,
    )
    assert out.misses.shape == (count,)
    assert out.experts.shape == (count, 1, 4, config.top_k)
    # Layer by layer the states are the same, bit by bit.
    x = hidden
    for i, layer in enumerate(layers):
        assert np.array_equal(out.entering[i], x)
        name = models.layer_name(layer)
        routed, (experts, _), _ = model.programs.route(
            config.representatives[layer], False, shared[name], kv[layer], x, lengths, mask, None
        )
        x = model.programs.experts(shared[name], routed, slots, table[i], draft[name])
        assert np.array_equal(out.experts[i], experts)
    assert np.array_equal(out.hidden, x)


def test_a_prompt_runs_in_stretches_too(tiny_directory, plain, monkeypatch):
    model = load_tiny(tiny_directory, ALL)
    prompt = " ".join(PROMPTS) * 3
    expected = run(model, [prompt], depth=0).tokens
    monkeypatch.setattr(stretches, "PROMPT_PLATFORMS", ("cpu",))
    seen = watched(monkeypatch)
    assert run(model, [prompt], depth=0).tokens == expected
    assert [(m, done) for m, _, done in seen] == [(0, 4)]
    # A quarter of the slots holds no four layers whole: they go one by one, as before.
    few = load_tiny(tiny_directory, QUARTER)
    seen.clear()
    assert run(few, [prompt], depth=0).tokens == expected


def test_a_stretch_lacks_no_more_than_it_can_wait_for():
    """However many experts may be on their way: it waits for the last of them."""
    resident = np.ones((4, 64), bool)
    resident[:2, :20] = False  # 40 are missing in the first two layers, 20 in the first of them
    ctx = SimpleNamespace(
        config=SimpleNamespace(moe_layers=(0, 1, 2, 3)),
        representatives=(0, 0, 0, 0),
        pool=SimpleNamespace(
            max_in_flight=48, num_slots=1000, cache=SimpleNamespace(resident=resident)
        ),
    )
    foreseen = stretches.Foreseen(np.ones((4, 64), bool), may_bring=True)
    assert stretches.stretch_length(ctx, 0, foreseen) == 1
    assert stretches.stretch_length(ctx, 1, foreseen) == 2
    assert stretches.stretch_length(ctx, 2, foreseen) == 2
    resident[0, :20] = True
    assert stretches.stretch_length(ctx, 0, foreseen) == 4
