"""The Expert Lookahead Buffer against collections.Counter."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specter_jax.errors import InvalidRequestError
from specter_jax.offload import ExpertLookaheadBuffer

M, E, K = 3, 6, 2

CHUNKS = st.lists(
    st.integers(0, 4).flatmap(
        lambda tokens: arrays(np.int32, (M, tokens, K), elements=st.integers(0, E))
    ),
    max_size=5,
)


@settings(max_examples=100, deadline=None)
@given(chunks=CHUNKS)
def test_buffer_agrees_with_a_counter(chunks):
    buffer, counter, before = ExpertLookaheadBuffer(M, E), Counter(), set()
    for chunk in chunks:
        buffer.add(chunk)
        for layer, tokens in enumerate(chunk.reshape(M, -1).tolist()):
            counter.update((layer, e) for e in tokens if e != E)
        snapshot = buffer.snapshot()
        assert {tuple(k): n for k, n in np.ndenumerate(snapshot.counts) if n} == counter
        now = {tuple(key) for key in np.argwhere(snapshot.predicted).tolist()}
        assert now == set(counter)
        assert {tuple(key) for key in np.argwhere(snapshot.new).tolist()} == now - before
        before = now
    buffer.reset()
    assert not buffer.predicted.any()
    assert not buffer.counts.any()


def test_snapshot_is_frozen():
    buffer = ExpertLookaheadBuffer(M, E)
    buffer.add(np.zeros((M, 1, K), np.int32))
    snapshot = buffer.snapshot()
    buffer.add(np.ones((M, 1, K), np.int32))
    assert snapshot.counts[0].tolist() == [2, 0, 0, 0, 0, 0]
    assert snapshot.num_tokens == 1
    assert buffer.snapshot().new[0].tolist() == [False, True, False, False, False, False]


def test_what_was_new_before_a_reset_is_new_again():
    buffer = ExpertLookaheadBuffer(M, E)
    for _ in range(2):
        buffer.add(np.zeros((M, 1, K), np.int32))
        assert buffer.snapshot().new[:, 0].all()
        buffer.reset()


def test_masked_tokens_are_not_counted():
    buffer = ExpertLookaheadBuffer(M, E)
    buffer.add(np.full((M, 3, K), E, np.int32))
    snapshot = buffer.snapshot()
    assert not snapshot.predicted.any()
    assert snapshot.num_tokens == 0


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (np.zeros((M + 1, 1, K), np.int32), "3 layers"),
        (np.full((M, 1, K), E + 1), "expected 0 to 6"),
        (np.full((M, 1, K), -1), "from -1"),
    ],
)
def test_ids_out_of_range_are_refused(experts, message):
    with pytest.raises(InvalidRequestError, match=message):
        ExpertLookaheadBuffer(M, E).add(experts)
