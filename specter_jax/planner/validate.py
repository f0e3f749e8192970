"""Predicts cells that were measured, to see how far the planner can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from specter_jax.errors import InvalidRequestError
from specter_jax.offload import get_policy
from specter_jax.planner.calibration import Calibration
from specter_jax.planner.model import PlannedModel
from specter_jax.planner.policies import PREDICTABLE
from specter_jax.planner.predict import Comparison, compare
from specter_jax.planner.replay import replay
from specter_jax.planner.timing import Hardware, Timing
from specter_jax.planner.traces import RoutingTrace

MEASURED_KEYS = ("model", "expert_format", "budget_gib", "policy", "depth", "dataset")
"""What tells measured cells apart."""

PLAIN_KEYS = ("model", "expert_format", "budget_gib", "policy", "dataset", "batch", "slots")
"""What plain decoding shares with the cell it was measured beside."""

Key = tuple[str, str]
"""Name of a model and its expert format, as measured cells give them."""


def is_predictable(cell: Mapping[str, Any]) -> bool:
    """Whether a trace tells what the cell's policy does: one sequence, no next-layer guess."""
    one_sequence = int(cell.get("batch") or 1) == 1
    return one_sequence and get_policy(cell["policy"]).name in PREDICTABLE


def with_plain_decoding(cells: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The cells, and one of depth 0 for each that has plain decoding measured beside it."""
    found = []
    for cell in cells:
        found.append(dict(cell))
        time = (cell.get("plain") or {}).get("tpot_ms")
        if time is not None:
            beside = {name: cell[name] for name in PLAIN_KEYS if name in cell}
            size = {"tokens_each": _tokens_each(cell)}
            found.append(beside | size | {"depth": 0, "tpot_ms": time})
    return found


def split_fitted(
    rows: Iterable[Mapping[str, Any]], fitted: Iterable[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Rows that the calibration knows nothing of, and those that it was fitted to.

    fitted: as `calibration.fitted_cells` has them; a row belongs to one whose fields it all has.
    """
    fitted = list(fitted)
    unseen, seen = [], []
    for row in rows:
        known = any(all(row.get(name) == cell[name] for name in cell) for cell in fitted)
        (seen if known else unseen).append(row)
    return unseen, seen


def _tokens_each(cell: Mapping[str, Any]) -> int | None:
    """New tokens of each sequence, if the cell tells."""
    stats = cell.get("stats") or {}
    if stats.get("new_tokens") and stats.get("sequences"):
        return round(stats["new_tokens"] / stats["sequences"])
    return cell.get("tokens_each")


def predict_measured(
    cells: Iterable[Mapping[str, Any]],
    models: Mapping[Key, PlannedModel],
    traces: Mapping[str | Key, RoutingTrace],
    hardware: Hardware,
    calibration: Calibration,
    progress: Callable[[Mapping[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """The predictable ones of measured cells, each with `predicted_tpot_ms` and its parts.

    The parts are times of drafting and of verifying, per iteration.

    Slots and the length of the output are those of the measured run. Equal cells but for their
    dataset are replayed once, where one trace stands for all texts.

    Args:
        cells: with `MEASURED_KEYS`, `slots`, and `tpot_ms` or `stats` that has it.
        models: by name and expert format. traces: by name of the model and dataset, or by the name
            alone for all datasets that have none of their own.
        progress: called with each row that is finished.

    Raises:
        InvalidRequestError: there is no model or no trace for a cell.
    """
    replayed: dict[tuple[Any, ...], dict[str, float | None]] = {}
    rows = []
    for cell in filter(is_predictable, cells):
        key = (cell["model"], cell["expert_format"])
        text: str | Key = (cell["model"], cell.get("dataset") or "")
        text = text if text in traces else cell["model"]
        if key not in models or text not in traces:
            raise InvalidRequestError(f"no model or no trace for {', '.join(key)}")
        same = (*key, text, cell["slots"], cell["policy"], cell["depth"], _tokens_each(cell))
        if same not in replayed:
            replayed[same] = _replay(cell, models[key], traces[text], hardware, calibration)
        measured = cell.get("tpot_ms", (cell.get("stats") or {}).get("tpot_ms"))
        row = {name: cell.get(name) for name in MEASURED_KEYS} | {"slots": cell["slots"]}
        rows.append(row | replayed[same] | {"measured_tpot_ms": measured} | _parts(cell))
        if progress is not None:
            progress(rows[-1])
    return rows


def _parts(cell: Mapping[str, Any]) -> dict[str, float]:
    """What a measured cell tells of an iteration's parts."""
    stats = cell.get("stats") or {}
    turns = stats.get("iterations")
    names = ("draft_ms", "verify_ms")
    return {f"measured_{name}": stats[name] / turns for name in names if turns and name in stats}


def errors(rows: Iterable[Mapping[str, Any]]) -> Comparison:
    """Errors of what `predict_measured` gave; raises InvalidRequestError if there is nothing."""
    rows = list(rows)
    measured = [dict(row) | {"tpot_ms": row["measured_tpot_ms"]} for row in rows]
    return compare(rows, measured, MEASURED_KEYS)


def _replay(
    cell: Mapping[str, Any],
    model: PlannedModel,
    trace: RoutingTrace,
    hardware: Hardware,
    calibration: Calibration,
) -> dict[str, float | None]:
    trace = trace.fitted(model.config)
    tokens = _tokens_each(cell)
    if tokens is not None:
        trace = trace.select(trace.num_prompts, tokens)
    timing = Timing(model=model.read_bytes(), hardware=hardware, calibration=calibration)
    stats = replay(
        model.config,
        trace,
        timing,
        num_slots=int(cell["slots"]),
        max_in_flight=model.max_in_flight,
        depth=cell["depth"],
        policy=cell["policy"],
    )
    turns = max(stats.iterations, 1)
    return {
        "predicted_tpot_ms": stats.tpot_ms,
        "predicted_draft_ms": stats.draft_ms / turns,
        "predicted_verify_ms": stats.verify_ms / turns,
        "predicted_hit_rate": stats.hit_rate,
        "predicted_acceptance_rate": stats.acceptance_rate,
        "predicted_bytes_per_token": stats.bytes_host_to_device / stats.new_tokens,
    }
