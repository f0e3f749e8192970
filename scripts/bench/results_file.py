"""The result file `h200.json`: its sections, and how new measurements go into it.

    {"meta": {"date", "gpu", "driver", "versions", "command"},
     "machine": {WHAT: {...}}, "overlap": {WHAT: {...}},
     "cells": [...], "prefill": [...], "kernels": [...], "steps": [...], "baseline": [...]}

WHAT is a model and expert format, as in "deepseek-v2-lite nested". An entry of a list is told from
others by the fields in `KEYS`: measured again it is replaced, all else stays, each entry with the
date it was measured at. So several short runs add up to one file. Sections not named here, such
as the planner's, are kept. Everything is a pure function but `read` and `write`.

    python scripts/bench/results_file.py NEW.json... --into results/h200.json

takes in files that `h200.py` wrote elsewhere.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Content = dict[str, Any]

_CELL = ("model", "budget_gib", "expert_format", "policy", "system", "depth", "dataset", "batch")
KEYS: dict[str, tuple[str, ...]] = {
    "cells": _CELL,
    "prefill": ("model", "budget_gib", "expert_format", "system", "prompt_tokens"),
    "kernels": ("kernel", "shape", "num_rows"),
    "steps": ("model", "part", "count", "options"),
    "baseline": _CELL,
}
"""Sections that are lists, and the fields that tell their entries apart."""

MAPPINGS = ("machine", "overlap")
_ORDER = ("meta", *MAPPINGS, *KEYS)


def merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> Content:
    """`old` with the entries of `new`, which replace those of the same key; arguments stay."""
    result = {**old, **new}
    for section in MAPPINGS:
        result[section] = {**(old.get(section) or {}), **(new.get(section) or {})}
    for section, fields in KEYS.items():
        entries = [*(old.get(section) or []), *(new.get(section) or [])]
        # A key keeps its first place and takes its last entry.
        result[section] = list({key_of(entry, fields): entry for entry in entries}.values())
    result["meta"] = {**(old.get("meta") or {}), **(new.get("meta") or {})}
    first = [name for name in _ORDER if name in result]
    return {name: result[name] for name in [*first, *(n for n in result if n not in first)]}


def key_of(entry: Mapping[str, Any], fields: Iterable[str]) -> str:
    """What an entry is of, whatever was measured; a field it lacks counts as null."""
    return json.dumps([entry.get(name) for name in fields])


def from_cells(content: Mapping[str, Any], model: str, expert_format: str, date: str) -> Content:
    """Sections of what `cells.py` wrote for one model and format; `date` where it gives none.

    The generated tokens are left out: what counts of them is whether they are the same.
    """
    what = f"{model} {expert_format}"
    sections: Content = {
        "cells": [_without(cell, "tokens") for cell in _dated(content.get("cells"), date)],
        "prefill": list(_dated(content.get("prefill"), date)),
    }
    for section in MAPPINGS:
        if content.get(section):
            sections[section] = {what: {**content[section], "date": date}}
    return sections


def from_kernels(content: Mapping[str, Any], date: str) -> Content:
    """Sections of what `kernel_times.py` or, without bandwidths, `draft_formats.py` wrote."""
    bandwidth = content.get("bandwidth") or {}
    rows = list(_dated(content.get("rows"), date))
    if not bandwidth:
        return {"kernels": rows}
    measured = {f"{name}_bytes_per_s": value for name, value in bandwidth.items()}
    machine = {"gpu": content.get("device"), "jax": content.get("jax"), **measured, "date": date}
    return {"kernels": rows, "machine": {"kernels": machine}}


def from_steps(output: str, model: str, date: str) -> Content:
    """Sections of what `steps.py` printed: one entry per program and set of compiler options.

    Entries: "part" draft or verification; "count", steps or tokens; "least_ms" to "most_ms" by the
    clock, of a step or a pass; "times_bytes", the least over the time of the bytes read.
    """
    number = r"(\d+(?:\.\d+)?)"
    head = rf"(draft|verification) of (\d+)(?: steps)? (\{{.*?\}}): lower {number} s, "
    times = rf"compile {number} s, {number} to {number} ms(?: a step)?, "
    rest = rf"(?:(\d+) experts, )?{number} x its bytes(?:; issued in {number} ms)?"
    entries = []
    for found in re.finditer(head + times + rest, output):
        part, count, options, lower, compiled, least, most, experts, ratio, issued = found.groups()
        entry = {
            "model": model,
            "part": part,
            "count": int(count),
            "options": options,
            "lower_s": float(lower),
            "compile_s": float(compiled),
            "least_ms": float(least),
            "most_ms": float(most),
            "times_bytes": float(ratio),
            "date": date,
        }
        if experts is not None:
            entry["experts"] = int(experts)
        if issued is not None:
            entry["issued_ms"] = float(issued)
        entries.append(entry)
    return {"steps": entries}


def _dated(entries: Iterable[Mapping[str, Any]] | None, date: str) -> Iterable[Content]:
    for entry in entries or []:
        yield {**entry, "date": entry.get("date") or date}


def _without(entry: Mapping[str, Any], name: str) -> Content:
    return {key: value for key, value in entry.items() if key != name}


def read(path: Path) -> Content:
    """The file's content, empty if there is none; raises ValueError if it is no JSON object."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return content


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes with one line per entry, so that a change of one shows as one; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sections = [f"{json.dumps(name)}: {_lines(value)}" for name, value in content.items()]
    text = "{\n" + ",\n".join(sections) + "\n}\n"
    # Replaced as a whole: an interruption leaves the old file.
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _lines(value: Any) -> str:
    if isinstance(value, list) and value:
        return "[\n " + ",\n ".join(json.dumps(entry) for entry in value) + "\n]"
    if isinstance(value, dict) and value:
        pairs = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
        return "{\n " + ",\n ".join(pairs) + "\n}"
    return json.dumps(value)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("new", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, required=True)
    args = parser.parse_args(argv)
    content = read(args.into)
    for path in args.new:
        if not path.exists():
            parser.error(f"{path}: no such file")
        content = merged(content, read(path))
    write(args.into, content)


if __name__ == "__main__":
    main()
