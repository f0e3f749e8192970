"""The systems of the evaluation: what each is, equal shares of slots, streaming, exact output."""

import numpy as np
import pytest

from specter_jax.cli.arguments import build_parser
from specter_jax.errors import InvalidRequestError
from specter_jax.offload import ExpertCache, LayerLruEviction, get_policy
from specter_jax.systems import SYSTEMS, get_system
from tests.engine_cases import ALL, FEW, PROMPTS, QUARTER, assert_slots_match_store, load_tiny, run

LAYERS, EXPERTS = 4, 8


def test_names_policies_and_depths():
    assert list(SYSTEMS) == ["mo", "mo-sm", "specmoeoff", "sp-moe", "specter"]
    for name, system in SYSTEMS.items():
        assert get_system(name) is system
        assert system.name == name
        assert get_policy(system.policy).speculative == (system.depth != 0)
        assert system.source
        assert system.published
        assert system.assumed
    with pytest.raises(InvalidRequestError, match=r"unknown system 'vllm'.*mo-sm.*specter"):
        get_system("vllm")


def test_the_command_line_takes_a_system_and_lets_later_options_change_it():
    parse = build_parser().parse_args
    options = parse(["generate", "DIR", "--prompt", "x", "--system", "mo"])
    assert (options.policy, options.depth) == ("mo", 0)
    options = parse(["generate", "DIR", "--prompt", "x", "--system", "sp-moe", "--depth", "4"])
    assert (options.policy, options.depth) == ("sp-l", 4)


def make_cache(num_slots: int) -> ExpertCache:
    eviction = LayerLruEviction(LAYERS, EXPERTS)
    return ExpertCache(
        num_layers=LAYERS, num_experts=EXPERTS, num_slots=num_slots, eviction=eviction
    )


def use(cache: ExpertCache, layer: int, experts: list[int]) -> int:
    """One layer of a sweep; returns how many experts had to be placed."""
    missing = [e for e in experts if not cache.resident[layer, e]]
    cache.pin(layer, experts)
    cache.reserve_many(layer, missing, next_layer=layer)
    cache.eviction.observe_layer(layer, np.array(experts))
    cache.unpin_all()
    return len(missing)


def test_every_layer_keeps_its_share_and_evicts_its_own_least_recent():
    cache = make_cache(3 * LAYERS)
    for sweep in range(6):
        for layer in range(LAYERS):
            use(cache, layer, [(sweep + layer) % EXPERTS])
    assert cache.resident.sum(1).tolist() == [3] * LAYERS
    for layer in range(LAYERS):
        expected = {(sweep + layer) % EXPERTS for sweep in (3, 4, 5)}
        assert set(np.flatnonzero(cache.resident[layer])) == expected


def test_per_layer_lru_equals_an_independent_lru_per_layer():
    rng = np.random.default_rng(5)
    cache = make_cache(3 * LAYERS)
    recent = [[0, 1, 2] for _ in range(LAYERS)]
    for layer in range(LAYERS):
        use(cache, layer, recent[layer])
    for _ in range(200):
        for layer in range(LAYERS):
            experts = sorted(rng.choice(EXPERTS, 2, replace=False).tolist())
            missing = [e for e in experts if e not in recent[layer]]
            assert use(cache, layer, experts) == len(missing)
            for expert in missing + experts:
                if expert in recent[layer]:
                    recent[layer].remove(expert)
                recent[layer].append(expert)
            del recent[layer][:-3]
            assert set(np.flatnonzero(cache.resident[layer])) == set(recent[layer])


def test_a_layer_borrows_what_it_needs_and_gives_it_back():
    cache = make_cache(2 * LAYERS)
    for layer in range(LAYERS):
        use(cache, layer, [0, 1])
    use(cache, 1, [2, 3, 4, 5])
    assert cache.resident.sum(1).tolist()[1] == 4
    lenders = np.flatnonzero(cache.resident.sum(1) < 2).tolist()
    for layer in lenders:
        use(cache, layer, [6, 7])
    assert cache.resident.sum(1).tolist() == [2] * LAYERS
    assert set(np.flatnonzero(cache.resident[1])) == {4, 5}


@pytest.mark.parametrize("slots", [FEW, QUARTER])
@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_gives_the_plain_output(tiny_directory, plain, name, slots):
    model = load_tiny(tiny_directory, slots)
    system = get_system(name)
    depth = 3 if system.depth == "auto" else system.depth
    result = run(model, PROMPTS[:2], policy=system.policy, depth=depth)
    assert result.tokens == plain[:2]
    assert_slots_match_store(model)


def test_streaming_moves_every_expert_of_every_verification(tiny_directory):
    model = load_tiny(tiny_directory, QUARTER)
    expert_bytes, total = model.pool.store.expert_bytes, ALL
    moved = []
    for new_tokens in (6, 12):
        model.use_policy("lru")
        model.use_policy("specmoeoff")
        stats = run(
            model, PROMPTS[:1], policy="specmoeoff", depth=3, max_new_tokens=new_tokens
        ).stats
        moved.append((stats.iterations, stats.bytes_host_to_device / expert_bytes))
    (few, less), (many, more) = moved
    assert many > few
    assert more - less == (many - few) * total


def test_streaming_moves_nothing_when_all_experts_fit(tiny_directory):
    stats = run(load_tiny(tiny_directory, ALL), PROMPTS[:1], policy="specmoeoff").stats
    assert stats.bytes_host_to_device == 0
    assert stats.hit_rate == 1.0
