"""Pairs of predicted and measured time per token, for cells that were both.

Predictions are the "planner" rows of `scripts/bench/validate_planner.py`, or what `specter plan
MODEL --json` prints, kept as a file beside the measurements, or a cell's own `predicted_tpot_ms`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from specter_jax.report import TRUE_SIZE
from specter_jax.report.result_records import system_name
from specter_jax.report.sources import origin
from specter_jax.report.style import grouped
from specter_jax.systems import SYSTEMS

Cell = Mapping[str, Any]
Key = tuple[str, int, str, str, str]

RUN = ("model", "budget_gib", "expert_format", "policy", "dataset")
"""What a row has in common with the measured cell it is for: plain decoding stands in another's."""


def is_prediction(content: Mapping[str, Any]) -> bool:
    """Whether a file is the planner's and not a measurement."""
    return content.get("kind") == "predicted"


def prediction_records(files: Sequence[Cell], cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """One record for every measured cell of batch 1 that a prediction exists for.

    files: contents of files, of which those with predictions count. cells: of `h200.py`.
    """
    rows = [row for file in files for row in file.get("planner") or []]
    cells = list(cells)
    if rows:
        runs = grouped(cells, *RUN)
        return [
            _record(
                row,
                row["predicted_tpot_ms"],
                row["measured_tpot_ms"],
                runs.get(tuple(row.get(name) for name in RUN), []),
            )
            for row in rows
        ]
    predicted = {}
    for plan in filter(is_prediction, files):
        model = PurePath(str(plan["model"])).name
        for cell in plan["cells"]:
            key = _key(model, cell["gpu_memory_bytes"], plan, cell["depth"], plan["policy"])
            predicted[key] = cell["predicted_tpot_ms"]
    records = []
    for cell in cells:
        if int(cell.get("batch") or 1) != 1 or cell.get("baseline"):
            continue
        guess = cell.get("predicted_tpot_ms", predicted.get(_key_of(cell)))
        measured = cell["stats"].get("tpot_ms")
        if guess is not None and measured is not None:
            records.append(_record(cell, float(guess), float(measured), [cell]))
    return records


def _record(
    cell: Cell, predicted: float, measured: float, measurements: Sequence[Cell]
) -> dict[str, Any]:
    """measurements: entries that the measured time may be from, for its source."""
    budget = cell.get("budget_gib")
    return {
        "model": str(cell.get("model", "?")),
        "setting": TRUE_SIZE,
        "budget": "all on the GPU" if budget is None else f"{budget:g} GiB",
        "expert_format": cell.get("expert_format"),
        "system": system_name(cell),
        "depth": cell.get("depth"),
        "dataset": str(cell.get("dataset") or "mixed"),
        "predicted_tpot_ms": predicted,
        "measured_tpot_ms": measured,
        "sources": origin(*measurements),
    }


def _key_of(cell: Cell) -> Key:
    system = SYSTEMS.get(str(cell.get("system")))
    policy = cell.get("policy") or (system.policy if system else None)
    budget = cell.get("budget_gib")
    size = None if budget is None else budget * 2**30
    return _key(str(cell.get("model")), size, cell, cell.get("depth"), policy)


def _key(model: str, size: float | None, source: Cell, depth: Any, policy: Any) -> Key:
    """Model, budget in MiB, format of the experts, depth and policy."""
    budget = -1 if size is None else round(size / 2**20)
    return model, budget, str(source.get("expert_format")), str(depth), str(policy)
