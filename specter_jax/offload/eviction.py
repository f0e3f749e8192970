"""Eviction order of the expert cache: the interface every order implements, and LRU.

Layers are swept cyclically, one sweep per verification. An expert's next use comes at the
earliest when its layer comes up again. `lookahead.LookaheadEviction` makes use of that; LRU, the
baseline, evicts in a cyclic sweep exactly what the next sweep needs first.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class EvictionPolicy(Protocol):
    """State of an eviction order over M layers of E experts: the engine reports, the cache asks.

    One iteration: `begin_iteration`, any number of `update_prediction` while the draft runs, then
    per layer in order placements and `observe_layer`, then `end_iteration`. "Layer" is the MoE
    index. Routing arrays are int [M, B, T, k]: sequences, tokens in order, choices; ids equal to E
    belong to masked tokens.
    """

    ranks_absent: bool
    """Whether `retention` of an expert that is not resident can be compared with a resident's."""
    per_layer: bool
    """Whether each layer has its own equal share of the slots, see `cache.ExpertCache`."""

    def begin_iteration(
        self,
        predicted: np.ndarray | None = None,
        *,
        coverage: float = 1.0,
        routing: np.ndarray | None = None,
    ) -> None:
        """A new sweep is coming; the arguments are those of `update_prediction`.

        Without `predicted` nothing is known of the sweep yet (coverage 0).
        """
        ...

    def update_prediction(
        self,
        predicted: np.ndarray,
        *,
        coverage: float = 1.0,
        routing: np.ndarray | None = None,
    ) -> None:
        """What the draft predicts for the coming sweep, as far as it has got.

        Args:
            predicted: bool [M, E].
            coverage: share of the sweep's tokens that the prediction speaks for, 0 to 1.
            routing: the draft's choices behind it, all tokens of this iteration so far, or None.
        """
        ...

    def observe_layer(self, layer: int, used: np.ndarray) -> None:
        """The sweep uses these experts (int ids, repeats allowed) in this layer."""
        ...

    def end_iteration(
        self, committed: np.ndarray | None = None, *, routing: np.ndarray | None = None
    ) -> None:
        """The sweep is over.

        Args:
            committed: int [B], how many of the sweep's tokens each sequence kept, or None.
            routing: the target's choices for the sweep's tokens, or None: then the draft's, given
                to `update_prediction`, stand in for them.
        """
        ...

    def loaded(self, layer: int, expert: int) -> None:
        """The expert was given a slot."""
        ...

    def retention(self, next_layer: int) -> np.ndarray:
        """float [M, E], lowest is evicted first; layers below `next_layer` have been executed."""
        ...


class LruEviction:
    """Least recently used: an expert is worth the time of its last use or placement."""

    ranks_absent = False
    per_layer = False

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._last = np.zeros((num_layers, num_experts))
        self._clock = 0.0

    def begin_iteration(
        self,
        predicted: np.ndarray | None = None,
        *,
        coverage: float = 1.0,
        routing: np.ndarray | None = None,
    ) -> None:
        """Nothing to do: recency does not look ahead."""

    def update_prediction(
        self,
        predicted: np.ndarray,
        *,
        coverage: float = 1.0,
        routing: np.ndarray | None = None,
    ) -> None:
        """Nothing to do."""

    def observe_layer(self, layer: int, used: np.ndarray) -> None:
        """The experts used become the most recent, in the order given."""
        used = np.asarray(used, np.int64)
        self._last[layer, used] = self._clock + 1 + np.arange(len(used))
        self._clock += len(used)

    def end_iteration(
        self, committed: np.ndarray | None = None, *, routing: np.ndarray | None = None
    ) -> None:
        """Nothing to do."""

    def loaded(self, layer: int, expert: int) -> None:
        """A placed expert is the most recent."""
        self._clock += 1
        self._last[layer, expert] = self._clock

    def retention(self, next_layer: int) -> np.ndarray:
        """float [M, E]: time of the last use or placement, counted in uses and placements."""
        return self._last


class LayerLruEviction(LruEviction):
    """Least recently used within each layer, which keeps an equal share of the slots."""

    per_layer = True
