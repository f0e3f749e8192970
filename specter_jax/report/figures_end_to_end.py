"""Figure 14: time per token of all systems."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from specter_jax.report.panels import budgets_of, by_experts, filled, place_name, system_of
from specter_jax.report.sources import budget_of, format_of
from specter_jax.report.style import (
    FULL_WIDTH,
    GREY,
    Panel,
    bar_style,
    grid,
    grouped,
    legend_of_all,
    listed,
    log_axis,
    mark_log,
    places,
    svg_of,
)

Records = list[dict[str, Any]]
Cell = tuple[Any, ...]
Times = dict[str, float]

OURS = "specter"
WIDE_RANGE = 30.0
"""Ratio of the largest to the smallest bar above which bars are shown on a logarithmic axis."""
MAX_LABELLED_BARS = 60
"""Beside each other in the figure: more of them are too narrow for their numbers."""
MAX_LEVEL_NUMBERS = 24
"""The same of numbers that are not turned."""
MAX_LARGE_TITLES = 3
WIDEST_BAR = 0.3
"""Share of a dataset's place: fewer bars than that do not grow."""
ALL = "geometric mean"


def draw_end_to_end(records: Records) -> Panel | None:
    """A row of panels for each model and format of its experts, one panel for each budget.

    A cell that was not run leaves a gap.
    """
    records = [record for record in records if record.get("tpot_ms")]
    if not records:
        return None
    rows = by_experts(records)
    budgets = {place: budgets_of(ours) for place, ours in rows.items()}
    where = _systems(records)
    figure, axes = grid(len(rows), max(map(len, budgets.values())), 2.2, FULL_WIDTH)
    for row, (place, ours) in zip(axes, rows.items(), strict=True):
        for panel, budget in zip(row, budgets[place], strict=False):
            cells = [r for r in ours if (budget_of(r) or "") == budget]
            _draw_bars(panel, cells, where, len(row))
            size = None if len(row) <= MAX_LARGE_TITLES else 7
            panel.set_title(f"{place_name(place)}, {budget}", fontsize=size)
        for panel in row[len(budgets[place]) :]:
            panel.set_axis_off()
        row[0].set_ylabel("time per token, ms")
    legend_of_all(figure, [panel for row in axes for panel in row], list(where))
    # What stands for several datasets is one row.
    table = {json.dumps(row): row for row in map(_row, records)}
    text = f"{_sentence(records)}{_sizes(records)}"
    return Panel(svg_of(figure), text, filled(list(table.values())))


def _row(record: dict[str, Any]) -> dict[str, Any]:
    stats = record.get("stats") or {}
    return {
        "model": record["model"],
        "experts": format_of(record),
        "budget": budget_of(record),
        "dataset": "any" if record.get("any_text") else record["dataset"],
        "system": system_of(record),
        "depth": record.get("depth"),
        "prompts": stats.get("sequences"),
        "tokens": stats.get("new_tokens"),
        "TPOT, ms": record["tpot_ms"],
        "hit rate": stats.get("hit_rate"),
        "acceptance": stats.get("acceptance_rate"),
    }


def _systems(records: Records) -> dict[str, int]:
    """Place of every system in colours and order, ours last."""
    return places(sorted({system_of(record) for record in records}, key=_order))


def _order(system: str) -> tuple[bool, str]:
    return system == OURS, system


def _draw_bars(axes: Any, records: Records, where: dict[str, int], columns: int) -> None:
    """columns: how many panels stand beside each other, which says how wide a bar is."""
    datasets = list(grouped(records, "dataset"))
    systems = [name for name in where if any(system_of(r) == name for r in records)]
    groups = [*datasets, ALL] if len(datasets) > 2 else datasets
    width = min(0.84 / len(systems), WIDEST_BAR)
    beside = len(systems) * len(groups) * columns
    turned = beside > MAX_LEVEL_NUMBERS
    for place, system in enumerate(systems):
        times = {r["dataset"]: r["tpot_ms"] for r in records if system_of(r) == system}
        if len(times) == len(datasets) and ALL in groups:
            times[ALL] = _geometric_mean(list(times.values()))
        x = np.array([groups.index(name) for name in times])
        x = x + (place - (len(systems) - 1) / 2) * width
        bars = axes.bar(x, list(times.values()), width, label=system, **bar_style(where[system]))
        if beside <= MAX_LABELLED_BARS:
            numbers = [f"{time:.3g}" if time < 1000 else f"{time:.0f}" for time in times.values()]
            axes.bar_label(bars, numbers, fontsize=6, padding=2, rotation=90 if turned else 0)
    values = [record["tpot_ms"] for record in records]
    if max(values) > WIDE_RANGE * min(values):
        log_axis(axes)
        axes.set_ylim(min(values) / 2, max(values) * 4)
        mark_log(axes)
    else:
        # Room for the numbers.
        axes.set_ylim(0, max(values) * (1.25 if turned else 1.12))
    if ALL in groups:
        axes.axvline(len(datasets) - 0.5, color=GREY, linewidth=0.8, linestyle=":")
    slanted = {"rotation": 35, "ha": "right"} if len(groups) > 3 else {}
    axes.set_xticks(range(len(groups)), groups, fontsize=7, **slanted)
    axes.set_xlim(-0.5, len(groups) - 0.5)


def _sentence(records: Records) -> str:
    """Systems on the geometric mean over the cells that all of them ran in, then ours by pairs.

    Where there is no such cell, those that ran in the fewest are left aside until there is one.
    """
    cells = _cells(records)
    every = list(_systems(records))
    systems, common = every, _cells_of_all(cells, every)
    while not common and len(systems) > 2:
        counts = [sum(name in cell for cell in cells) for name in systems]
        # Of equals the first: ours come last.
        rarest = systems[counts.index(min(counts))]
        systems = [name for name in systems if name != rarest]
        common = _cells_of_all(cells, systems)
    if not common:
        text = f"Time per output token of {listed(every)}; no cell was run by all of them."
        return text + _pairs(cells, every)
    means = {name: _geometric_mean([cell[name] for cell in common]) for name in systems}
    ranked = sorted(means, key=means.get)
    shown = listed([f"{name} {means[name]:.2f} ms" for name in ranked])
    who = "all systems" if systems == every else f"these {len(systems)} systems"
    text = f"Geometric mean over the {len(common)} cells that {who} ran in: {shown}"
    rivals = [name for name in ranked if name != OURS]
    if OURS in ranked and rivals:
        ratio = means[OURS] / means[rivals[0]]
        text += f"; {OURS} takes {ratio:.2f} times as long as {rivals[0]}, the best of the others"
    return f"{text}.{_pairs(cells, every)}"


def _cells(records: Records) -> list[Times]:
    """Times by system of every model, format of experts, budget and dataset."""
    found: dict[Cell, Times] = {}
    for place, ours in by_experts(records).items():
        for record in ours:
            key = (*place, budget_of(record), record["dataset"])
            found.setdefault(key, {})[system_of(record)] = record["tpot_ms"]
    return list(found.values())


def _cells_of_all(cells: Sequence[Times], systems: Sequence[str]) -> list[Times]:
    """Those that every one of the systems ran in."""
    return [cell for cell in cells if cell.keys() >= set(systems)]


def _pairs(cells: Sequence[Times], systems: Sequence[str]) -> str:
    """Every other system's time over ours, each over all cells that both ran in."""
    parts = []
    for name in systems:
        both = _cells_of_all(cells, (OURS, name)) if name != OURS else []
        if both:
            ratio = _geometric_mean([cell[name] / cell[OURS] for cell in both])
            parts.append(f"{name} {ratio:.2f} ({len(both)} cells)")
    if not parts:
        return ""
    return f" In units of {OURS}'s time, over all cells that both ran in: {listed(parts)}."


def _sizes(records: Records) -> str:
    """Prompts and tokens of the cells, where they differ."""
    parts = []
    for name, field in (("prompts", "sequences"), ("tokens", "new_tokens")):
        counts = {(record.get("stats") or {}).get(field) for record in records} - {None}
        if len(counts) > 1:
            parts.append(f"{min(counts)} to {max(counts)} {name}")
    return f" Cells are of {listed(parts)}, see the numbers below." if parts else ""


def _geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))
