"""Length of a draft chunk: few meetings with the host where little is fetched."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specter_jax.engine.pace import Pace, chunk_length


def chunk(loads, *, num_steps=9, in_flight=30, load_ms=0.2, step_ms=1.5):
    return chunk_length(
        num_steps, 2, loads=loads, in_flight=in_flight, load_ms=load_ms, step_ms=step_ms
    )


def test_nothing_to_fetch_is_one_chunk_and_much_is_several():
    assert chunk(0) == 9
    # Steps of 1.5 ms hide less than a chunk more costs.
    assert chunk(300) == 9
    assert chunk(300, step_ms=6.0) == 2
    # Two chunks hide nothing: what the first names starts when the second has run.
    assert chunk(2, step_ms=6.0) == 9


def test_transfers_that_take_long_start_early():
    assert chunk(10, load_ms=0.01, step_ms=6.0) == 9
    assert chunk(10, load_ms=2.0, step_ms=6.0) < 9


@given(
    st.floats(0, 1e4), st.integers(1, 17), st.integers(1, 64), st.floats(0, 10), st.floats(0, 50)
)
def test_a_chunk_is_within_its_bounds(loads, num_steps, in_flight, load_ms, step_ms):
    length = chunk_length(
        num_steps, 2, loads=loads, in_flight=in_flight, load_ms=load_ms, step_ms=step_ms
    )
    assert min(2, num_steps) <= length <= num_steps


def test_pace_starts_short_and_follows_what_it_sees():
    pace = Pace()
    assert pace.chunk(9, 2, in_flight=30, load_ms=0.2) == 2
    pace.observe(loads=200, steps=9, draft_ms=54.0)
    assert pace.step_ms == pytest.approx(6.0)
    assert pace.chunk(9, 2, in_flight=30, load_ms=0.2) == 2
    for _ in range(30):
        pace.observe(loads=0, steps=9, draft_ms=54.0)
    assert pace.chunk(9, 2, in_flight=30, load_ms=0.2) == 9
