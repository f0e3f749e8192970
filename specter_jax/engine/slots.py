"""The slot pool: the device buffer behind the expert cache, and the transfers that fill it.

An expert travels in two steps. `issue` starts its copy from pinned host memory into a staging
array. `commit` enqueues the write of a staged array into its slot; the device orders that write
after the copy's arrival and before any computation enqueued later, so the host need not wait.
Transfers must be issued before the computation they are to overlap is dispatched: JAX allocates
a transfer's destination on the compute stream's timeline.
"""

from __future__ import annotations

import bisect
import collections
import functools
import time
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specter_jax.engine.store import ExpertStore, device_sharding, host_sharding
from specter_jax.offload import EvictionPolicy, ExpertCache
from specter_jax.trace import AsyncSpan, NullTrace

Key = tuple[int, int]
"""(MoE layer, expert)."""

COMMIT_SIZES = (1, 2, 4, 8, 16, 32)
"""Experts that one program writes into slots; groups in between are padded. A dispatch costs the
host 0.3 to 0.5 ms on a GPU, whatever it writes."""

_LOAD_SIZE = 8
"""Experts brought in one turn by `load`: the first are written while the last are on their way."""


@functools.lru_cache(maxsize=8)
def _commit_program(device: jax.Device):
    """`(slots [N, P], slot_ids int32 [n], experts n x [P]) -> (slots, done)`, slots donated."""

    def commit(slots, slot_ids, experts):
        for i, expert in enumerate(experts):
            slots = jax.lax.dynamic_update_slice(slots, expert[None], (slot_ids[i], 0))
        return slots, slot_ids[0]

    shardings = (device_sharding(device), host_sharding(device))
    return jax.jit(commit, donate_argnums=0, out_shardings=shardings)


class SlotPool:
    """Slots on the device, their table, and the experts on their way to them.

    Attributes:
        slots: [num_slots, P], the store's dtype and elements of an expert.
        cache: bookkeeping; `cache.slot_table` is what verification looks slots up in.
        bytes_moved: host-to-device expert bytes since the pool was made.
        load_ms: time one expert's load took when the pool was filled, milliseconds.
    """

    def __init__(
        self,
        *,
        store: ExpertStore,
        device: jax.Device,
        num_slots: int,
        max_in_flight: int,
        eviction: EvictionPolicy,
    ) -> None:
        self.store = store
        self.device = device
        self.max_in_flight = max_in_flight
        self.bytes_moved = 0
        self.load_ms = 0.0
        # Set while the table names owners whose bytes no enqueued write has yet.
        self._placing = False
        self.trace = NullTrace()
        self._sharding = device_sharding(device)
        self._staged: collections.OrderedDict[Key, jax.Array] = collections.OrderedDict()
        self._committing: collections.deque[tuple[jax.Array, list[Key]]] = collections.deque()
        self._flights: dict[Key, AsyncSpan] = {}
        self._commit = _commit_program(device)
        self.slots = self._empty_slots(num_slots)
        self.cache = self._new_cache(num_slots, eviction)

    def _empty_slots(self, num_slots: int) -> jax.Array:
        size = self.store.expert_bytes // self.store.dtype.itemsize
        return jnp.zeros((num_slots, size), self.store.dtype, device=self._sharding)

    def _new_cache(self, num_slots: int, eviction: EvictionPolicy) -> ExpertCache:
        return ExpertCache(
            num_layers=self.store.num_layers,
            num_experts=self.store.num_experts,
            num_slots=num_slots,
            eviction=eviction,
        )

    def table(self) -> np.ndarray:
        """int32 [M, E], a copy of the slot table that a dispatched program may keep.

        A computation reads its NumPy arguments when it runs, which may be after the host has
        placed the next experts.
        """
        return self.cache.slot_table.copy()

    @property
    def num_slots(self) -> int:
        return self.slots.shape[0]

    @property
    def in_flight(self) -> int:
        """Staging buffers that may still be occupied."""
        return len(self._staged) + sum(len(keys) for _, keys in self._committing)

    def free_buffers(self) -> int:
        """Staging buffers free now."""
        self._reap(block=False)
        return max(0, self.max_in_flight - self.in_flight)

    def is_staged(self, layer: int, expert: int) -> bool:
        """Whether the expert is on its way, or arrived but not written to a slot."""
        return (layer, expert) in self._staged

    def staged_keys(self) -> list[Key]:
        """Experts on their way, oldest first."""
        return list(self._staged)

    def staged_mask(self) -> np.ndarray:
        """bool [M, E], the same as a mask."""
        mask = np.zeros(self.cache.slot_table.shape, bool)
        for key in self._staged:
            mask[key] = True
        return mask

    def arrived(self) -> list[Key]:
        """Staged experts whose copies have finished, oldest first.

        Copies of one link finish in the order in which they were started, so a few questions find
        the first that has not: on a GPU each takes 50 us.
        """
        staged = self.staged_keys()
        count = bisect.bisect(staged, False, key=lambda key: not self._staged[key].is_ready())
        for key in staged[:count]:
            self._landed(*key)
        return staged[:count]

    def _landed(self, layer: int, expert: int) -> None:
        """Ends the copy's span in the trace, at the moment the host learns of it."""
        flight = self._flights.pop((layer, expert), None)
        if flight is not None:
            flight.end()

    def reset(self, eviction: EvictionPolicy) -> None:
        """Forgets all residents and in-flight copies; the slots keep their (unreachable) data."""
        self.drop(self.staged_keys())
        self.cache = self._new_cache(self.num_slots, eviction)

    def issue(self, keys: Sequence[Key], *, urgent: bool = False) -> int:
        """Starts copies of `keys`, in order, as far as staging buffers are free.

        urgent: wait for buffers instead of stopping short.
        Returns how many were started; already staged or resident ones count as started.
        """
        wanted: list[Key] = []
        table = self.cache.slot_table
        free = self.max_in_flight - self.in_flight
        for position, key in enumerate(keys):
            if key in self._staged or table[key] >= 0:
                continue
            while free <= len(wanted):
                if not self._reap(block=urgent, keep=keys):
                    self._start(wanted)
                    return position
                free = self.max_in_flight - self.in_flight
            wanted.append(key)
        self._start(wanted)
        return len(keys)

    def _start(self, keys: Sequence[Key]) -> None:
        if not keys:
            return
        with self.trace.span("transfers", "issue", experts=len(keys)):
            arrays = jax.device_put([self.store.get(*key) for key in keys], self._sharding)
        self._staged.update(zip(keys, arrays, strict=True))
        if self.trace.enabled:
            for layer, expert in keys:
                self._flights[layer, expert] = self.trace.async_span(
                    "transfers", f"layer {layer} expert {expert}"
                )
        self.bytes_moved += len(keys) * self.store.expert_bytes

    def _reap(self, *, block: bool, keep: Sequence[Key] = ()) -> bool:
        """Frees the staging buffers of finished commits; True if any was freed.

        block: wait for one, or give up the newest guess that is not in `keep`.
        """
        freed = False
        while self._committing and self._committing[0][0].is_ready():
            self._finish_commit()
            freed = True
        if not freed and block:
            if not self._committing:
                guesses = [key for key in self._staged if key not in keep]
                self.drop(guesses[-1:])
                return bool(guesses)
            self._committing[0][0].block_until_ready()
            self._finish_commit()
            freed = True
        return freed

    def _finish_commit(self) -> None:
        for key in self._committing.popleft()[1]:
            self._landed(*key)

    def drop(self, keys: Iterable[Key]) -> None:
        """Gives up staged experts."""
        for key in keys:
            if self._staged.pop(key, None) is not None:
                self._landed(*key)

    def commit(self, keys: Sequence[Key], *, next_layer: int) -> None:
        """Enqueues the writes of staged experts `keys` into slots chosen by the eviction policy.

        next_layer: the first MoE layer whose computation has not been enqueued in this sweep;
            earlier layers' experts are not needed again until the next one.
        Raises CacheFullError if every slot is pinned.
        """
        self._placing = True
        placed = self.cache.reserve_keys(keys, next_layer=next_layer)
        slot_ids = [placement.slot for placement in placed]
        # In the order of placement: a slot placed twice keeps the later expert.
        for start in range(0, len(keys), COMMIT_SIZES[-1]):
            part = slice(start, start + COMMIT_SIZES[-1])
            self._commit_some(keys[part], slot_ids[part])
        self._placing = False

    def _commit_some(self, keys: Sequence[Key], slot_ids: list[int]) -> None:
        size = next(n for n in COMMIT_SIZES if n >= len(keys))
        arrays = [self._staged.pop(key) for key in keys]
        # Writing the last one again is harmless and keeps the number of programs small.
        pad = size - len(keys)
        with self.trace.span("commits", "commit", experts=len(keys)):
            done = self.write(slot_ids + slot_ids[-1:] * pad, arrays + arrays[-1:] * pad)
        self._committing.append((done, list(keys)))

    def write(self, slot_ids: Sequence[int], arrays: Sequence[jax.Array]) -> jax.Array:
        """Enqueues the write of experts [P] into slots; as many as COMMIT_SIZES has.

        Returns a host array that is ready when they are written.
        """
        self.slots, done = self._commit(self.slots, np.asarray(slot_ids, np.int32), tuple(arrays))
        return done

    def load(self, keys: Sequence[Key], *, next_layer: int) -> None:
        """Brings `keys` into slots now: issue and commit, in as many turns as staging allows."""
        todo = [key for key in keys if self.cache.slot_table[key] < 0]
        step = max(1, min(_LOAD_SIZE, self.max_in_flight))
        for start in range(0, len(todo), step):
            part = todo[start : start + step]
            self.issue(part, urgent=True)
            self.commit(part, next_layer=next_layer)

    def settle(self) -> None:
        """Ends a generation, also an interrupted one: nothing stays pinned or on its way."""
        self.drop(self.staged_keys())
        while self._reap(block=bool(self._committing)):
            pass
        self.cache.unpin_all()
        if self.slots.is_deleted():
            # Interrupted between donating the buffer and receiving its successor.
            self._placing = True
            self.slots = self._empty_slots(self.num_slots)
        if self._placing:
            self.cache = self._new_cache(self.num_slots, self.cache.eviction)
            self._placing = False

    def fill(self) -> None:
        """Fills free slots with experts, spread evenly over the layers, before the first use."""
        layers, experts = self.cache.slot_table.shape
        order = ((m, e) for e in range(experts) for m in range(layers))
        keys = [key for key in order if self.cache.slot_table[key] < 0][: self.cache.num_free]
        begin = time.perf_counter()
        self.load(keys, next_layer=0)
        jax.block_until_ready(self.slots)
        if keys:
            self.load_ms = (time.perf_counter() - begin) * 1e3 / len(keys)
