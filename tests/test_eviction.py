"""Eviction orders: recency, and expected next use with what it learns."""

import numpy as np
import pytest

from specter_jax.offload import LookaheadEviction, LruEviction
from specter_jax.offload.routing_history import MIN_TOKENS, RoutingHistory

M, E, K = 4, 8, 2


def sweep(eviction, used: np.ndarray, *, next_layers=(0,), routing=None, committed=None) -> None:
    """One whole iteration in which the draft was right."""
    eviction.begin_iteration(used, routing=routing)
    for next_layer in next_layers:
        eviction.retention(next_layer)
    for layer in range(M):
        eviction.observe_layer(layer, np.flatnonzero(used[layer]))
    eviction.end_iteration(committed)


def test_lru_orders_by_last_use_and_placement():
    lru = LruEviction(2, 3)
    lru.observe_layer(0, np.array([0, 2]))
    lru.loaded(1, 1)
    lru.observe_layer(0, np.array([0]))
    order = np.argsort(lru.retention(0).ravel(), kind="stable")
    # Never touched ones first, then (0, 2), (1, 1), and (0, 0) last.
    assert order[-3:].tolist() == [2, 4, 0]


def test_predicted_experts_are_kept_nearest_layer_first():
    eviction = LookaheadEviction(M, E)
    predicted = np.zeros((M, E), bool)
    predicted[:, 0] = True
    eviction.begin_iteration(predicted)
    retention = eviction.retention(1)
    assert retention[1, 0] > retention[2, 0] > retention[3, 0]
    # Layer 0 has been executed, so its expert waits a whole turn, as do all not predicted.
    assert retention[3, 0] > retention[0, 0]
    assert retention[3, 0] > retention[:, 1:].max()


def test_hot_experts_outlive_cold_ones():
    eviction = LookaheadEviction(M, E)
    rng = np.random.default_rng(0)
    used = np.zeros((M, E), bool)
    for _ in range(60):
        used = rng.random((M, E)) < np.linspace(0.05, 0.95, E)
        used[:, 0] = False
        used[:, -1] = True
        sweep(eviction, used)
    eviction.begin_iteration(used)
    retention = eviction.retention(M)
    assert (retention[:, -1] > retention[:, 1:4].max(1)).all()
    assert (retention[:, 0] == retention.min(1)).all()


def test_chances_become_calibrated():
    num_layers, num_experts, tokens = 6, 24, 6
    rng = np.random.default_rng(1)
    popularity = np.linspace(0.2, 3.0, num_experts)
    eviction = LookaheadEviction(num_layers, num_experts)
    estimates, uses = [], []
    for step in range(120):
        draws = rng.choice(num_experts, (num_layers, 1, tokens, 2), p=popularity / popularity.sum())
        used = np.zeros((num_layers, num_experts), bool)
        used[np.arange(num_layers)[:, None], draws.reshape(num_layers, -1)] = True
        eviction.begin_iteration(used, routing=draws)
        eviction.retention(0)
        for layer in range(num_layers):
            eviction.observe_layer(layer, np.flatnonzero(used[layer]))
        if step >= 60:
            estimates.append(eviction.chance())
            uses.append(used)
        eviction.end_iteration(np.array([tokens]))
    rate = np.mean(uses, axis=(0, 1))
    error = np.mean(estimates, axis=(0, 1)) - rate
    # The true rates run from 0.06 to 0.7; always answering with their mean errs by 0.35.
    assert rate.max() - rate.min() > 0.5
    assert np.abs(error).max() < 0.12


def test_a_partial_prediction_leaves_hope_for_the_rest():
    eviction = LookaheadEviction(M, E)
    hot = np.zeros((M, E), bool)
    hot[:, :3] = True
    for _ in range(20):
        sweep(eviction, hot)
    nothing = np.zeros((M, E), bool)
    eviction.begin_iteration()
    undrafted = eviction.retention(0)
    eviction.update_prediction(nothing, coverage=0.5)
    half = eviction.retention(0)
    eviction.update_prediction(nothing, coverage=1.0)
    full = eviction.retention(0)
    # The longer a hot expert goes unnamed, the less it is worth keeping for this sweep.
    assert (undrafted[:, 0] > half[:, 0]).all()
    assert (half[:, 0] > full[:, 0]).all()
    assert (undrafted[:, 0] > undrafted[:, 5]).all()


def test_without_a_draft_executed_layers_are_learned_from():
    eviction = LookaheadEviction(M, E)
    eviction.begin_iteration()
    before = eviction.retention(0)
    eviction.observe_layer(0, np.array([3]))
    after = eviction.retention(1)
    assert after[0, 3] > after[0, 4]
    assert before[0, 3] == before[0, 4]
    eviction.end_iteration()


def periodic_routing(length: int, period: int, seed: int = 0) -> np.ndarray:
    """int [M, 1, length, K], repeating after `period` tokens."""
    cycle = np.random.default_rng(seed).integers(0, E, (M, 1, period, K))
    return np.concatenate([cycle] * (length // period + 1), axis=2)[:, :, :length]


def test_history_foresees_a_repetition():
    period, ahead = 7, 3
    routing = periodic_routing(60, period)
    history = RoutingHistory(M, E)
    history.commit(history.pack(routing[:, :, :50]), np.array([48]))
    chance, likeness = history.chances(history.pack(routing[:, :, 48:50]), (ahead,))
    expected = np.zeros((M, E), bool)
    expected[np.arange(M)[:, None, None], routing[:, 0, 50:53]] = True
    chance = chance[0]
    assert likeness == pytest.approx(1.0)
    assert (chance[expected] > 0.6).all()
    assert chance[expected].min() > chance[~expected].max()


def test_history_is_kept_per_sequence_and_ignores_masked_tokens():
    alone, both = RoutingHistory(M, E), RoutingHistory(M, E)
    routing = periodic_routing(40, 5)
    masked = np.full_like(routing, E)
    alone.commit(alone.pack(routing), np.array([40]))
    both.commit(both.pack(np.concatenate([routing, masked], axis=1)), np.array([40, 0]))
    assert (alone.chances(None, (4,))[0] == both.chances(None, (4,))[0]).all()
    # The masked row is all zeros, so as a drafted tail it adds nothing either.
    tail = both.pack(np.concatenate([routing[:, :, :2], masked[:, :, :2]], axis=1))
    assert (
        both.chances(tail, (4,))[0] == alone.chances(alone.pack(routing[:, :, :2]), (4,))[0]
    ).all()


def test_short_history_says_nothing():
    history = RoutingHistory(M, E)
    assert history.chances(None, (4,)) is None
    history.commit(history.pack(periodic_routing(4, 4)), np.array([4]))
    assert history.chances(None, (4,)) is None
    assert MIN_TOKENS > 4
