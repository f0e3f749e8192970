"""The expert cache's bookkeeping: which expert is in which slot, and who leaves for whom.

One pool of slots serves all layers. An eviction order may ask for equal shares instead
(`per_layer`): the layer furthest beyond its share gives way first. A layer that needs more at once
than its share borrows, and the next layers to load take back what was borrowed.

This module knows no device memory: it decides placements, the engine moves the bytes and passes
`slot_table` to the device functions. "Layer" is the MoE index. Invariants: every resident expert
has exactly one slot, no two share one, resident experts and free slots add up to `num_slots`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pallas_kernels.constants import NOT_RESIDENT
from specter_jax.errors import BudgetError, CacheFullError, InvalidRequestError
from specter_jax.offload.eviction import EvictionPolicy
from specter_jax.offload.plans import prefetch_admission


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The slot given to an expert, and the (layer, expert) that had to leave it, if any."""

    slot: int
    evicted: tuple[int, int] | None


class ExpertCache:
    """Slots and their owners, with the victim chosen by an eviction policy.

    Args:
        num_layers: M, number of MoE layers.
        num_experts: E, routed experts per layer.
        num_slots: size of the pool, at least 1.
        eviction: gives every expert a retention value; the lowest is evicted first.

    Raises:
        BudgetError: if `num_slots` is less than 1.
    """

    def __init__(
        self, *, num_layers: int, num_experts: int, num_slots: int, eviction: EvictionPolicy
    ) -> None:
        if num_slots < 1:
            raise BudgetError(f"got {num_slots} expert slots, expected at least 1")
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.num_slots = num_slots
        self.eviction = eviction
        self._table = np.full((num_layers, num_experts), NOT_RESIDENT, np.int32)
        self._table_view = self._table.view()
        self._table_view.flags.writeable = False
        self._pins = np.zeros((num_layers, num_experts), np.int32)
        # Owner of each slot as a flat id, layer * E + expert; NOT_RESIDENT when free.
        self._owner = np.full(num_slots, NOT_RESIDENT, np.int64)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def slot_table(self) -> np.ndarray:
        """int32 [M, E], read-only view: the expert's slot, or NOT_RESIDENT."""
        return self._table_view

    @property
    def resident(self) -> np.ndarray:
        """bool [M, E]: experts that have a slot (their bytes may still be on the way)."""
        return self._table != NOT_RESIDENT

    def absent(self, layer: int, experts: np.ndarray) -> list[int]:
        """Those of `experts`, int [n], that have no slot, in the order given."""
        return experts[self._table[layer, experts] == NOT_RESIDENT].tolist()

    @property
    def pinned(self) -> np.ndarray:
        """bool [M, E]: experts with at least one pin."""
        return self._pins > 0

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def pin(self, layer: int, experts: Iterable[int] | np.ndarray) -> None:
        """Keep the experts from being evicted. Counted: n pins need n unpins.

        An expert may be pinned before it is resident; the pin then holds once it is placed.
        """
        self._pins[layer] += np.bincount(_ids(experts), minlength=self.num_experts).astype(np.int32)

    def unpin(self, layer: int, experts: Iterable[int] | np.ndarray) -> None:
        """Take one pin off each expert.

        Raises:
            InvalidRequestError: if one of them has no pin; then nothing changes.
        """
        removed = np.bincount(_ids(experts), minlength=self.num_experts)
        if (removed > self._pins[layer]).any():
            expert = int(np.argmax(removed > self._pins[layer]))
            raise InvalidRequestError(
                f"layer {layer} expert {expert} has {self._pins[layer, expert]} pins, "
                f"cannot take {removed[expert]} off"
            )
        self._pins[layer] -= removed.astype(np.int32)

    def unpin_all(self) -> None:
        """Take off every pin."""
        self._pins[:] = 0

    def evictable(self, protect: np.ndarray | None = None) -> int:
        """How many experts can be reserved now without evicting a protected or pinned one.

        Args:
            protect: bool [M, E] or None; experts that should stay as well as the pinned ones.
        """
        kept = self._pins > 0
        if protect is not None:
            kept = kept | protect
        return self.num_free + int(np.count_nonzero(self.resident & ~kept))

    def victim_retention(self, next_layer: int, protect: np.ndarray | None = None) -> np.ndarray:
        """float [V], ascending: retention of the resident experts that may be evicted now.

        Args:
            next_layer: first layer that the current sweep has not executed, 0..M.
            protect: bool [M, E] or None; experts to leave out besides the pinned ones.
        """
        slots = self._victim_slots(protect)
        return np.sort(self.eviction.retention(next_layer).reshape(-1)[self._owner[slots]])

    def admit(
        self,
        loads: list[tuple[int, int]],
        *,
        next_layer: int = 0,
        protect: np.ndarray | None = None,
    ) -> list[tuple[int, int]]:
        """Those of `loads`, from the first on, that are worth a slot ahead of their use.

        With an order that ranks absent experts, a load must be worth more than what it would push
        out (`plans.prefetch_admission`); with one that does not (LRU), room is all it takes.

        Args:
            loads: (layer, expert) pairs in issue order, none resident.
            next_layer: first layer that the current sweep has not executed.
            protect: bool [M, E] or None; experts that must not be pushed out for them.
        """
        if not self.eviction.ranks_absent:
            return list(loads[: self.evictable(protect)])
        return prefetch_admission(
            loads,
            victim_retention=self.victim_retention(next_layer, protect),
            load_retention=self.eviction.retention(next_layer),
            num_free=self.num_free,
        )

    def reserve(self, layer: int, expert: int, *, next_layer: int) -> Placement:
        """Give one absent expert a slot: a free one, else that of the lowest retention unpinned.

        Raises:
            CacheFullError: if no slot is free and every resident expert is pinned.
            InvalidRequestError: if the expert is resident already.
        """
        return self.reserve_many(layer, [expert], next_layer=next_layer)[0]

    def reserve_many(
        self,
        layer: int,
        experts: Iterable[int] | np.ndarray,
        *,
        next_layer: int,
        protect: np.ndarray | None = None,
    ) -> list[Placement]:
        """Give several absent experts of one layer slots; they never evict one another.

        Args:
            layer: MoE index.
            experts: distinct expert ids, none of them resident.
            next_layer: first layer that the current sweep has not executed, 0..M.
            protect: bool [M, E] or None; experts that must stay besides the pinned ones.

        Returns:
            One placement per expert, in the order given.

        Raises:
            CacheFullError: if there are not enough slots; then nothing changes.
            InvalidRequestError: if an expert is resident or named twice; then nothing changes.
        """
        keys = [(layer, expert) for expert in _ids(experts).tolist()]
        return self.reserve_keys(keys, next_layer=next_layer, protect=protect)

    def reserve_keys(
        self,
        keys: Sequence[tuple[int, int]],
        *,
        next_layer: int,
        protect: np.ndarray | None = None,
    ) -> list[Placement]:
        """`reserve_many` for experts of any layers: (layer, expert) pairs, chosen for together.

        One look at the eviction order serves them all, unless each layer has its own share of the
        slots; then layers are served in the order in which they come.
        """
        layers, experts = np.array(keys, np.int64).reshape(-1, 2).T
        if len(set(keys)) != len(keys) or (self._table[layers, experts] != NOT_RESIDENT).any():
            raise InvalidRequestError(f"experts {keys} to place must be distinct and not resident")
        if not self.eviction.per_layer:
            return self._place(keys, next_layer, protect)
        placements = []
        for _, group in itertools.groupby(keys, key=lambda key: key[0]):
            placements += self._place(list(group), next_layer, protect)
        return placements

    def _place(
        self, keys: Sequence[tuple[int, int]], next_layer: int, protect: np.ndarray | None
    ) -> list[Placement]:
        """Free slots first, then those of the victims, lowest retention first."""
        num_victims = max(0, len(keys) - self.num_free)
        layer = keys[0][0] if keys else 0
        victims = self._choose_victims(num_victims, layer, next_layer, protect)
        placements = []
        for key in keys:
            if self._free:
                slot, evicted = self._free.pop(), None
            else:
                slot = int(victims[len(placements) - (len(keys) - num_victims)])
                evicted = divmod(int(self._owner[slot]), self.num_experts)
                self._table[evicted] = NOT_RESIDENT
            self._owner[slot] = key[0] * self.num_experts + key[1]
            self._table[key] = slot
            self.eviction.loaded(*key)
            placements.append(Placement(slot=slot, evicted=evicted))
        return placements

    def release(self, layer: int, expert: int) -> int:
        """Empty the expert's slot, for example after a cancelled transfer.

        Returns:
            The slot that became free.

        Raises:
            InvalidRequestError: if the expert is not resident or is pinned.
        """
        slot = int(self._table[layer, expert])
        if slot == NOT_RESIDENT or self._pins[layer, expert]:
            state = "not resident" if slot == NOT_RESIDENT else "pinned"
            raise InvalidRequestError(
                f"layer {layer} expert {expert} is {state}, cannot release its slot"
            )
        self._table[layer, expert] = NOT_RESIDENT
        self._owner[slot] = NOT_RESIDENT
        self._free.append(slot)
        return slot

    def _victim_slots(self, protect: np.ndarray | None) -> np.ndarray:
        """Slots whose owner may be evicted."""
        kept = self._pins > 0
        if protect is not None:
            kept = kept | protect
        owner = np.maximum(self._owner, 0)  # a free slot's owner is looked up but not used
        return np.flatnonzero((self._owner != NOT_RESIDENT) & ~kept.reshape(-1)[owner])

    def _choose_victims(
        self, count: int, layer: int, next_layer: int, protect: np.ndarray | None
    ) -> np.ndarray:
        """Slots of the `count` evictable experts with the lowest retention, lowest first."""
        if not count:
            return np.empty(0, np.int64)
        slots = self._victim_slots(protect)
        if len(slots) < count:
            raise CacheFullError(
                f"layer {layer} needs {count} more of the {self.num_slots} expert slots but only "
                f"{len(slots)} hold experts that may be evicted: give more expert slots or memory"
            )
        value = self.eviction.retention(next_layer).reshape(-1)[self._owner[slots]]
        if self.eviction.per_layer:
            return self._by_share(count, layer, slots[np.argsort(value, kind="stable")])
        # Equal values leave by slot number, so that a run can be repeated exactly.
        if count == 1:
            return slots[[int(np.argmin(value))]]
        return slots[np.argsort(value, kind="stable")[:count]]

    def _by_share(self, count: int, layer: int, slots: np.ndarray) -> np.ndarray:
        """The `count` of `slots`, lowest retention first, that equal shares give to `layer`.

        Each comes from the layer furthest beyond its share, `layer` itself if it is as far.
        """
        share = np.full(self.num_layers, self.num_slots // self.num_layers)
        share[: self.num_slots % self.num_layers] += 1
        excess = self.resident.sum(1) - share
        excess[layer] += self.num_free
        owners = [slots[self._owner[slots] // self.num_experts == m] for m in range(len(share))]
        left = np.array([len(own) for own in owners])
        taken = np.zeros(self.num_layers, np.int64)
        chosen = []
        for _ in range(count):
            excess[layer] += 1
            candidates = np.flatnonzero(left > taken)
            most = excess[candidates].max()
            giver = layer if layer in candidates and excess[layer] == most else -1
            if giver < 0:
                giver = int(candidates[np.argmax(excess[candidates])])
            chosen.append(owners[giver][taken[giver]])
            taken[giver] += 1
            excess[giver] -= 1
        return np.array(chosen, np.int64)


def _ids(experts: Iterable[int] | np.ndarray) -> np.ndarray:
    """Expert ids as an integer array [n]."""
    return np.asarray(experts if isinstance(experts, np.ndarray) else list(experts), np.int64)
