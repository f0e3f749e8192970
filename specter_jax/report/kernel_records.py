"""Records of figures 11 and 12 from kernels that were timed alone on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from specter_jax.report import TRUE_SIZE
from specter_jax.report.measure_experts import EXPERT_WISE, FUSED_INT4, TOKEN_WISE
from specter_jax.report.sources import origin

Record = dict[str, Any]

KERNELS = {
    "ffn": EXPERT_WISE,
    "ffn nested": f"{EXPERT_WISE}, nested weights",
    "ffn token-wise": TOKEN_WISE,
    "ffn ragged_dot": "ragged_dot",
}
DRAFT_KERNELS = {"draft": FUSED_INT4}
MODELS = {"qwen1.5-moe": "qwen1.5-moe-a2.7b"}
"""What other figures call the model of a kernel's shapes, where the names differ."""


def verification_records(rows: Iterable[Mapping[str, Any]]) -> Iterable[Record]:
    """Rows that say in which order they went through one layer's experts."""
    for row in rows:
        order = KERNELS.get(row.get("kernel"))
        if order is not None and "us" in row and row.get("num_rows"):
            yield {
                "model": _model(row),
                "setting": TRUE_SIZE,
                "order": order,
                "positions": int(row["num_rows"]),
                "layer_ms": row["us"] / 1e3,
                "sources": origin(row),
            }


def draft_records(rows: Iterable[Mapping[str, Any]]) -> Iterable[Record]:
    """Rows that say which format of the draft's experts they timed, as whole steps or as layers."""
    for row in rows:
        variant = row.get("format") or DRAFT_KERNELS.get(row.get("kernel"))
        milliseconds = row["us"] / 1e3 if "us" in row else row.get("ms", row.get("tpot_ms"))
        if variant is None or milliseconds is None:
            continue
        batch = int(row.get("num_rows") or row.get("batch") or 1)
        yield {
            "model": _model(row),
            "setting": TRUE_SIZE,
            "format": variant,
            "batch": batch,
            "scope": row.get("scope", "one MoE layer" if "kernel" in row else "draft step"),
            "tpot_ms": milliseconds,
            "tokens_per_s": batch / milliseconds * 1e3,
            "sources": origin(row),
        }


def _model(row: Mapping[str, Any]) -> str:
    name = str(row.get("shape") or row.get("model"))
    return MODELS.get(name, name)
