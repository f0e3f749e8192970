"""Block shapes of the draft experts' kernels: fields, defaults for a shape, what is supported."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pallas_kernels.tuning import tuned_fields

TUNED_FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftExpertsConfig:
    """Work of one program of each kernel; `words` are int32 words of 8 weights.

    gate_up_rows: inner positions, a power of two times 16. gate_up_words: widest piece of a row
    decoded at once, a power of two. gate_up_chunk_words: neighbouring words of a row that a warp
    reads together; divides a row. gate_up_ahead: pieces read before the first is decoded.
    down_rows: outputs, a multiple of 8. down_chunk_words: as above; divides a row.
    down_chunks: most chunks decoded at once, a power of two. down_ahead: such pieces read ahead.
    early_launch: let the next kernel be launched while this one runs (compute capability 9 on).
    """

    gate_up_rows: int = 16
    gate_up_words: int = 128
    gate_up_chunk_words: int = 32
    gate_up_ahead: int = 0
    gate_up_warps: int = 4
    down_rows: int = 8
    down_chunks: int = 64
    down_chunk_words: int = 16
    down_ahead: int = 2
    down_warps: int = 8
    eviction_policy: str | None = None
    early_launch: bool = False


def unsupported_reason(hidden: int, inner: int, hidden_group: int, inner_group: int) -> str | None:
    """Why the kernels cannot run these sizes, or None. Groups are inputs per weight scale."""
    for name, value in (
        ("hidden size", hidden),
        ("expert inner size", inner),
        ("scale group of gate and up", hidden_group),
        ("scale group of down", inner_group),
    ):
        if value % 32:
            return f"{name} must be a multiple of 32, got {value}"
    return None


def config_for(hidden: int, inner: int, device_kind: str) -> DraftExpertsConfig:
    """Tuned config of a shape on a device, or one that is sure to fit the shape."""
    hidden_words, inner_words = hidden // 8, inner // 8
    default = {
        "gate_up_chunk_words": min(32, _power_of_two_in(hidden_words)),
        "down_chunk_words": min(16, _power_of_two_in(inner_words)),
    }
    tuned = tuned_fields(TUNED_FOLDER, device_kind, hidden=hidden, inner=inner)
    return DraftExpertsConfig(**{**default, **tuned})


def _power_of_two_in(value: int) -> int:
    """Largest power of two that divides value."""
    return value & -value
