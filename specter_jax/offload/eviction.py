"""Eviction order of the expert cache: how much it is worth to keep each expert.

Layers are swept cyclically, one sweep per verification. An expert's next use is at the earliest
when its layer comes up again, so the policies count time in layers.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class EvictionPolicy(Protocol):
    """State of an eviction order over M layers of E experts; the engine reports, the cache asks.

    One iteration: `begin_iteration`, any number of `update_prediction` while the draft runs,
    then per layer in order: placements (`loaded`) and `observe_layer`, then `end_iteration`.
    """

    def begin_iteration(self, predicted: np.ndarray | None = None, coverage: float = 1.0) -> None:
        """A new sweep is coming; `predicted` bool [M, E] is what is known of it, if anything.

        `coverage` is the share of the sweep's tokens that the prediction speaks for, 0 to 1.
        """
        ...

    def update_prediction(self, predicted: np.ndarray, coverage: float = 1.0) -> None:
        """The prediction for the coming sweep grew to `predicted`, bool [M, E]."""
        ...

    def observe_layer(self, layer: int, used: np.ndarray) -> None:
        """The sweep used these experts (int ids, each at least once) in this layer."""
        ...

    def end_iteration(self) -> None:
        """The sweep is over."""
        ...

    def loaded(self, layer: int, expert: int) -> None:
        """The expert was given a slot."""
        ...

    def retention(self, next_layer: int) -> np.ndarray:
        """float [M, E], lowest is evicted first; `next_layer` 0..M has not been executed yet."""
        ...


class LruEviction:
    """Least recently used: an expert's worth is the time of its last use or placement."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._last = np.zeros((num_layers, num_experts))
        self._clock = 0.0

    def begin_iteration(self, predicted: np.ndarray | None = None, coverage: float = 1.0) -> None:
        """Nothing to do: recency does not look ahead."""

    def update_prediction(self, predicted: np.ndarray, coverage: float = 1.0) -> None:
        """Nothing to do."""

    def observe_layer(self, layer: int, used: np.ndarray) -> None:
        """The experts used become the most recent, in the order given."""
        used = np.asarray(used, np.int64)
        self._last[layer, used] = self._clock + 1 + np.arange(len(used))
        self._clock += len(used)

    def end_iteration(self) -> None:
        """Nothing to do."""

    def loaded(self, layer: int, expert: int) -> None:
        """A placed expert is the most recent."""
        self._clock += 1
        self._last[layer, expert] = self._clock

    def retention(self, next_layer: int) -> np.ndarray:
        """float [M, E]: the time of last use, in uses counted from the start."""
        return self._last


class LookaheadEviction:
    """Evict what is expected to be used last."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        shape = (num_layers, num_experts)
        self._layer = np.arange(num_layers, dtype=float)[:, None]
        self._fast = np.full(shape, 0.3)
        self._slow = np.full(shape, 0.3)
        self._used = np.zeros(shape)
        self._predicted = np.zeros(shape, bool)

    def begin_iteration(self, predicted: np.ndarray | None = None, coverage: float = 1.0) -> None:
        """A new sweep is coming."""
        self._used[:] = 0
        self.update_prediction(
            np.zeros(self._used.shape, bool) if predicted is None else predicted, coverage
        )

    def update_prediction(self, predicted: np.ndarray, coverage: float = 1.0) -> None:
        """The prediction for the coming sweep grew."""
        self._predicted = np.asarray(predicted, bool)

    def observe_layer(self, layer: int, used: np.ndarray) -> None:
        """The sweep used these experts in this layer."""
        self._used[layer, used] = 1

    def end_iteration(self) -> None:
        """Learn from the sweep."""
        self._fast += 0.6 * (self._used - self._fast)
        self._slow += 0.04 * (self._used - self._slow)

    def loaded(self, layer: int, expert: int) -> None:
        """Nothing to do."""

    def retention(self, next_layer: int) -> np.ndarray:
        """float [M, E]: minus the expected distance of the next use, in layers."""
        num_layers = len(self._layer)
        rate = np.maximum(0.65 * self._fast + 0.35 * self._slow, 1e-4)
        distance = num_layers * (1 / rate - 1) + num_layers - next_layer + self._layer
        soon = self._predicted & (self._layer >= next_layer)
        return -np.where(soon, self._layer - next_layer, distance)
