"""The slot pool: right bytes in the right slots, bounded staging, and recovery."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_jax.engine.slots import COMMIT_SIZES, SlotPool
from specter_jax.engine.store import ExpertStore, pin_layer
from specter_jax.errors import CacheFullError
from specter_jax.offload import get_policy, make_eviction
from tests.engine_cases import ALL, PROMPTS, QUARTER, assert_slots_match_store, load_tiny, run

LAYERS, EXPERTS, SIZE = 3, 6, 4


@pytest.fixture(scope="module")
def store():
    return make_store(LAYERS, EXPERTS)


def make_store(num_layers, num_experts):
    """Experts whose bytes name them."""
    layers = [
        [np.full(SIZE, 100 * layer + expert + 1, np.float32) for expert in range(num_experts)]
        for layer in range(num_layers)
    ]
    pinned = tuple(pin_layer(layer, jax.devices()[0]) for layer in layers)
    return ExpertStore(pinned)


def make_pool(store, num_slots=5, max_in_flight=3):
    eviction = make_eviction(get_policy("lru"), num_layers=LAYERS, num_experts=EXPERTS)
    return SlotPool(
        store=store,
        device=jax.devices()[0],
        num_slots=num_slots,
        max_in_flight=max_in_flight,
        eviction=eviction,
    )


def held(pool):
    """{(layer, expert): first element of its slot} for all residents."""
    slots = np.asarray(pool.slots)
    table = pool.table()
    return {(int(m), int(e)): slots[table[m, e], 0] for m, e in np.argwhere(table >= 0)}


def assert_right_bytes(pool):
    for (layer, expert), value in held(pool).items():
        assert value == 100 * layer + expert + 1


KEYS = st.tuples(st.integers(0, LAYERS - 1), st.integers(0, EXPERTS - 1))
ACTIONS = st.one_of(
    st.tuples(st.just("issue"), st.lists(KEYS, unique=True, max_size=8), st.booleans()),
    st.tuples(st.just("commit"), st.integers(0, 8)),
    st.tuples(st.just("load"), st.integers(0, LAYERS - 1), st.sets(st.integers(0, EXPERTS - 1))),
    st.tuples(st.just("drop"), st.integers(0, 3)),
    st.tuples(st.just("settle")),
)


@settings(max_examples=40, deadline=None)
@given(
    actions=st.lists(ACTIONS, max_size=12),
    num_slots=st.integers(1, 9),
    max_in_flight=st.integers(1, 9),
)
def test_slots_hold_what_the_table_says_after_any_sequence(
    store, actions, num_slots, max_in_flight
):
    pool = make_pool(store, num_slots, max_in_flight)
    for action, *arguments in actions:
        if action == "issue":
            keys, urgent = arguments
            assert pool.issue(keys, urgent=urgent) <= len(keys)
        elif action == "commit":
            # Of several layers at once; one layer's never exceed the slots.
            pool.commit(pool.staged_keys()[: min(arguments[0], num_slots)], next_layer=0)
        elif action == "load":
            layer, experts = arguments
            pool.load([(layer, e) for e in sorted(experts)][:num_slots], next_layer=0)
        elif action == "drop":
            pool.drop(pool.staged_keys()[: arguments[0]])
        else:
            pool.settle()
        assert pool.in_flight <= max_in_flight
        assert not (pool.staged_mask() & pool.cache.resident).any()
    assert_right_bytes(pool)
    assert pool.bytes_moved % store.expert_bytes == 0


@pytest.mark.parametrize("count", [*range(1, 10), 15, 16, 17, COMMIT_SIZES[-1], 33, 40])
def test_groups_of_every_size_are_written(count):
    wide = make_store(1, 40)
    eviction = make_eviction(get_policy("lru"), num_layers=1, num_experts=40)
    pool = SlotPool(
        store=wide, device=jax.devices()[0], num_slots=40, max_in_flight=40, eviction=eviction
    )
    keys = [(0, 39 - e) for e in range(count)]
    pool.issue(keys)
    pool.commit(keys, next_layer=0)
    assert sorted(held(pool)) == sorted(keys)
    assert_right_bytes(pool)


def test_more_than_the_staging_buffers_are_issued_only_so_far(store):
    pool = make_pool(store, max_in_flight=3)
    assert pool.issue([(0, e) for e in range(6)]) == 3
    assert pool.staged_keys() == [(0, 0), (0, 1), (0, 2)]


def test_an_urgent_load_displaces_the_newest_guess(store):
    pool = make_pool(store, max_in_flight=3)
    pool.issue([(2, 0), (2, 1), (2, 2)])
    assert pool.issue([(0, 5)], urgent=True) == 1
    assert pool.staged_keys() == [(2, 0), (2, 1), (0, 5)]


def test_a_pinned_expert_keeps_its_slot(store):
    pool = make_pool(store, num_slots=2)
    pool.load([(0, 0), (0, 1)], next_layer=0)
    pool.cache.pin(0, [0])
    pool.load([(1, 0), (1, 1), (1, 2)][:1], next_layer=0)
    assert pool.cache.resident[0, 0]
    pool.cache.pin(1, [0])
    pool.issue([(2, 0)])
    with pytest.raises(CacheFullError):
        pool.commit([(2, 0)], next_layer=0)
    pool.settle()
    assert_right_bytes(pool)


def test_the_table_given_to_programs_does_not_change_later(store):
    pool = make_pool(store, num_slots=1)
    pool.load([(0, 0)], next_layer=0)
    table = pool.table()
    before = table.copy()
    pool.load([(1, 1)], next_layer=0)
    assert (table == before).all()
    assert (pool.table() != before).any()


def test_filling_spreads_experts_over_the_layers(store):
    pool = make_pool(store, num_slots=7)
    pool.fill()
    assert pool.cache.resident.sum(1).tolist() == [3, 2, 2]
    assert_right_bytes(pool)


def test_everything_moved_is_counted(store):
    pool = make_pool(store)
    pool.load([(0, 0), (0, 1)], next_layer=0)
    pool.load([(0, 0), (1, 1)], next_layer=0)
    assert pool.bytes_moved == 3 * SIZE * 4


@pytest.mark.parametrize("moment", ["before the write", "after the write"])
def test_an_interrupted_write_leaves_no_wrong_owner(store, moment):
    pool = make_pool(store, num_slots=2)
    pool.load([(0, 0), (0, 1)], next_layer=0)
    original = pool._commit

    def interrupted(*arguments):
        if moment == "after the write":
            original(*arguments)
        raise KeyboardInterrupt

    pool._commit = interrupted
    with pytest.raises(KeyboardInterrupt):
        pool.load([(1, 0)], next_layer=0)
    pool._commit = original
    pool.settle()
    assert_right_bytes(pool)
    pool.load([(1, 0), (1, 1)], next_layer=0)
    assert sorted(held(pool)) == [(1, 0), (1, 1)]
    assert_right_bytes(pool)


class Interruption:
    """Stands in for a program or callback and raises at its n-th call, or when that has run."""

    def __init__(self, call, at, done=False):
        self.call, self.left, self.done = call, at, done

    def __call__(self, *arguments, **options):
        self.left -= 1
        if self.left == 0:
            if self.done:
                self.call(*arguments, **options)
            raise KeyboardInterrupt
        return self.call(*arguments, **options)


@pytest.mark.parametrize("at", [1, 2, 5, 9])
@pytest.mark.parametrize("place", ["on_text", "_commit", "_commit done", "_start"])
def test_an_interrupted_generation_leaves_the_model_exact(
    tiny_directory, plain, monkeypatch, place, at
):
    model = load_tiny(tiny_directory)
    run(model, PROMPTS[:1])
    options = {}
    with monkeypatch.context() as patch:
        if place == "on_text":
            options["on_text"] = Interruption(lambda *_: None, at)
        else:
            name, *done = place.split()
            stopping = Interruption(getattr(model.pool, name), at, bool(done))
            patch.setattr(model.pool, name, stopping)
        with pytest.raises(KeyboardInterrupt):
            run(model, PROMPTS[:2], **options)
    assert model.pool.in_flight == 0
    assert not model.pool.cache.pinned.any()
    assert_slots_match_store(model)
    assert run(model, PROMPTS[:2]).tokens == plain[:2]


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("program", ["draft", "verify", "route", "experts", "accept"])
def test_an_interrupted_program_leaves_the_model_exact(
    tiny_directory, plain, monkeypatch, program, at
):
    import dataclasses

    # With every expert resident all is verified in one program, else mostly by layers.
    model = load_tiny(tiny_directory, ALL if program == "verify" else QUARTER)
    run(model, PROMPTS[:1])
    stopping = Interruption(getattr(model.programs, program), at)
    with monkeypatch.context() as patch:
        patch.setattr(model, "programs", dataclasses.replace(model.programs, **{program: stopping}))
        with pytest.raises(KeyboardInterrupt):
            run(model, PROMPTS * 5)
    assert run(model, PROMPTS[:2]).tokens == plain[:2]
    assert_slots_match_store(model)


@pytest.mark.parametrize("done", [False, True], ids=["before", "donated"])
def test_an_interrupted_change_of_policy_leaves_the_model_exact(
    tiny_directory, plain, monkeypatch, done
):
    model = load_tiny(tiny_directory)
    run(model, PROMPTS[:1], policy="lookahead")
    stopping = Interruption(model.pool._commit, 2, done)
    with monkeypatch.context() as patch:
        patch.setattr(model.pool, "_commit", stopping)
        with pytest.raises(KeyboardInterrupt):
            run(model, PROMPTS[:1], policy="sp-e")
    result = run(model, PROMPTS[:2], policy="sp-e")
    assert result.tokens == plain[:2]
    assert_slots_match_store(model)


def test_arrivals_are_the_staged_experts_whose_copies_finished(tiny_directory, monkeypatch):
    pool = load_tiny(tiny_directory).pool
    keys = [(m, e) for m in range(2) for e in range(32) if pool.cache.slot_table[m, e] < 0][:5]
    pool.issue(keys)
    ready = set(keys[:3])
    asked = []

    class Copy:
        def __init__(self, key):
            self.key = key

        def is_ready(self):
            asked.append(self.key)
            return self.key in ready

    monkeypatch.setattr(pool, "_staged", {key: Copy(key) for key in keys})
    assert pool.arrived() == keys[:3]
    assert len(asked) <= 3
    ready.clear()
    assert pool.arrived() == []
