"""Filters, keys and draws, against distributions worked by hand and a NumPy model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_jax.errors import InvalidRequestError
from specter_jax.sampling import (
    ACCEPT_STREAM,
    COMMIT_STREAM,
    DRAFT_STREAM,
    SamplingConfig,
    filtered_probs,
    greedy,
    row_keys,
    sample,
    stream_keys,
)

FILTER = jax.jit(filtered_probs)


def probs_of(logits, **fields):
    scalars = SamplingConfig(**{"temperature": 1.0, **fields}).scalars()
    return np.asarray(FILTER(jnp.asarray(logits, jnp.float32), *scalars))


def test_no_filter_gives_the_softmax():
    logits = np.log([0.5, 0.3, 0.2])
    np.testing.assert_allclose(probs_of(logits), [0.5, 0.3, 0.2], rtol=1e-6)


def test_temperature_divides_the_logits():
    # p ** (1 / 0.5) renormalised: 0.25, 0.09, 0.04 over 0.38.
    expected = np.array([0.25, 0.09, 0.04]) / 0.38
    np.testing.assert_allclose(
        probs_of(np.log([0.5, 0.3, 0.2]), temperature=0.5), expected, rtol=1e-6
    )


def test_top_k_keeps_the_largest_and_those_equal_to_the_last():
    logits = np.log([0.4, 0.1, 0.2, 0.2, 0.1])
    np.testing.assert_allclose(probs_of(logits, top_k=1), [1, 0, 0, 0, 0])
    np.testing.assert_allclose(
        probs_of(logits, top_k=2), np.array([0.4, 0, 0.2, 0.2, 0]) / 0.8, rtol=1e-6
    )
    np.testing.assert_allclose(probs_of(logits, top_k=99), np.exp(logits), rtol=1e-6)


def test_top_p_keeps_the_token_that_crosses_p():
    logits = np.log([0.1, 0.5, 0.15, 0.25])
    np.testing.assert_allclose(probs_of(logits, top_p=0.4), [0, 1, 0, 0])
    np.testing.assert_allclose(
        probs_of(logits, top_p=0.6), np.array([0, 0.5, 0, 0.25]) / 0.75, rtol=1e-6
    )
    np.testing.assert_allclose(probs_of(logits, top_p=0.99), np.exp(logits), rtol=1e-6)
    assert probs_of(logits, top_p=1e-6).tolist() == [0, 1, 0, 0]


def test_top_p_among_equal_logits_keeps_the_lowest_ids():
    assert probs_of(np.zeros(8), top_p=0.5).tolist() == [0.25] * 4 + [0.0] * 4


def test_top_p_applies_to_what_top_k_left():
    # After top-k 2: 0.625 and 0.375, so p = 0.6 is crossed by the first alone.
    logits = np.log([0.5, 0.3, 0.2])
    assert probs_of(logits, top_k=2, top_p=0.6).tolist() == [1, 0, 0]
    assert probs_of(logits, top_p=0.6)[1] > 0


def test_extreme_temperatures_and_masked_logits_stay_finite():
    logits = np.array([5.0, 4.0, -np.inf, 4.999])
    assert probs_of(logits, temperature=1e-300).tolist() == [1, 0, 0, 0]
    np.testing.assert_allclose(
        probs_of(logits, temperature=1e300), np.array([1, 1, 0, 1]) / 3, rtol=1e-6
    )
    for fields in ({"top_k": 4}, {"top_p": 0.9999999}, {"top_k": 3, "top_p": 0.5}):
        probs = probs_of(logits, **fields)
        assert np.isfinite(probs).all()
        assert probs[2] == 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    temperature=st.floats(0.2, 3.0),
    top_k=st.integers(0, 18),
    top_p=st.floats(0.05, 1.0),
    levels=st.integers(2, 200),
)
def test_filters_match_a_plain_loop(seed, temperature, top_k, top_p, levels):
    """Coarse levels make equal logits common. The loop works in float64, so cases where float32
    cannot tell on which side of p a sum lies are left out."""
    rng = np.random.default_rng(seed)
    logits = rng.integers(0, levels, size=16) / np.float32(levels) * 6
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    kept = list(order)
    if top_k:
        kth = np.sort(scaled)[::-1][min(top_k, 16) - 1]
        kept = [token for token in order if scaled[token] >= kth]
    weights = np.exp(scaled - scaled.max())
    weights /= weights[kept].sum()
    nucleus, mass = [], 0.0
    for token in kept:
        if abs(mass - top_p) < 1e-5 and top_p < 1:
            return
        if nucleus and mass >= top_p and top_p < 1:
            break
        nucleus.append(token)
        mass += weights[token]
    expected = np.zeros(16)
    expected[nucleus] = weights[nucleus] / weights[nucleus].sum()
    got = probs_of(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    np.testing.assert_allclose(got, expected, atol=3e-6)


@pytest.mark.torch
def test_filters_match_the_warpers_of_transformers():
    torch = pytest.importorskip("torch", reason="compares with transformers; needs CPU PyTorch")
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32) * 3
    for temperature, top_k, top_p in ((0.7, 10, 0.8), (1.3, 40, 0.95), (1.0, 64, 0.3)):
        scores = torch.from_numpy(logits)
        for warper in (
            TemperatureLogitsWarper(temperature),
            TopKLogitsWarper(top_k),
            TopPLogitsWarper(top_p),
        ):
            scores = warper(None, scores)
        expected = torch.softmax(scores, dim=-1).numpy()
        got = probs_of(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_changing_the_numbers_compiles_nothing():
    traces = []

    @jax.jit
    def filter_(logits, *scalars):
        traces.append(scalars)
        return filtered_probs(logits, *scalars)

    for fields in (
        {"temperature": 1.0},
        {"temperature": 1, "top_k": 5},
        {"temperature": 0.5, "top_k": 0, "top_p": 0.9},
    ):
        filter_(jnp.zeros((2, 8)), *SamplingConfig(**fields).scalars())
    assert len(traces) == 1


def test_greedy_takes_the_lowest_id_among_equals():
    tokens = greedy(jnp.asarray([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]]))
    assert tokens.dtype == jnp.int32
    assert tokens.tolist() == [1, 0]


def test_draws_follow_the_probabilities_and_never_take_an_impossible_token():
    probs = jnp.asarray([0.0, 0.5, 0.3, 0.2, 0.0])
    keys = stream_keys(row_keys(3, jnp.arange(4000)), jnp.zeros(4000, jnp.int32), COMMIT_STREAM)
    counts = np.bincount(sample(jnp.tile(probs, (4000, 1)), keys), minlength=5)
    assert counts[0] == counts[4] == 0
    # Four standard deviations of a count.
    assert (np.abs(counts - 4000 * probs) <= 4 * np.sqrt(4000 * 0.25)).all()


def test_a_row_draws_the_same_alone_and_in_a_batch():
    probs = jnp.full((3, 50), 0.02)
    positions = jnp.asarray([5, 9, 7])
    together = sample(
        probs, stream_keys(row_keys(1, jnp.asarray([4, 0, 2])), positions, DRAFT_STREAM)
    )
    for row, request in enumerate((4, 0, 2)):
        keys = stream_keys(
            row_keys(1, jnp.asarray([request])), positions[row : row + 1], DRAFT_STREAM
        )
        assert sample(probs[:1], keys)[0] == together[row]


def test_seeds_requests_positions_and_streams_have_their_own_keys():
    def key(seed=0, request=0, position=0, stream=DRAFT_STREAM):
        keys = stream_keys(row_keys(seed, jnp.asarray([request])), jnp.asarray([position]), stream)
        return tuple(np.asarray(jax.random.key_data(keys)).ravel().tolist())

    distinct = {
        key(),
        key(seed=1),
        key(request=1),
        key(position=1),
        key(stream=ACCEPT_STREAM),
        key(stream=COMMIT_STREAM),
        key(seed=2**32 - 1),
    }
    assert len(distinct) == 7
    two_axes = stream_keys(row_keys(0, jnp.asarray([0])), jnp.asarray([[0, 1]]), DRAFT_STREAM)
    data = np.asarray(jax.random.key_data(two_axes))
    assert tuple(data[0, 1].tolist()) == key(position=1)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 10**400}, "temperature is inf; expected a finite number"),
        ({"temperature": -(10**400)}, "temperature is -inf; expected a finite number"),
        ({"temperature": 10**5000}, "temperature"),  # more digits than Python prints
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_k": True}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": 10**400}, "top_p is inf; expected a number above 0"),
        ({"top_p": 10**5000}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
    ],
)
def test_values_out_of_range_are_named(fields, named):
    with pytest.raises(InvalidRequestError, match=named):
        SamplingConfig(**fields)


@pytest.mark.filterwarnings("error")
def test_numbers_of_any_type_become_the_same_scalars():
    expected = SamplingConfig(temperature=0.5, top_k=3, top_p=0.75).scalars()
    for kind in (np.float16, np.float32, np.float64, np.longdouble):
        fields = {"temperature": kind(0.5), "top_k": np.uint8(3), "top_p": kind(0.75)}
        assert SamplingConfig(**fields).scalars() == expected
    assert np.isfinite(SamplingConfig(temperature=10**300, top_k=10**400).scalars()).all()
