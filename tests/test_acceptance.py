"""Speculative acceptance: exact prefixes when greedy, the target's distribution when sampled."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats as scipy_stats

from specter_jax import acceptance
from specter_jax.acceptance import UNUSED_TOKEN, accept_greedy, accept_sampled, residual_probs
from specter_jax.sampling import (
    DRAFT_STREAM,
    SamplingConfig,
    filtered_probs,
    row_keys,
    sample,
    stream_keys,
)

VOCAB = 5
DEPTH = 3
NUM_SAMPLES = 20_000
# A correct sampler fails a test at this level once in 1e4 seeds; the seeds are fixed.
SIGNIFICANCE = 1e-4


def one_hot_logits(tokens, vocab=8):
    """Logits whose most probable tokens are the given ones: [batch, T] -> [batch, T, vocab]."""
    return jax.nn.one_hot(jnp.asarray(tokens), vocab) * 4.0


def test_greedy_takes_the_agreeing_prefix_and_the_targets_next_token():
    target = one_hot_logits([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    drafts = jnp.asarray([[1, 2, 3], [1, 7, 3], [6, 2, 3]])
    accepted = jax.jit(accept_greedy)(target, drafts, jnp.asarray([3, 3, 3]))
    assert accepted.num_accepted.tolist() == [3, 1, 0]
    assert accepted.tokens.tolist() == [
        [1, 2, 3, 4],
        [1, 2, UNUSED_TOKEN, UNUSED_TOKEN],
        [1, UNUSED_TOKEN, UNUSED_TOKEN, UNUSED_TOKEN],
    ]
    assert accepted.tokens.dtype == accepted.num_accepted.dtype == jnp.int32


def test_greedy_judges_only_what_a_row_drafted():
    target = one_hot_logits([[1, 2, 3, 4]] * 3)
    drafts = jnp.asarray([[1, 2, 3]] * 3)
    accepted = accept_greedy(target, drafts, jnp.asarray([0, 1, 2]))
    assert accepted.num_accepted.tolist() == [0, 1, 2]
    assert [row[count] for row, count in zip(accepted.tokens.tolist(), (0, 1, 2), strict=True)] == [
        1,
        2,
        3,
    ]


def test_depth_zero_and_padded_positions_work():
    target = one_hot_logits([[5, 0], [6, 0]])
    nothing = jnp.zeros((2, 0), jnp.int32)
    accepted = accept_greedy(target, nothing, jnp.zeros(2, jnp.int32))
    assert accepted.tokens.tolist() == [[5], [6]]
    sampled = accept_sampled(
        target * 100,
        nothing,
        jnp.zeros((2, 0, 8)),
        jnp.zeros(2, jnp.int32),
        row_keys(0, jnp.arange(2)),
        jnp.asarray([3, 4]),
        *SamplingConfig(temperature=1.0).scalars(),
    )
    assert sampled.tokens.tolist() == [[5], [6]]
    assert sampled.num_accepted.tolist() == [0, 0]


def markov_logits(seed, scale):
    """Next-token logits given the last token, [vocab, vocab]: a model small enough to enumerate."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)) * scale, jnp.float32)


@functools.partial(jax.jit, static_argnames=("depth",))
def speculate(target, draft, last, num_drafted, requests, position, scalars, *, depth):
    """One iteration of every row: draft `depth` tokens from Markov logits, then accept."""
    keys = row_keys(11, requests)
    drafted, probs = [], []
    token = last
    for step in range(depth):
        q = filtered_probs(draft[token], *scalars)
        token = sample(q, stream_keys(keys, position + step, DRAFT_STREAM))
        drafted.append(token)
        probs.append(q)
    draft_tokens = jnp.stack(drafted, axis=1)
    inputs = jnp.concatenate([last[:, None], draft_tokens], axis=1)
    return accept_sampled(
        target[inputs],
        draft_tokens,
        jnp.stack(probs, axis=1),
        num_drafted,
        keys,
        position,
        *scalars,
    )


def next_three_tokens(target, draft, scalars, num_drafted):
    """Run iterations until every sample has three tokens: int [NUM_SAMPLES, 3]."""
    requests = jnp.arange(NUM_SAMPLES)
    last = jnp.zeros(NUM_SAMPLES, jnp.int32)
    position = jnp.full(NUM_SAMPLES, 7, jnp.int32)
    output = np.zeros((NUM_SAMPLES, 3 + DEPTH + 1), np.int64)
    have = np.zeros(NUM_SAMPLES, np.int64)
    while have.min() < 3:
        accepted = speculate(
            target, draft, last, num_drafted, requests, position, scalars, depth=DEPTH
        )
        tokens, counts = np.asarray(accepted.tokens), np.asarray(accepted.num_accepted) + 1
        for offset in range(DEPTH + 1):
            rows = (offset < counts) & (have + offset < output.shape[1])
            output[rows, have[rows] + offset] = tokens[rows, offset]
        have = np.minimum(have + counts, output.shape[1])
        last = jnp.asarray(tokens[np.arange(NUM_SAMPLES), counts - 1])
        position = position + jnp.asarray(counts, jnp.int32)
    return output[:, :3]


def exact_joint(target, scalars):
    """The target's own distribution of three tokens after token 0: float64 [vocab] * 3."""
    step = np.asarray(filtered_probs(target, *scalars), np.float64)
    step /= step.sum(axis=1, keepdims=True)
    joint = np.zeros((VOCAB,) * 3)
    for a, b, c in itertools.product(range(VOCAB), repeat=3):
        joint[a, b, c] = step[0, a] * step[a, b] * step[b, c]
    return joint


def chi_square_p(samples, expected):
    """p-value of the samples' counts under `expected`; impossible outcomes must not occur.
    Outcomes expected fewer than 5 times are counted together, as the test's theory asks."""
    counts = np.zeros(expected.shape)
    np.add.at(counts, tuple(samples.T), 1)
    if counts[expected == 0].sum() > 0:
        return 0.0
    counts, means = counts[expected > 0], expected[expected > 0] * len(samples)
    rare = means < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        means = np.append(means[~rare], means[rare].sum())
    return scipy_stats.chisquare(counts, means).pvalue if len(counts) > 1 else 1.0


def p_values(target, draft, scalars, num_drafted):
    """First token, first two jointly, first three jointly."""
    samples = next_three_tokens(target, draft, scalars, num_drafted)
    joint = exact_joint(target, scalars)
    return (
        chi_square_p(samples[:, :1], joint.sum(axis=(1, 2))),
        chi_square_p(samples[:, :2], joint.sum(axis=2)),
        chi_square_p(samples, joint),
    )


CASES = {
    "unfiltered": {"temperature": 1.0},
    "hot": {"temperature": 1.7},
    "top_k": {"temperature": 0.9, "top_k": 3},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "top_k and top_p": {"temperature": 1.0, "top_k": 4, "top_p": 0.7},
}


@pytest.mark.parametrize("case", CASES)
def test_speculative_samples_have_the_targets_distribution(case):
    """The draft is another model altogether, so that it is often wrong."""
    target, draft = markov_logits(0, 1.0), markov_logits(1, 1.5)
    scalars = SamplingConfig(**CASES[case]).scalars()
    num_drafted = jnp.asarray(np.arange(NUM_SAMPLES) % (DEPTH + 1), jnp.int32)
    assert min(p_values(target, draft, scalars, num_drafted)) > SIGNIFICANCE


def test_a_good_draft_is_accepted_more_often_than_a_bad_one():
    target = markov_logits(0, 1.0)
    scalars = SamplingConfig(temperature=1.0).scalars()
    full = jnp.full(NUM_SAMPLES, DEPTH, jnp.int32)

    def mean_accepted(draft):
        accepted = speculate(
            target,
            draft,
            jnp.zeros(NUM_SAMPLES, jnp.int32),
            full,
            jnp.arange(NUM_SAMPLES),
            jnp.zeros(NUM_SAMPLES, jnp.int32),
            scalars,
            depth=DEPTH,
        )
        return float(accepted.num_accepted.mean())

    assert mean_accepted(target) == DEPTH
    near = target + 0.2 * markov_logits(2, 1.0)
    assert mean_accepted(near) > 2 * mean_accepted(-target)


def always_pass_if_likely(p, q, tokens, uniforms):
    """Broken on purpose: accepts whatever the target finds fairly likely."""
    p_token = jnp.take_along_axis(p, tokens[..., None], axis=-1)[..., 0]
    return p_token > 0.15


def ignore_the_draft(p, q):
    """Broken on purpose: after a refusal draws from p, not from max(p - q, 0)."""
    return p


@pytest.mark.parametrize(
    ("part", "broken"),
    [("_passes", always_pass_if_likely), ("residual_probs", ignore_the_draft)],
)
def test_a_broken_sampler_fails_the_distribution_test(monkeypatch, part, broken):
    """Shows that the test above has the power to notice."""
    monkeypatch.setattr(acceptance, part, broken)
    speculate.clear_cache()
    target, draft = markov_logits(0, 1.0), markov_logits(1, 1.5)
    scalars = SamplingConfig(temperature=1.0).scalars()
    values = p_values(target, draft, scalars, jnp.full(NUM_SAMPLES, DEPTH, jnp.int32))
    speculate.clear_cache()
    assert max(values) < SIGNIFICANCE


def test_the_residual_is_normalised_and_falls_back_to_p():
    p = jnp.asarray([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.6, 0.4, 0.0]])
    q = jnp.asarray([[0.2, 0.6, 0.2], [0.5, 0.3, 0.2], [0.6, 0.4 - 1e-7, 1e-7]])
    residual = np.asarray(residual_probs(p, q))
    np.testing.assert_allclose(residual[0], [1, 0, 0])
    np.testing.assert_allclose(residual[1], [0.5, 0.3, 0.2])
    assert np.isfinite(residual).all()
    np.testing.assert_allclose(residual.sum(axis=1), 1, rtol=1e-6)


def test_rows_do_not_depend_on_their_neighbours():
    target, draft = markov_logits(0, 1.0), markov_logits(1, 1.0)
    scalars = SamplingConfig(temperature=1.0).scalars()

    def run(rows):
        rows = jnp.asarray(rows)
        result = speculate(
            target, draft, rows % VOCAB, rows % (DEPTH + 1), rows, rows + 3, scalars, depth=DEPTH
        )
        return np.asarray(result.tokens)

    together = run(np.arange(12))
    for row in (0, 5, 11):
        np.testing.assert_array_equal(run([row])[0], together[row])
