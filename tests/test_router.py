"""Routing rules, worked by hand or by a plain loop."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specter_jax.config import ModelConfig
from specter_jax.models.router import choose_experts, limit_groups, sparse_mixer
from tests.checkpoints import tiny_config


def config_with(**fields):
    return dataclasses.replace(ModelConfig.from_hf(tiny_config("mixtral")), **fields)


def test_softmax_routing_takes_the_largest_with_their_probabilities():
    logits = jnp.log(jnp.array([[1.0, 4.0, 2.0, 3.0]]))
    experts, weights = choose_experts(config_with(normalize_weights=False), logits)
    assert experts.tolist() == [[1, 3]]
    np.testing.assert_allclose(weights, [[0.4, 0.3]], rtol=1e-6)
    _, weights = choose_experts(config_with(), logits)
    np.testing.assert_allclose(weights, [[4 / 7, 3 / 7]], rtol=1e-6)
    scaled = config_with(normalize_weights=False, routed_scaling_factor=2.5)
    np.testing.assert_allclose(choose_experts(scaled, logits)[1], [[1.0, 0.75]], rtol=1e-6)


def test_ties_go_to_the_lower_expert():
    experts, _ = choose_experts(config_with(), jnp.zeros((1, 8)))
    assert experts.tolist() == [[0, 1]]


def test_groups_are_kept_by_their_best_expert():
    scores = jnp.array([[0.1, 0.2, 0.05, 0.3, 0.15, 0.1, 0.08, 0.02]])
    kept = limit_groups(scores, num_groups=4, top_groups=2)
    # Best of each pair: 0.2, 0.3, 0.15, 0.08.
    np.testing.assert_allclose(kept, [[0.1, 0.2, 0.05, 0.3, 0, 0, 0, 0]])
    limited = config_with(routing="group_limited", num_groups=4, top_groups=1)
    assert choose_experts(limited, jnp.log(scores))[0].tolist() == [[3, 2]]


@pytest.mark.parametrize("jitter", [0.01, 0.2])
def test_sparse_mixer_follows_its_definition(jitter):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((50, 8)).astype(np.float32)
    experts, weights = sparse_mixer(jnp.asarray(logits), jitter)
    for row, chosen, weight in zip(logits, np.asarray(experts), np.asarray(weights), strict=True):
        available = list(range(8))
        for pick, value in zip(chosen, weight, strict=True):
            best = max(available, key=lambda e: row[e])
            assert pick == best
            top = row[best]
            close = [e for e in available if (top - row[e]) / max(abs(row[e]), top) <= 2 * jitter]
            exponentials = np.exp(row[close] - top)
            assert value == pytest.approx(1 / exponentials.sum(), rel=1e-5)
            available.remove(best)


def test_sparse_mixer_picks_two_distinct_experts_on_a_tie():
    experts, weights = sparse_mixer(jnp.full((1, 4), 2.0), 0.01)
    assert experts.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights, [[1 / 4, 1 / 3]], rtol=1e-6)
