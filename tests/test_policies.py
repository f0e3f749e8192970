"""Policies by name, load plans and the cut-off layer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_jax.errors import UnknownPolicyError
from specter_jax.offload import (
    DEFAULT_POLICY,
    POLICIES,
    SYSTEM_POLICIES,
    LayerLruEviction,
    LookaheadEviction,
    LruEviction,
    cutoff_layer,
    get_policy,
    make_eviction,
    plan_loads,
)


def test_names_and_default():
    assert set(POLICIES) == {"lru", "lru-s", "sp-e", "sp-l", "lookahead"}
    assert DEFAULT_POLICY == "lookahead"
    assert set(SYSTEM_POLICIES) == {"mo", "mo-sm", "specmoeoff"}
    assert all(get_policy(name).name == name for name in POLICIES | SYSTEM_POLICIES)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownPolicyError) as error:
        get_policy("mru")
    assert "'mru'" in str(error.value)
    assert all(name in str(error.value) for name in POLICIES | SYSTEM_POLICIES)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "speculative", "prefetch", "kind", "use_cutoff"),
    [
        ("lru", False, "none", LruEviction, False),
        ("lru-s", True, "none", LruEviction, False),
        ("sp-e", True, "next_layer", LruEviction, False),
        ("sp-l", True, "draft", LruEviction, True),
        ("lookahead", True, "draft", LookaheadEviction, False),
        ("mo", False, "next_layer", LayerLruEviction, False),
        ("mo-sm", True, "next_layer", LayerLruEviction, False),
        ("specmoeoff", True, "none", LruEviction, False),
    ],
)
def test_what_each_policy_does(name, speculative, prefetch, kind, use_cutoff):
    spec = get_policy(name)
    assert (spec.speculative, spec.prefetch, spec.use_cutoff) == (speculative, prefetch, use_cutoff)
    assert type(make_eviction(spec, num_layers=2, num_experts=4)) is kind
    assert spec.whole_layers == (name == "specmoeoff")


def test_loads_come_in_layer_order_most_counted_first():
    counts = np.array([[0, 1, 3, 2], [5, 0, 0, 5], [1, 1, 1, 1]])
    resident = np.zeros((3, 4), bool)
    resident[1, 0] = True
    in_flight = np.zeros((3, 4), bool)
    in_flight[2, :2] = True
    plan = plan_loads(counts > 0, resident, in_flight, counts=counts)
    assert plan == [(0, 2), (0, 3), (0, 1), (1, 3), (2, 2), (2, 3)]
    assert plan_loads(counts > 0, resident, start_layer=1, cutoff=2) == [(1, 3)]


@settings(max_examples=50, deadline=None)
@given(
    loads=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    load_ms=st.sampled_from([0.25, 0.5, 1.0]),
    draft_ms=st.integers(0, 40),
    num_slots=st.integers(0, 40),
)
def test_cutoff_is_the_deepest_prefix_in_time_and_space(loads, load_ms, draft_ms, num_slots):
    cutoff = cutoff_layer(loads, load_ms=load_ms, draft_ms=draft_ms, num_slots=num_slots)

    def fits(layer: int) -> bool:
        total = sum(loads[:layer])
        return total * load_ms <= draft_ms and total <= num_slots

    assert fits(cutoff)
    assert cutoff == len(loads) or not fits(cutoff + 1)


def test_cutoff_with_equal_layers_is_the_papers_formula():
    # 6 loads per layer of 0.34 ms within 24 ms: L = floor(24 / (6 * 0.34)) = 11.
    assert cutoff_layer(np.full(26, 6), load_ms=0.34, draft_ms=24.0, num_slots=300) == 11
    assert cutoff_layer(np.full(26, 6), load_ms=0.34, draft_ms=24.0, num_slots=20) == 3
