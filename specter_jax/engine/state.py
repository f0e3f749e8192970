"""The decoding state of one batch: pure data, advanced by the phases."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from specter_jax.engine.program_types import DraftChunk, DraftStart, Draws, Verified


@dataclasses.dataclass
class Begun:
    """A draft whose first chunk has been dispatched.

    start: where it begins; count: steps of that chunk; probs: as in `Programs.draft`; verified: the
    verification of its first `depth` tokens, if that was dispatched too.
    """

    start: DraftStart
    chunk: DraftChunk
    count: int
    probs: Any
    verified: Verified | None = None
    depth: int = 0


@dataclasses.dataclass
class DecodeState:
    """B sequences on their way.

    kv: the KV pytree, shared by draft and target, valid below `lengths`;
    lengths: int32 [B], KV entries per sequence (prompt and output but for the last token);
    last: int32 [B], the last committed token, whose KV entry is still to be written;
    active: bool [B], sequences that go on; draws: sampling arguments, None for greedy;
    begun: the next draft, if it was dispatched behind the verification.
    """

    kv: tuple[Any, ...]
    lengths: np.ndarray
    last: np.ndarray
    active: np.ndarray
    draws: Draws | None
    begun: Begun | None = None

    @property
    def batch(self) -> int:
        return len(self.lengths)

    def commit(self, tokens: np.ndarray, num_new: np.ndarray) -> None:
        """Takes in a verification's outcome: `tokens` int32 [B, T], of which num_new [B] count."""
        rows = np.flatnonzero(self.active)
        self.lengths = self.lengths.copy()
        self.last = self.last.copy()
        self.lengths[rows] += num_new[rows]
        self.last[rows] = tokens[rows, num_new[rows] - 1]
