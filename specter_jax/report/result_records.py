"""Records of the report from the cells, prefills and kernels of a run on a GPU."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specter_jax.report import TRUE_SIZE
from specter_jax.report.kernel_records import draft_records, verification_records
from specter_jax.report.measure_runs import HIT_RATE_POLICIES, most_used, use_shares
from specter_jax.report.measure_timeline import median_iteration
from specter_jax.report.sources import origin
from specter_jax.systems import SYSTEMS

Record = dict[str, Any]
Records = dict[str, list[Record]]

AUTO = "auto"
DEFAULT_SYSTEM = "specter"
ANY = "any"
"""Dataset of a cell whose time does not depend on the text: it stands for every dataset."""
PLACE = ("model", "budget", "expert_format", "dataset")
"""What two cells must share to be compared."""


def records_of(content: Mapping[str, Any]) -> Records:
    """Records of one file by section, those without any left out."""
    cells = [cell for cell in content.get("cells") or [] if isinstance(cell.get("stats"), dict)]
    kernels = content.get("kernels") or []
    single = [cell for cell in cells if batch_of(cell) == 1]
    records = {
        "depth": list(_depth_records([cell for cell in single if not cell.get("baseline")])),
        "timeline": list(_timelines(content.get("timelines") or [])),
        "prefill": list(_prefill_records(content.get("prefill") or [])),
        "draft": list(draft_records(kernels)),
        "verification": list(verification_records(kernels)),
        "end_to_end": _by_format(_end_to_end(single), "system"),
        "batch": _by_format(_batch_records(cells), "system"),
        "hit_rate": _by_format(
            _hit_rates([cell for cell in single if not cell.get("baseline")]), "budget"
        ),
    }
    return {section: found for section, found in records.items() if found}


def _common(source: Mapping[str, Any]) -> Record:
    budget = source.get("budget_gib")
    shown = source.get("budget")
    if shown is None:
        shown = "all on the GPU" if budget is None else f"{budget:g} GiB"
    record = {"model": str(source.get("model", "?")), "setting": TRUE_SIZE, "budget": shown}
    if source.get("expert_format"):
        record["expert_format"] = source["expert_format"]
    return record


def _weights(source: Mapping[str, Any]) -> Record:
    """Says so where weights were not a trained model's."""
    return {"weights": source["weights"]} if source.get("weights") else {}


def batch_of(cell: Mapping[str, Any]) -> int:
    """Sequences decoded together."""
    return int(cell.get("batch") or 1)


def _dataset(cell: Mapping[str, Any]) -> str:
    return str(cell.get("dataset") or "mixed")


def _by_format(records: Iterable[Record], field: str) -> list[Record]:
    """The records; where formats of the experts differ, `field` names the format as well."""
    records = list(records)
    if len({record.get("expert_format") for record in records}) < 2:
        return records
    return [
        record | {field: f"{record[field]}, {record['expert_format']}"}
        if record.get("expert_format")
        else record
        for record in records
    ]


def system_name(cell: Mapping[str, Any]) -> str:
    """The system a cell stands for: its own word, the one of its policy, or the policy itself."""
    if cell.get("system"):
        return str(cell["system"])
    names = [name for name, one in SYSTEMS.items() if one.policy == cell.get("policy")]
    return names[0] if names else str(cell.get("policy") or "?")


def _end_to_end(cells: Iterable[Mapping[str, Any]]) -> Iterable[Record]:
    """One record for each place and system: at the system's own depth, else at the fastest.

    Policies that are no system of their own are left out; figure 17 is of them.
    """
    best: dict[str, tuple[tuple[bool, float], Record]] = {}
    for cell in _on_datasets(list(cells)):
        no_system = system_name(cell) in HIT_RATE_POLICIES
        if no_system or cell["stats"].get("tpot_ms") is None:
            continue
        record = {
            **_common(cell),
            "dataset": _dataset(cell),
            "system": system_name(cell),
            "batch": 1,
            "baseline": bool(cell.get("baseline")),
            "depth": cell.get("depth"),
            "tpot_ms": cell["stats"]["tpot_ms"],
            "floor_ms": (cell.get("floor_ms") or {}).get("tpot_ms"),
            "stats": cell["stats"],
            **_weights(cell),
            "any_text": bool(cell.get("any_text")),
            "sources": origin(cell),
        }
        system = SYSTEMS.get(record["system"])
        rank = (system is not None and system.depth != record["depth"], record["tpot_ms"])
        key = json.dumps([record.get(name) for name in (*PLACE, "system")])
        if key not in best or rank < best[key][0]:
            best[key] = rank, record
    return [record for _, record in best.values()]


def _on_datasets(cells: Sequence[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """The cells, those of any text once for each dataset that was run in the same place."""

    def place(cell: Mapping[str, Any]) -> tuple[Any, ...]:
        return cell.get("model"), cell.get("budget_gib")

    for cell in cells:
        beside = [_dataset(other) for other in cells if place(other) == place(cell)]
        names = list(dict.fromkeys(name for name in beside if name != ANY))
        if _dataset(cell) != ANY or not names:
            yield cell
            continue
        for name in names:
            yield {**cell, "dataset": name, "any_text": True}


def _depth_records(cells: Iterable[Mapping[str, Any]]) -> Iterable[Record]:
    """Cells of one place under `lookahead` at two or more depths, plain decoding among them."""
    groups: dict[str, tuple[Record, dict[str, Mapping[str, Any]]]] = {}
    members: dict[str, list[Mapping[str, Any]]] = {}
    for cell in cells:
        policy = cell.get("policy") or SYSTEMS[DEFAULT_SYSTEM].policy
        ours = policy == "lookahead" and cell.get("system") in (None, DEFAULT_SYSTEM)
        if not ours or cell["stats"].get("tpot_ms") is None:
            continue
        common = {**_common(cell), "policy": policy, "dataset": _dataset(cell)}
        key = json.dumps(common)
        by_depth = groups.setdefault(key, (common, {}))[1]
        members.setdefault(key, []).append(cell)
        by_depth[str(cell.get("depth", AUTO))] = cell["stats"]
        plain = cell.get("plain")
        if plain and plain.get("tpot_ms") is not None:
            by_depth.setdefault("0", plain)
    for key, (common, by_depth) in groups.items():
        points = [
            {"depth": int(depth), "tpot_ms": stats["tpot_ms"]}
            for depth, stats in by_depth.items()
            if depth.isdigit()
        ]
        if len(points) < 2:
            continue
        record = {**common, "points": sorted(points, key=lambda point: point["depth"])}
        record["sources"] = origin(*members[key])
        if AUTO in by_depth:
            stats = by_depth[AUTO]
            depth = most_used(stats.get("depths") or {})
            record["auto"] = {"depth": depth, "tpot_ms": stats["tpot_ms"]}
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
            "system": system_name(cell),
            "batch": batch_of(cell),
            "depth": cell.get("depth"),
            "dataset": _dataset(cell),
            "tpot_ms": stats.get("tpot_ms"),
            "tokens_per_s": (tokens - stats.get("sequences", batch_of(cell))) / decode_ms * 1e3,
            "sources": origin(cell),
        }
        key = json.dumps([record.get(name) for name in (*PLACE, "system", "depth")])
        groups.setdefault(key, []).append(record)
    for members in groups.values():
        if len({record["batch"] for record in members}) > 1:
            yield from members


def _hit_rates(cells: Iterable[Mapping[str, Any]]) -> Iterable[Record]:
    """Policies of figure 17, each at the depth that most policies share."""
    cells = [cell for cell in cells if cell.get("policy") in HIT_RATE_POLICIES]
    depths = Counter(cell.get("depth") for cell in cells if cell.get("depth") != 0)
    shared = depths.most_common(1)[0][0] if depths else 0
    cells = [cell for cell in cells if cell.get("depth") in (0, shared)]
    for cell in _on_equal_texts(cells):
        shares = use_shares(cell["stats"])
        if shares["hit_rate"] is not None:
            yield {
                **_common(cell),
                "policy": cell["policy"],
                "depth": cell.get("depth"),
                "dataset": _dataset(cell),
                **shares,
                "sources": origin(cell),
            }


def _on_equal_texts(cells: Sequence[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """The cells on datasets that all policies of a place ran on; all of them if there are none."""
    runs: dict[str, dict[str, set[str]]] = {}
    for cell in cells:
        place = json.dumps(_common(cell))
        runs.setdefault(place, {}).setdefault(cell["policy"], set()).add(_dataset(cell))
    for cell in cells:
        common = set.intersection(*runs[json.dumps(_common(cell))].values())
        if not common or _dataset(cell) in common:
            yield cell


def _prefill_records(rows: Iterable[Mapping[str, Any]]) -> Iterable[Record]:
    for row in rows:
        stats = row.get("stats") or {}
        time_ms = _first(row, stats, "prefill_ms", "ttft_ms", "ms")
        tokens = _first(row, stats, "tokens", "prompt_tokens", "length")
        if time_ms is not None and tokens is not None:
            yield {
                **_common(row),
                "system": system_name(row),
                "tokens": int(tokens),
                "prefill_ms": float(time_ms),
                "transfer_ms": _first(row, stats, "transfer_ms"),
                "peak_device_bytes": _first(row, stats, "peak_device_bytes", "peak_bytes"),
                **_weights(row),
                "sources": origin(row),
            }


def _first(row: Mapping[str, Any], stats: Mapping[str, Any], *names: str) -> Any:
    found = (source[name] for name in names for source in (row, stats) if name in source)
    return next(found, None)


def _timelines(rows: Iterable[Mapping[str, Any]]) -> Iterable[Record]:
    for row in rows:
        events = (row.get("trace") or {}).get("traceEvents")
        spans = row.get("spans") or (median_iteration(events) if events else None)
        if spans:
            yield {
                **_common(row),
                "depth": row.get("depth"),
                "spans": spans,
                "sources": origin(row),
            }
