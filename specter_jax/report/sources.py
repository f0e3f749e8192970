"""Where a true-size record comes from, and how the page says so.

A record's "sources" is a list of {"file", "commit", "date"}, each a text or null: one for every
run that its figures were taken from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specter_jax.report.style import budget_order, grouped, listed

Record = dict[str, Any]

FIELDS = ("file", "commit", "date")
DAY = len("2000-01-01")


def origin(*entries: Mapping[str, Any]) -> list[Record]:
    """The sources of a record made from these entries of result files, each once."""
    found = [{name: entry.get(name) for name in FIELDS} for entry in entries]
    return list({json.dumps(source): source for source in found}.values())


def with_origin(entry: Mapping[str, Any], file: str, meta: Mapping[str, Any]) -> Record:
    """An entry of a file: commit and date are its own, else the file's."""
    return {"file": file, **{name: meta.get(name) for name in FIELDS[1:]}, **entry}


def format_of(record: Mapping[str, Any]) -> str | None:
    """The experts' format if the record says it."""
    return record.get("expert_format") or None


def budget_of(record: Mapping[str, Any]) -> str | None:
    """The budget without the format that a figure may have put behind it."""
    budget = record.get("budget")
    return str(budget).partition(",")[0] if budget else None


def commits_of(records: Iterable[Record]) -> list[str]:
    """Commits that the records name, in order of appearance."""
    found = (source.get("commit") for record in records for source in record.get("sources") or [])
    return [commit for commit in dict.fromkeys(found) if commit]


def about(records: Sequence[Record]) -> str:
    """Models, expert formats and budgets of a figure's records, as one sentence."""
    parts = []
    for model, ours in grouped(records, "model").items():
        formats = sorted({format_of(record) for record in ours} - {None})
        words = [f"{listed(formats)} experts"] if formats else []
        if budgets := _budgets(ours):
            words.append(budgets)
        parts.append(f"{model} ({'; '.join(words)})" if words else str(model))
    return f"Shown: {listed(parts)}."


def _budgets(records: Iterable[Record]) -> str:
    names = sorted({budget_of(record) for record in records} - {None}, key=budget_order)
    sizes = [name.removesuffix(" GiB") for name in names]
    if len(names) > 1 and all(name.endswith(" GiB") for name in names):
        return f"{listed(sizes)} GiB"
    return listed(names)


def files_of(records: Iterable[Record]) -> str:
    """Files and commits of a figure's records, as one sentence; "" if they name none."""
    commits: dict[str, list[str]] = {}
    for source in (source for record in records for source in record.get("sources") or []):
        if source.get("file"):
            found = commits.setdefault(source["file"], [])
            if source.get("commit") and source["commit"] not in found:
                found.append(source["commit"])
    parts = [
        f"{file} (commit {listed(found)})" if found else file for file, found in commits.items()
    ]
    return f"From {listed(parts)}." if parts else ""


def source_rows(figure: str, records: Iterable[Record]) -> list[Record]:
    """Rows of the page's table of sources for one figure: by model, format, file, commit, day."""
    flat = [
        {
            "figure": figure,
            "model": record["model"],
            "experts": format_of(record),
            "budget": record.get("budget"),
            "file": source.get("file"),
            "commit": source.get("commit"),
            "measured on": (source.get("date") or "")[:DAY] or None,
        }
        for record in records
        for source in record.get("sources") or [{}]
    ]
    keys = ("figure", "model", "experts", "file", "commit", "measured on")
    return [
        dict(zip(keys[:3], key[:3], strict=True))
        | {"budget": _budgets(ours) or None}
        | dict(zip(keys[3:], key[3:], strict=True))
        for key, ours in grouped(flat, *keys).items()
    ]
