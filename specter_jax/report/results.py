"""What was measured on a GPU at true size, read from the JSON of `scripts/bench/`.

`h200.py` writes `{"meta", "cells", "prefill", "kernels"}`: a cell is one generation with "model",
"budget_gib", "expert_format", "policy" or "system", "depth", "dataset", "batch", "stats"
(`Stats.to_dict`) and whatever else was noted; "plain" is plain decoding in the same place.
`kernels.py` writes `{"device", "rows"}`, a run's trace stands in `*.timeline.json` with what it is
of under "otherData", predictions as `predictions.py` says. All keys are optional: what is absent is
not measured, nothing is filled in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specter_jax.errors import InvalidRequestError
from specter_jax.report.predictions import is_prediction, prediction_records
from specter_jax.report.result_records import Record, Records, records_of
from specter_jax.report.sources import with_origin

TIMELINE = ".timeline.json"
LISTS = {
    "cells": "cells",
    "baseline": "cells",
    "prefill": "prefill",
    "kernels": "kernels",
    "rows": "kernels",
}
"""Keys of a result file, and under which of them their entries are gathered."""


def read_results(directory: str | os.PathLike[str]) -> tuple[list[Record], Records]:
    """What the result files of a directory hold: `meta` of those of use, and records by section.

    What stands in several files is taken from the latest by `meta.date`.

    Raises:
        InvalidRequestError: no such directory, or a `.json` file that is no JSON object.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise InvalidRequestError(f"{directory}: no such directory")
    files = [(file.name, _read(file)) for file in sorted(folder.glob("*.json"))]
    results = [(name, content) for name, content in files if any(key in content for key in LISTS)]
    results = [(name, content) for name, content in results if not is_prediction(content)]
    results.sort(key=lambda file: str(_meta(*file).get("date", "")))
    merged = _gathered(results)
    merged["timelines"] = [
        {"file": name, "model": name.removesuffix(TIMELINE), **_about(content), "trace": content}
        for name, content in files
        if name.endswith(TIMELINE)
    ]
    records = records_of(merged)
    if pairs := prediction_records([content for _, content in files], merged["cells"]):
        records["planner"] = pairs
    used = [
        (name, content) for name, content in results if records_of(_gathered([(name, content)]))
    ]
    return [_meta(*file) for file in used], records


def _about(trace: Mapping[str, Any]) -> Record:
    """What a trace says of its run: the model, "budget_gib", "expert_format" and depth."""
    about = trace.get("otherData") or {}
    return dict(about) if "budget_gib" in about else {"budget": "", **about}


def _gathered(files: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, list[Record]]:
    """All entries of the files, given with their names, by list; of equal ones the last."""
    gathered: dict[str, dict[str, Record]] = {name: {} for name in LISTS.values()}
    for file, content in files:
        meta = _meta(file, content)
        for name, target in LISTS.items():
            for entry in content.get(name) or []:
                gathered[target][_key(entry)] = with_origin(entry, file, meta)
    return {name: list(found.values()) for name, found in gathered.items()}


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidRequestError(f"{file}: not JSON ({error})") from error
    if not isinstance(content, dict):
        raise InvalidRequestError(f"{file}: expected a JSON object")
    return content


def _meta(name: str, content: Mapping[str, Any]) -> Record:
    meta = dict(content.get("meta") or {})
    if "device" in content:
        meta.setdefault("gpu", content["device"])
    if "jax" in content:
        meta.setdefault("versions", {"jax": content["jax"]})
    return {"file": name, **meta}


KEY_FIELDS = (
    *("model", "budget_gib", "expert_format", "policy", "system", "depth", "dataset", "batch"),
    *("tokens", "prompt_tokens", "kernel", "shape", "num_rows", "format", "scope"),
)


def _key(entry: Mapping[str, Any]) -> str:
    """What an entry is of, whatever was measured."""
    # A cell's "tokens" are its output, a prefill's the length of the prompt.
    fields = {name: entry.get(name) for name in KEY_FIELDS if not isinstance(entry.get(name), list)}
    return json.dumps(fields, sort_keys=True, default=str)
