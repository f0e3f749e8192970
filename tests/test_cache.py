"""The expert cache's bookkeeping, checked against a plain dict that does the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.constants import NOT_RESIDENT
from specter_jax.errors import BudgetError, CacheFullError, InvalidRequestError
from specter_jax.offload import ExpertCache, LookaheadEviction, LruEviction

M, E = 3, 5


class FixedRetention(LruEviction):
    """Retention is whatever the test says."""

    ranks_absent = True

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def loaded(self, layer: int, expert: int) -> None:
        pass

    def retention(self, next_layer: int) -> np.ndarray:
        return self.values


def make_cache(num_slots: int, eviction=None) -> ExpertCache:
    eviction = eviction or FixedRetention(np.arange(M * E, dtype=float).reshape(M, E))
    return ExpertCache(num_layers=M, num_experts=E, num_slots=num_slots, eviction=eviction)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(0, M - 1), st.sets(st.integers(0, E - 1))),
        st.tuples(st.just("pin"), st.integers(0, M - 1), st.lists(st.integers(0, E - 1))),
        st.tuples(st.just("unpin"), st.integers(0, M - 1), st.lists(st.integers(0, E - 1))),
        st.tuples(st.just("unpin_all"), st.just(0), st.just(())),
        st.tuples(st.just("release"), st.integers(0, M - 1), st.sets(st.integers(0, E - 1))),
    ),
    max_size=25,
)


class Model:
    """key -> slot, key -> pins; victims found by sorting."""

    def __init__(self, num_slots: int, values: np.ndarray) -> None:
        self.num_slots, self.values = num_slots, values
        self.slots: dict[tuple[int, int], int] = {}
        self.pins: dict[tuple[int, int], int] = {}

    def expected_victims(self, count: int) -> list[tuple[int, int]] | None:
        loose = [key for key in self.slots if not self.pins.get(key)]
        if len(loose) < count:
            return None
        return sorted(loose, key=lambda key: (self.values[key], self.slots[key]))[:count]


@settings(max_examples=150, deadline=None)
@given(
    num_slots=st.integers(1, 8),
    steps=STEPS,
    order=st.permutations(range(M * E)),
)
def test_cache_agrees_with_a_dict(num_slots, steps, order):
    values = np.array(order, float).reshape(M, E)
    cache, model = make_cache(num_slots, FixedRetention(values)), Model(num_slots, values)
    for action, layer, experts in steps:
        keys = [(layer, e) for e in experts]
        if action == "reserve":
            reserve(cache, model, layer, [e for e in experts if (layer, e) not in model.slots])
        elif action == "pin":
            cache.pin(layer, list(experts))
            for key in keys:
                model.pins[key] = model.pins.get(key, 0) + 1
        elif action == "unpin":
            if any(keys.count(key) > model.pins.get(key, 0) for key in keys):
                with pytest.raises(InvalidRequestError):
                    cache.unpin(layer, list(experts))
            else:
                cache.unpin(layer, list(experts))
                for key in keys:
                    model.pins[key] -= 1
        elif action == "unpin_all":
            cache.unpin_all()
            model.pins.clear()
        else:
            for key in keys:
                if key in model.slots and not model.pins.get(key):
                    assert cache.release(*key) == model.slots.pop(key)
                else:
                    with pytest.raises(InvalidRequestError):
                        cache.release(*key)
        check(cache, model)


def reserve(cache: ExpertCache, model: Model, layer: int, experts: list[int]) -> None:
    """Reserve in both; the cache must choose what the model expects."""
    count = max(0, len(experts) - (model.num_slots - len(model.slots)))
    victims = model.expected_victims(count)
    if victims is None:
        with pytest.raises(CacheFullError):
            cache.reserve_many(layer, experts, next_layer=0)
        return
    placements = cache.reserve_many(layer, experts, next_layer=0)
    assert [p.evicted for p in placements if p.evicted] == victims
    for placement in placements:
        if placement.evicted:
            assert model.slots.pop(placement.evicted) == placement.slot
    for expert, placement in zip(experts, placements, strict=True):
        model.slots[layer, expert] = placement.slot


def check(cache: ExpertCache, model: Model) -> None:
    """Every invariant that the module states."""
    table = cache.slot_table
    resident = {
        tuple(int(i) for i in key): int(table[tuple(key)]) for key in np.argwhere(table >= 0)
    }
    assert resident == model.slots
    assert len(set(resident.values())) == len(resident)
    assert all(0 <= slot < model.num_slots for slot in resident.values())
    assert cache.num_free + len(resident) == model.num_slots
    assert (cache.resident == (table != NOT_RESIDENT)).all()
    loose = [key for key in resident if not model.pins.get(key)]
    assert cache.evictable() == cache.num_free + len(loose)
    assert cache.victim_retention(0).tolist() == sorted(float(model.values[k]) for k in loose)


def test_protected_experts_stay():
    cache = make_cache(3)
    cache.reserve_many(0, [0, 1, 2], next_layer=0)
    protect = np.zeros((M, E), bool)
    protect[0, :2] = True
    assert cache.evictable(protect) == 1
    (placement,) = cache.reserve_many(1, [0], next_layer=0, protect=protect)
    assert placement.evicted == (0, 2)
    with pytest.raises(CacheFullError, match="more expert slots"):
        cache.reserve_many(2, [0, 1], next_layer=0, protect=protect)
    assert cache.slot_table[2, 0] == NOT_RESIDENT


def test_one_reservation_equals_a_batch_of_one():
    one, many = make_cache(1), make_cache(1)
    assert one.reserve(2, 4, next_layer=0) == many.reserve_many(2, [4], next_layer=0)[0]
    assert one.reserve(1, 0, next_layer=0).evicted == (2, 4)


def test_placing_a_resident_expert_is_refused():
    cache = make_cache(4)
    cache.reserve(0, 1, next_layer=0)
    with pytest.raises(InvalidRequestError, match="not resident"):
        cache.reserve_many(0, [2, 1], next_layer=0)
    assert cache.num_free == 3


def test_no_slots_is_a_budget_error():
    with pytest.raises(BudgetError, match="at least 1"):
        make_cache(0)


def test_slot_table_cannot_be_written_from_outside():
    with pytest.raises(ValueError, match="read-only"):
        make_cache(2).slot_table[0, 0] = 1


def test_loads_worth_less_than_residents_are_not_admitted():
    values = np.arange(M * E, dtype=float).reshape(M, E)
    cache = make_cache(3, FixedRetention(values))
    cache.reserve_many(1, [0, 1], next_layer=0)  # retention 5 and 6, one slot free
    # The free slot takes (0, 0); 7 beats 5; 3 does not beat 6, and nothing after it is tried.
    loads = [(0, 0), (1, 2), (0, 3), (2, 4)]
    assert cache.admit(loads) == loads[:2]
    protect = np.zeros((M, E), bool)
    protect[1, 0] = True  # now the only victim is worth 6
    assert cache.admit([(0, 0), (1, 2), (2, 4)], protect=protect) == [(0, 0), (1, 2)]
    protect[1, 1] = True
    assert cache.admit(loads, protect=protect) == loads[:1]


def test_recency_admits_as_much_as_there_is_room_for():
    cache = make_cache(3, LruEviction(M, E))
    cache.reserve_many(1, [0, 1, 2], next_layer=0)
    protect = np.zeros((M, E), bool)
    protect[1, 0] = True
    loads = [(0, 0), (0, 1), (0, 2)]
    assert cache.admit(loads, protect=protect) == loads[:2]


def test_prefetch_never_pushes_out_what_an_earlier_layer_will_use():
    eviction = LookaheadEviction(M, E)
    cache = make_cache(4, eviction)
    cache.reserve_many(0, [0, 1], next_layer=0)
    cache.reserve_many(1, [0, 1], next_layer=0)
    predicted = np.zeros((M, E), bool)
    predicted[0, :2] = predicted[1, 0] = predicted[2, :3] = True
    eviction.begin_iteration(predicted)
    # Only (1, 1) is not predicted; layer 2's experts come after all the others.
    assert cache.admit([(2, 0), (2, 1), (2, 2)]) == [(2, 0)]


def test_experts_of_several_layers_are_placed_together_and_never_evict_one_another():
    values = np.arange(M * E, dtype=float).reshape(M, E)
    cache = make_cache(4, FixedRetention(values))
    cache.reserve_many(0, [0, 1, 2], next_layer=0)
    placed = cache.reserve_keys([(1, 0), (0, 3), (2, 1)], next_layer=0)
    # One slot was free; then the two of the lowest retention leave, lowest first.
    assert [placement.evicted for placement in placed] == [None, (0, 0), (0, 1)]
    assert {key for key in zip(*np.nonzero(cache.resident), strict=True)} == {
        (0, 2),
        (0, 3),
        (1, 0),
        (2, 1),
    }
    with pytest.raises(InvalidRequestError, match="distinct"):
        cache.reserve_keys([(2, 0), (2, 0)], next_layer=0)
