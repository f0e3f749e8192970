"""What was measured on a GPU at true size, read from the JSON of `scripts/bench/`.

`h200.py` writes `{"meta", "cells", "prefill", "kernels"}`: a cell is one generation with "model",
"budget_gib", "expert_format", "policy" or "system", "depth", "dataset", "batch", "stats"
(`Stats.to_dict`) and whatever else was noted; "plain" is plain decoding in the same place.
`kernel_times.py` writes `{"device", "rows"}`, a run's trace stands in `*.timeline.json` with what
it is of under "otherData", predictions as `predictions.py` says. All keys are optional: what is
absent is not measured, nothing is filled in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from specter_jax.errors import InvalidRequestError
from specter_jax.json_files import read_json_object
from specter_jax.report.predictions import is_prediction, prediction_records
from specter_jax.report.result_records import Record, Records, records_of
from specter_jax.report.sources import with_origin

File = tuple[str, Mapping[str, Any]]
"""Name and content."""

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
        InvalidRequestError: no such directory, or a `.json` file that is no JSON object or whose
            entries are not as above; names the file.
        OSError: a file cannot be read.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise InvalidRequestError(f"{directory}: no such directory")
    files = [(file.name, _read(file)) for file in sorted(folder.glob("*.json"))]
    for file in files:
        # Each alone first: whatever is wrong with an entry then has its file's name.
        try:
            _records([file])
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidRequestError(
                f"{folder / file[0]}: its entries are not as scripts/bench writes them ({error!r})"
            ) from error
    used = [file for file in _ordered(files) if records_of(_gathered([file]))]
    return [_meta(*file) for file in used], _records(files)


def _records(files: Sequence[File]) -> Records:
    """Of all the files together, by section."""
    merged = _gathered(_ordered(files))
    merged["timelines"] = [
        {"file": name, "model": name.removesuffix(TIMELINE), **_about(content), "trace": content}
        for name, content in files
        if name.endswith(TIMELINE)
    ]
    records = records_of(merged)
    if pairs := prediction_records([content for _, content in files], merged["cells"]):
        records["planner"] = pairs
    return records


def _ordered(files: Sequence[File]) -> list[File]:
    """Those with measurements, the latest last."""
    results = [file for file in files if any(key in file[1] for key in LISTS)]
    results = [file for file in results if not is_prediction(file[1])]
    return sorted(results, key=lambda file: str(_meta(*file).get("date", "")))


def _about(trace: Mapping[str, Any]) -> Record:
    """What a trace says of its run: the model, "budget_gib", "expert_format" and depth."""
    about = trace.get("otherData") or {}
    return dict(about) if "budget_gib" in about else {"budget": "", **about}


def _gathered(files: Sequence[File]) -> dict[str, list[Record]]:
    """All entries of the files by list; of equal ones the last."""
    gathered: dict[str, dict[str, Record]] = {name: {} for name in LISTS.values()}
    for file, content in files:
        meta = _meta(file, content)
        for name, target in LISTS.items():
            for entry in content.get(name) or []:
                gathered[target][_key(entry)] = with_origin(entry, file, meta)
    return {name: list(found.values()) for name, found in gathered.items()}


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_json_object(file, str(file))
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error


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
