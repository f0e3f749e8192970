"""How the records of a figure are spread over its panels: by model and format, by budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from specter_jax.report.sources import budget_of, format_of
from specter_jax.report.style import budget_order, grouped

Record = dict[str, Any]
Place = tuple[str, str | None]

RANDOM = "random weights"
MAX_COLUMNS = 3
"""Of panels beside each other, in figures that have one for each model and format."""


def by_experts(records: Sequence[Record]) -> dict[Place, list[Record]]:
    """Records by model and format of its experts, models in order of appearance.

    What has no format, such as another library, stands beside every format of its model.
    """
    found: dict[Place, list[Record]] = {}
    for model, ours in grouped(records, "model").items():
        formats = sorted({format_of(record) for record in ours} - {None})
        for name in formats or [None]:
            found[model, name] = [r for r in ours if format_of(r) in (name, None)]
    return found


def place_name(place: Place) -> str:
    """A panel's title."""
    model, name = place
    return model if name is None else f"{model}, {name} experts"


def budgets_of(records: Iterable[Record]) -> list[str]:
    """Budgets without formats, the least first; those that name no number in order, at the end."""
    names = dict.fromkeys(budget_of(record) or "" for record in records)
    return sorted(names, key=lambda name: budget_order(name)[0])


def system_of(record: Record) -> str:
    """The system without the format behind it; random weights are said."""
    name = str(record["system"]).partition(",")[0]
    return f"{name} ({RANDOM})" if record.get("weights") == "random" else name


def by_budget(record: Record) -> tuple[str, float]:
    """Sort key: formats of one model together, the least budget first."""
    return format_of(record) or "", budget_order(budget_of(record) or "")[0]


def filled(rows: Sequence[Record]) -> list[Record]:
    """Rows of a table without the columns in which none of them has anything."""
    empty = {name for row in rows for name in row if all(r.get(name) is None for r in rows)}
    return [{name: value for name, value in row.items() if name not in empty} for row in rows]
