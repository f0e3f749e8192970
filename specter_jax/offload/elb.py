"""Expert Lookahead Buffer: what the draft has routed to since the iteration began.

The draft is the target with quantized experts, so the experts it routes a token to are, with
few exceptions, those the target will need when it verifies that token. The buffer counts them
per (layer, expert); at every chunk boundary the orchestrator takes a snapshot and decides from
it what to transfer. "Layer" is the MoE index throughout: dense layers are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specter_jax.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The buffer at a chunk boundary; its arrays are copies that later chunks do not change."""

    predicted: np.ndarray
    """bool [M, E]: drafted tokens of this iteration chose the expert."""
    counts: np.ndarray
    """int32 [M, E]: how many of the drafted tokens chose it."""
    new: np.ndarray
    """bool [M, E]: predicted now but not in the snapshot before."""
    num_tokens: int
    """Token columns counted so far, over all sequences; masked tokens do not count."""


class ExpertLookaheadBuffer:
    """Counts the draft's choices per (layer, expert) over one iteration.

    Args:
        num_layers: M, number of MoE layers.
        num_experts: E, routed experts per layer. Also the id of a masked token's choices.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.num_layers = num_layers
        self.num_experts = num_experts
        self._counts = np.zeros((num_layers, num_experts), np.int32)
        self._seen = np.zeros((num_layers, num_experts), bool)
        self._num_tokens = 0
        # Row l of the histogram is shifted by l * (E + 1); the extra column takes masked tokens.
        self._row_offset = np.arange(num_layers, dtype=np.int64)[:, None] * (num_experts + 1)

    def reset(self) -> None:
        """Forget everything: a new iteration begins."""
        self._counts[:] = 0
        self._seen[:] = False
        self._num_tokens = 0

    def add(self, experts: np.ndarray) -> None:
        """Count the draft's choices for some more tokens.

        Args:
            experts: integer [M, tokens, k] (or [M, ..., k]); ids equal to `num_experts` belong to
                masked tokens and are ignored.

        Raises:
            InvalidRequestError: if the layers differ or an id lies outside 0..num_experts.
        """
        experts = np.asarray(experts)
        if experts.ndim < 2 or experts.shape[0] != self.num_layers:
            raise InvalidRequestError(
                f"got expert ids of shape {experts.shape}, expected "
                f"[{self.num_layers} layers, tokens, top-k]"
            )
        if not experts.size:
            return
        width = self.num_experts + 1
        flat = experts.reshape(self.num_layers, -1)
        low, high = int(flat.min()), int(flat.max())
        if low < 0 or high > self.num_experts:
            raise InvalidRequestError(
                f"got expert ids from {low} to {high}, expected 0 to {self.num_experts} "
                "(the last one for masked tokens)"
            )
        histogram = np.bincount(
            (flat + self._row_offset).ravel(), minlength=self.num_layers * width
        ).reshape(self.num_layers, width)
        self._counts += histogram[:, : self.num_experts].astype(np.int32)
        first_layer = experts[0].reshape(-1, experts.shape[-1])
        self._num_tokens += int((first_layer[:, 0] < self.num_experts).sum())

    @property
    def counts(self) -> np.ndarray:
        """int32 [M, E], read-only view: drafted tokens that chose each expert."""
        view = self._counts.view()
        view.flags.writeable = False
        return view

    @property
    def predicted(self) -> np.ndarray:
        """bool [M, E]: experts that at least one drafted token chose."""
        return self._counts > 0

    def snapshot(self) -> Snapshot:
        """Freeze the state at a chunk boundary and mark what is new since the last one."""
        predicted = self.predicted
        snapshot = Snapshot(
            predicted=predicted,
            counts=self._counts.copy(),
            new=predicted & ~self._seen,
            num_tokens=self._num_tokens,
        )
        self._seen = predicted.copy()
        return snapshot
