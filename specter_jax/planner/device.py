"""A device that only keeps time: host, compute stream and link as three clocks.

It follows the rules that were measured on a GPU: a program runs when the host has dispatched it,
the stream is free and the transfers it takes have arrived; a transfer starts when the link is free
and everything dispatched before it has run, for its destination is allocated on the stream.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from specter_jax.engine.slots import Key, SlotPool
from specter_jax.planner.timing import Timing
from specter_jax.trace import NullTrace


@dataclasses.dataclass(eq=False)
class Moment:
    """When a program or a transfer is finished; stands for the array that it makes."""

    device: Device
    ready: float
    seen: bool = False

    def is_ready(self) -> bool:
        """Asks, which costs the host a poll."""
        self.device.work(self.device.timing.poll)
        return self.ready <= self.device.now

    def block_until_ready(self) -> Moment:
        """Lets the host wait."""
        self.device.now = max(self.device.now, self.ready)
        return self


@dataclasses.dataclass(eq=False)
class HostResult:
    """A program's small result: reading it makes the host wait, and meet the device once."""

    value: np.ndarray
    moment: Moment

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        moment = self.moment.block_until_ready()
        if not moment.seen:
            moment.seen = True
            moment.device.work(moment.device.timing.meeting)
        return np.array(self.value, dtype)


class Device:
    """The clocks; `now` is the host's, in seconds from 0."""

    def __init__(self, timing: Timing) -> None:
        self.timing = timing
        self.now = 0.0
        self._stream = 0.0
        self._link = 0.0

    def clock(self) -> float:
        """The host's time."""
        return self.now

    def work(self, seconds: float) -> None:
        """The host is busy."""
        self.now += seconds

    def dispatch(self, seconds: float, after: Sequence[Moment] = ()) -> Moment:
        """Enqueues a program that takes `seconds` once `after` has happened."""
        self.work(self.timing.dispatch)
        start = max(self.now, self._stream, *(moment.ready for moment in after), 0.0)
        self._stream = start + seconds
        return Moment(self, self._stream)

    def transfer(self, count: int) -> list[Moment]:
        """Enqueues the transfers of `count` experts."""
        allocated, moments = self._stream, []
        for _ in range(count):
            self.work(self.timing.issue)
            # The link is idle, and latency shows, if nothing is on its way at this moment.
            begin = max(self._link, self.now + self.timing.latency, allocated)
            self._link = begin + self.timing.transfer()
            moments.append(Moment(self, self._link))
        return moments


class SpanCosts(NullTrace):
    """Host work that costs no time in a replay, added to some of the engine's spans."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._costs = {
            ("host", "boundary"): device.timing.boundary,
            ("verification", "experts"): device.timing.host_layer,
            # One dispatch and one meeting too, whatever the number of layers.
            ("verification", "stretch"): device.timing.host_layer,
        }

    @contextlib.contextmanager
    def span(self, track: str, name: str, **args: Any) -> Iterator[None]:
        """Takes what the calibration says, before what is done inside."""
        self._device.work(self._costs.get((track, name), 0.0))
        yield


@dataclasses.dataclass(frozen=True)
class Store:
    """An expert store without experts: `get` names them."""

    num_layers: int
    num_experts: int
    expert_bytes: int
    dtype = np.dtype(np.uint8)
    is_nested = False

    def get(self, layer: int, expert: int) -> Key:
        return layer, expert


@dataclasses.dataclass(frozen=True)
class _Slots:
    """Stands for the slot buffer."""

    shape: tuple[int, ...]

    def is_deleted(self) -> bool:
        return False


class TimedPool(SlotPool):
    """The runtime's slot pool, whose transfers and slot writes only take time."""

    def __init__(self, timed: Device, **options: Any) -> None:
        self._timed = timed
        super().__init__(**options)

    def _empty_slots(self, num_slots: int) -> Any:
        return _Slots((num_slots, 1))

    def _start(self, keys: Sequence[Key]) -> None:
        if keys:
            self._staged.update(zip(keys, self._timed.transfer(len(keys)), strict=True))
            self.bytes_moved += len(keys) * self.store.expert_bytes

    def write(self, slot_ids: Sequence[int], arrays: Sequence[Any]) -> Any:
        """Enqueues the write of arrived experts; see `SlotPool.write`."""
        return self._timed.dispatch(self._timed.timing.commit(len(arrays)), arrays)

    def fill(self) -> None:
        """As `SlotPool.fill`, and takes the time of a load from the model."""
        super().fill()
        self.load_ms = self._timed.timing.transfer() * 1e3
