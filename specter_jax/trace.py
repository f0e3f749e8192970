"""A timeline in Chrome's trace event format, which Perfetto (ui.perfetto.dev) opens.

One process, one thread per track. Spans are complete events ("X"); transfers in flight overlap one
another freely and are asynchronous pairs ("b", "e"). Times are microseconds since the trace began.
Format: "Trace Event Format", Google, section "Event Types".
"""

import contextlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from specter_jax.output import write_text_atomically

TRACKS = ("host", "draft", "transfers", "commits", "verification", "waits")
PROCESS_ID = 1


class AsyncSpan(Protocol):
    """Something in flight; `end` is called once it has arrived."""

    def end(self, **args: Any) -> None:
        """Records the arrival."""


class Tracer(Protocol):
    """What the engine records into: `Trace`, or `NullTrace` when nobody asked for one."""

    @property
    def enabled(self) -> bool:
        """Whether anything is kept: if not, arguments that cost something need not be made."""

    def span(self, track: str, name: str, **args: Any) -> contextlib.AbstractContextManager:
        """What happens inside, as one block of a track."""

    def async_span(self, track: str, name: str, **args: Any) -> AsyncSpan:
        """Begins something that ends elsewhere."""

    def instant(self, track: str, name: str, **args: Any) -> None:
        """A moment on a track."""

    def counter(self, name: str, **values: float) -> None:
        """Values over time."""


class Trace:
    """Collects events in memory; `write` stores them. Event `args` must be JSON-ready."""

    enabled = True

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns):
        self._clock_ns = clock_ns
        self._begin_ns = clock_ns()
        self._events: list[dict[str, Any]] = []
        self._track_ids = {name: number for number, name in enumerate(TRACKS, start=1)}
        self._ids = itertools.count(1)

    @contextlib.contextmanager
    def span(self, track: str, name: str, **args: Any) -> Iterator[None]:
        """Record what happens inside as one block of a track; spans of a track must nest."""
        begin_us = self._now_us()
        try:
            yield
        finally:
            duration = self._now_us() - begin_us
            self._events.append(self._event("X", track, name, ts=begin_us, dur=duration, args=args))

    def async_span(self, track: str, name: str, **args: Any) -> "_AsyncSpan":
        """Begin something that ends elsewhere: keep the result and call its `end`."""
        number = f"0x{next(self._ids):x}"
        self._events.append(
            self._event("b", track, name, ts=self._now_us(), cat=track, id=number, args=args)
        )
        return _AsyncSpan(self, track, name, number)

    def instant(self, track: str, name: str, **args: Any) -> None:
        """Mark a moment on a track."""
        self._events.append(self._event("i", track, name, ts=self._now_us(), s="t", args=args))

    def counter(self, name: str, **values: float) -> None:
        """Draw named values over time, for example transfers in flight."""
        event = {"ph": "C", "name": name, "pid": PROCESS_ID, "ts": self._now_us(), "args": values}
        self._events.append(event)

    def to_dict(self) -> dict[str, Any]:
        """The trace as a JSON object, events ordered by time; of equal begin, longer ones first."""
        events = sorted(self._events, key=lambda event: (event["ts"], -event.get("dur", 0)))
        return {"traceEvents": self._metadata() + events, "displayTimeUnit": "ms"}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file; it appears complete or not at all.

        Raises:
            OSError: the folder does not exist or cannot be written.
        """
        write_text_atomically(path, json.dumps(self.to_dict(), separators=(",", ":")))

    def _now_us(self) -> float:
        return (self._clock_ns() - self._begin_ns) / 1e3

    def _event(self, phase: str, track: str, name: str, **fields: Any) -> dict[str, Any]:
        # A track nobody declared gets the next free number.
        track_id = self._track_ids.setdefault(track, len(self._track_ids) + 1)
        return {"ph": phase, "name": name, "pid": PROCESS_ID, "tid": track_id, **fields}

    def _metadata(self) -> list[dict[str, Any]]:
        def named(kind: str, track_id: int, **args: Any) -> dict[str, Any]:
            return {"ph": "M", "name": kind, "pid": PROCESS_ID, "tid": track_id, "args": args}

        events = [named("process_name", 0, name="specter")]
        for track, number in self._track_ids.items():
            events.append(named("thread_name", number, name=track))
            events.append(named("thread_sort_index", number, sort_index=number))
        return events


class _AsyncSpan:
    def __init__(self, trace: Trace, track: str, name: str, number: str):
        self._trace, self._track, self._name, self._number = trace, track, name, number

    def end(self, **args: Any) -> None:
        """Record the arrival; called a second time it does nothing."""
        if self._number is None:
            return
        trace = self._trace
        trace._events.append(
            trace._event(
                "e",
                self._track,
                self._name,
                ts=trace._now_us(),
                cat=self._track,
                id=self._number,
                args=args,
            )
        )
        self._number = None


class _NullSpan:
    """Context manager and asynchronous span that record nothing."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def end(self, **_: Any) -> None:
        return None


_NULL_SPAN = _NullSpan()


class NullTrace:
    """The same interface, recording nothing."""

    enabled = False

    def span(self, track: str, name: str, **args: Any) -> _NullSpan:
        return _NULL_SPAN

    def async_span(self, track: str, name: str, **args: Any) -> _NullSpan:
        return _NULL_SPAN

    def instant(self, track: str, name: str, **args: Any) -> None:
        return None

    def counter(self, name: str, **values: float) -> None:
        return None
