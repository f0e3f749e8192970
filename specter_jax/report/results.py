"""Records of runs on a GPU at true size, read from the JSON of `scripts/bench/`.

Three shapes of file are understood. `h200.py` writes `{"meta", "cells", "prefill", "kernels",
"timelines"}`: a cell is one generation with "model", "budget_gib", "policy" or "system", "depth",
"dataset", "batch", "stats" (`Stats.to_dict`) and whatever else was noted. `kernels.py` writes
`{"device", "rows"}`. `specter plan --json` is a prediction, see `predictions.py`. All keys are
optional: what is absent is not measured, and nothing is filled in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specter_jax.errors import InvalidRequestError
from specter_jax.report import TRUE_SIZE
from specter_jax.report.measure_experts import EXPERT_WISE, FUSED_INT4, TOKEN_WISE
from specter_jax.report.measure_runs import most_used, use_shares
from specter_jax.report.measure_timeline import median_iteration
from specter_jax.report.predictions import is_prediction, prediction_records

Record = dict[str, Any]
Records = dict[str, list[Record]]

AUTO = "auto"
DEFAULT_SYSTEM = "specter"
KERNELS = {"ffn": EXPERT_WISE, "ffn token-wise": TOKEN_WISE, "ffn ragged_dot": "ragged_dot"}
DRAFT_KERNELS = {"draft": FUSED_INT4}


def read_results(directory: str | os.PathLike[str]) -> tuple[list[Record], Records]:
    """What the result files of a directory hold: their `meta` objects, and records by section.

    A cell that stands in several files is taken from the latest by `meta.date`.

    Raises:
        InvalidRequestError: no such directory, or a `.json` file that is no JSON object.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise InvalidRequestError(f"{directory}: no such directory")
    files = [(file.name, _read(file)) for file in sorted(folder.glob("*.json"))]
    plans = [content for _, content in files if is_prediction(content)]
    files = [(name, content) for name, content in files if _is_result(content)]
    files.sort(key=lambda file: str(_meta(*file).get("date", "")))
    metas, records, cells = [], {}, []
    for name, content in files:
        cells += _cells(content)
        metas.append(_meta(name, content))
        for section, found in records_of(content).items():
            kept = {_key(record): record for record in [*records.get(section, []), *found]}
            records[section] = list(kept.values())
    if pairs := prediction_records(plans, cells):
        records["planner"] = pairs
    return metas, records


def records_of(content: Mapping[str, Any]) -> Records:
    """Records of one file by section, those without any left out."""
    cells = _cells(content)
    kernels = [*(content.get("kernels") or []), *(content.get("rows") or [])]
    records = {
        "depth": list(_depth_records(cells)),
        "timeline": list(_timelines(content.get("timelines") or [])),
        "prefill": list(_prefill_records(content.get("prefill") or [])),
        "draft": list(_draft_records(kernels)),
        "verification": list(_verification_records(kernels)),
        "end_to_end": [_end_to_end(cell) for cell in cells if _batch(cell) == 1],
        "batch": list(_batch_records(cells)),
        "hit_rate": list(_hit_rates(cells)),
    }
    return {section: found for section, found in records.items() if found}


def _cells(content: Mapping[str, Any]) -> list[Record]:
    """Cells that were run."""
    return [cell for cell in content.get("cells") or [] if isinstance(cell.get("stats"), dict)]


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequestError(f"{file}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise InvalidRequestError(f"{file}: expected a JSON object")
    return content


def _is_result(content: Mapping[str, Any]) -> bool:
    keys = ("cells", "prefill", "kernels", "rows", "timelines")
    return not is_prediction(content) and any(key in content for key in keys)


def _meta(name: str, content: Mapping[str, Any]) -> Record:
    meta = dict(content.get("meta") or {})
    if "device" in content:
        meta.setdefault("gpu", content["device"])
    if "jax" in content:
        meta.setdefault("versions", {"jax": content["jax"]})
    return {"file": name, **meta}


def _key(record: Mapping[str, Any]) -> str:
    """What a record is of: its fields that are texts or whole numbers."""
    fields = {
        name: value
        for name, value in record.items()
        if isinstance(value, str | int) and not name.endswith("_bytes")
    }
    return json.dumps(fields, sort_keys=True)


def _common(source: Mapping[str, Any]) -> Record:
    budget = source.get("budget_gib")
    shown = source.get("budget") or ("all on the GPU" if budget is None else f"{budget:g} GiB")
    record = {"model": str(source.get("model", "?")), "setting": TRUE_SIZE, "budget": shown}
    return record | (
        {"expert_format": source["expert_format"]} if "expert_format" in source else {}
    )


def _batch(cell: Mapping[str, Any]) -> int:
    return int(cell.get("batch") or 1)


def _system(cell: Mapping[str, Any]) -> str:
    """The system's name, or the policy's where a cell was made for comparing policies."""
    return str(cell.get("system") or cell.get("policy") or DEFAULT_SYSTEM)


def _end_to_end(cell: Mapping[str, Any]) -> Record:
    return {
        **_common(cell),
        "dataset": str(cell.get("dataset") or "mixed"),
        "system": _system(cell),
        "batch": 1,
        "baseline": bool(cell.get("baseline")),
        "tpot_ms": cell["stats"].get("tpot_ms"),
        "stats": cell["stats"],
    }


def _depth_records(cells: Iterable[Mapping[str, Any]]) -> Iterable[Record]:
    """Cells of one model, budget and data set under `lookahead` at two or more depths."""
    groups: dict[str, tuple[Record, list[Mapping[str, Any]]]] = {}
    for cell in cells:
        ours = (cell.get("policy") or "lookahead") == "lookahead" and not cell.get("baseline")
        ours = ours and cell.get("system") in (None, DEFAULT_SYSTEM)
        if not ours or _batch(cell) != 1 or cell["stats"].get("tpot_ms") is None:
            continue
        common = {**_common(cell), "policy": "lookahead", "dataset": str(cell.get("dataset"))}
        groups.setdefault(json.dumps(common), (common, []))[1].append(cell)
    for common, members in groups.values():
        by_depth = {str(cell.get("depth", AUTO)): cell["stats"] for cell in members}
        points = [
            {"depth": int(depth), "tpot_ms": stats["tpot_ms"]}
            for depth, stats in by_depth.items()
            if depth.isdigit()
        ]
        if len(points) < 2:
            continue
        record = {**common, "points": sorted(points, key=lambda point: point["depth"])}
        if AUTO in by_depth:
            stats = by_depth[AUTO]
            record["auto"] = {
                "depth": most_used(stats.get("depths") or {}),
                "tpot_ms": stats["tpot_ms"],
            }
        yield record


def _batch_records(cells: Iterable[Mapping[str, Any]]) -> Iterable[Record]:
    """Cells of a model and system that was run at more than one batch size."""
    groups: dict[str, list[Record]] = {}
    for cell in cells:
        stats = cell["stats"]
        decode_ms, tokens = stats.get("decode_ms"), stats.get("new_tokens")
        if not decode_ms or tokens is None:
            continue
        record = {
            **_common(cell),
            "system": _system(cell),
            "batch": _batch(cell),
            "dataset": str(cell.get("dataset") or "mixed"),
            "tpot_ms": stats.get("tpot_ms"),
            "tokens_per_s": (tokens - stats.get("sequences", _batch(cell))) / decode_ms * 1e3,
        }
        key = json.dumps([record[name] for name in ("model", "budget", "system", "dataset")])
        groups.setdefault(key, []).append(record)
    for members in groups.values():
        if len({record["batch"] for record in members}) > 1:
            yield from members


def _hit_rates(cells: Iterable[Mapping[str, Any]]) -> Iterable[Record]:
    for cell in cells:
        if cell.get("policy") and not cell.get("baseline") and _batch(cell) == 1:
            shares = use_shares(cell["stats"])
            if shares["hit_rate"] is not None:
                yield {
                    **_common(cell),
                    "policy": cell["policy"],
                    "depth": cell.get("depth"),
                    "dataset": str(cell.get("dataset") or "mixed"),
                    **shares,
                }


def _prefill_records(rows: Iterable[Mapping[str, Any]]) -> Iterable[Record]:
    for row in rows:
        stats = row.get("stats") or {}
        time_ms = _first(row, stats, "prefill_ms", "ttft_ms", "ms")
        tokens = _first(row, stats, "tokens", "prompt_tokens", "length")
        if time_ms is not None and tokens is not None:
            yield {
                **_common(row),
                "system": _system(row),
                "tokens": int(tokens),
                "prefill_ms": float(time_ms),
                "peak_device_bytes": _first(row, stats, "peak_device_bytes", "peak_bytes"),
            }


def _first(row: Mapping[str, Any], stats: Mapping[str, Any], *names: str) -> Any:
    found = (source[name] for name in names for source in (row, stats) if name in source)
    return next(found, None)


def _verification_records(rows: Iterable[Mapping[str, Any]]) -> Iterable[Record]:
    for row in rows:
        order = KERNELS.get(row.get("kernel"))
        if order is not None and "us" in row and row.get("num_rows"):
            yield {
                "model": str(row.get("shape") or row.get("model")),
                "setting": TRUE_SIZE,
                "order": order,
                "positions": int(row["num_rows"]),
                "layer_ms": row["us"] / 1e3,
            }


def _draft_records(rows: Iterable[Mapping[str, Any]]) -> Iterable[Record]:
    """Rows that say which format of the draft's experts they timed, as whole steps or as layers."""
    for row in rows:
        variant = row.get("format") or DRAFT_KERNELS.get(row.get("kernel"))
        milliseconds = row["us"] / 1e3 if "us" in row else row.get("ms", row.get("tpot_ms"))
        if variant is None or milliseconds is None:
            continue
        batch = int(row.get("num_rows") or row.get("batch") or 1)
        yield {
            "model": str(row.get("shape") or row.get("model")),
            "setting": TRUE_SIZE,
            "format": variant,
            "batch": batch,
            "scope": row.get("scope", "one MoE layer" if "kernel" in row else "draft step"),
            "tpot_ms": milliseconds,
            "tokens_per_s": batch / milliseconds * 1e3,
        }


def _timelines(rows: Iterable[Mapping[str, Any]]) -> Iterable[Record]:
    for row in rows:
        events = (row.get("trace") or {}).get("traceEvents")
        spans = row.get("spans") or (median_iteration(events) if events else None)
        if spans:
            yield {**_common(row), "depth": row.get("depth"), "spans": spans}
