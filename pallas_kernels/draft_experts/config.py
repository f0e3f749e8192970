"""Block shapes of the draft experts' kernels."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftExpertsConfig:
    """Work of one program of each kernel; `words` are int32 words of 8 weights."""

    gate_up_rows: int = 64
    gate_up_words: int = 256
    gate_up_chunk_words: int = 128
    gate_up_ahead: int = 4
    gate_up_warps: int = 8
    down_rows: int = 16
    down_chunks: int = 64
    down_chunk_words: int = 16
    down_ahead: int = 2
    down_warps: int = 8
    eviction_policy: str | None = None
    early_launch: bool = False
