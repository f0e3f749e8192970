"""The timeline file: structure that Perfetto relies on."""

import json

import pytest

from specter_jax.trace import TRACKS, NullTrace, Trace


class Clock:
    """Nanoseconds; each reading is 1 us later than the one before."""

    def __init__(self):
        self.now = 5_000

    def __call__(self):
        self.now += 1_000
        return self.now


@pytest.fixture
def written(tmp_path):
    """Events of a trace in which every kind was recorded, read back from the file."""
    trace = Trace(clock_ns=Clock())
    with trace.span("verification", "verify", depth=4):
        transfer = trace.async_span("transfers", "expert", layer=2, expert=7)
        with trace.span("verification", "layer 0"):
            pass
        other = trace.async_span("transfers", "expert", layer=2, expert=9)
        transfer.end(bytes=10)
    other.end()
    other.end()
    trace.instant("host", "eos")
    trace.counter("in flight", experts=3)
    with trace.span("extra track", "work"):
        pass
    trace.write(tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_tracks_are_named_threads_of_one_process(written):
    names = {
        event["tid"]: event["args"]["name"] for event in written if event["name"] == "thread_name"
    }
    assert set(names.values()) == {*TRACKS, "extra track"}
    assert len(names) == len(TRACKS) + 1
    assert {event["pid"] for event in written} == {1}
    used = {event["tid"] for event in written if event["ph"] in "Xbei"}
    assert used <= set(names)


def test_spans_have_begin_and_duration_and_nest(written):
    spans = {event["name"]: event for event in written if event["ph"] == "X"}
    outer, inner = spans["verify"], spans["layer 0"]
    assert outer["args"] == {"depth": 4}
    assert outer["tid"] == inner["tid"]
    assert outer["ts"] < inner["ts"]
    assert inner["ts"] + inner["dur"] < outer["ts"] + outer["dur"]
    assert all(span["dur"] > 0 for span in spans.values())


def test_transfers_in_flight_are_pairs_with_their_own_ids(written):
    begins = [event for event in written if event["ph"] == "b"]
    ends = [event for event in written if event["ph"] == "e"]
    assert len(begins) == len(ends) == 2
    assert len({event["id"] for event in begins}) == 2
    for begin in begins:
        (end,) = [event for event in ends if event["id"] == begin["id"]]
        assert end["ts"] > begin["ts"]
        assert (end["cat"], end["name"], end["tid"]) == (begin["cat"], begin["name"], begin["tid"])


def test_events_are_ordered_by_time(written):
    times = [event["ts"] for event in written if event["ph"] != "M"]
    assert times == sorted(times)
    assert times[0] >= 0


def test_a_span_is_recorded_when_its_work_fails():
    trace = Trace(clock_ns=Clock())
    with pytest.raises(RuntimeError), trace.span("host", "doomed"):
        raise RuntimeError
    assert [e["name"] for e in trace.to_dict()["traceEvents"] if e["ph"] == "X"] == ["doomed"]


def test_the_null_trace_has_the_same_interface_and_records_nothing():
    trace, null = Trace(), NullTrace()
    public = {name for name in dir(Trace) if not name.startswith("_")} - {"write", "to_dict"}
    assert public == {name for name in dir(NullTrace) if not name.startswith("_")}
    assert trace.enabled
    assert not null.enabled
    with null.span("host", "x", a=1):
        null.async_span("transfers", "y").end(b=2)
        null.instant("host", "z")
        null.counter("n", value=1)
