"""Figure 10: prefill latency and peak memory over prompt length."""

from __future__ import annotations

import math
from typing import Any

from specter_jax.report.panels import (
    MAX_COLUMNS,
    Place,
    budgets_of,
    by_experts,
    filled,
    place_name,
    system_of,
)
from specter_jax.report.sources import budget_of, commits_of, format_of
from specter_jax.report.style import (
    Panel,
    colour,
    even_ticks,
    grid,
    legend_of_all,
    line_style,
    listed,
    log_axis,
    places,
    svg_of,
)

Records = list[dict[str, Any]]
Styles = dict[tuple[str, str], tuple[str, dict[str, Any]]]


def draw_prefill(records: Records) -> Panel:
    """A column of two panels for each model and format of its experts, a curve for each system and
    budget: colours tell budgets, marks systems; where every model has one budget, the title names
    it and colours tell systems. What names the budget names commits too, where there are several.
    """
    found = by_experts(records)
    named = any(len(budgets_of(ours)) > 1 for ours in found.values())
    several = len(commits_of(records)) > 1
    styles = _styles(records, named)
    columns = min(len(found), MAX_COLUMNS)
    figure, rows = grid(2 * math.ceil(len(found) / columns), columns, 2.5)
    lengths = sorted({record["tokens"] for record in records})
    largest = max(record["peak_device_bytes"] or 0 for record in records)
    unit, unit_name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    for axes in (axes for row in rows for axes in row):
        axes.set_axis_off()
    for number, (place, ours) in enumerate(found.items()):
        row, column = divmod(number, columns)
        above, below = rows[2 * row][column], rows[2 * row + 1][column]
        for key, (label, style) in styles.items():
            curve = [r for r in ours if _key(r, named) == key]
            curve.sort(key=lambda record: record["tokens"])
            x = [lengths.index(record["tokens"]) for record in curve]
            times = [record["prefill_ms"] for record in curve]
            peaks = [(at, r["peak_device_bytes"]) for at, r in zip(x, curve, strict=True)]
            peaks = [(at, peak / unit) for at, peak in peaks if peak]
            if curve:
                above.plot(x, times, label=label, **style)
            if peaks:
                below.plot(*zip(*peaks, strict=True), label=label, **style)
        above.set_title(place_name(place) if named else _title(place, ours, several))
        log_axis(above)
        # Room for the marks of a curve that is level.
        below.set_ylim(0, max((r["peak_device_bytes"] or 0 for r in ours), default=0) / unit * 1.1)
        for axes in (above, below):
            axes.set_axis_on()
            even_ticks(axes, lengths, "prompt, tokens")
            axes.set_xlim(-0.3, len(lengths) - 0.7)
        if column == 0:
            above.set_ylabel("prefill, ms (log)")
            below.set_ylabel(f"peak device memory, {unit_name}")
    order = [label for label, _ in styles.values()]
    legend_of_all(figure, [axes for row in rows for axes in row], order, columns=4)
    return Panel(svg_of(figure), _sentence(records), filled([_row(r) for r in records]))


def _title(place: Place, records: Records, commits: bool) -> str:
    """Model, format and the one budget, and below it the commits if they are asked for."""
    title = ", ".join(filter(None, (place_name(place), *budgets_of(records))))
    found = commits_of(records) if commits else []
    return f"{title}\ncommit {listed(found)}" if found else title


def _row(record: dict[str, Any]) -> dict[str, Any]:
    peak = record["peak_device_bytes"]
    return {
        "model": record["model"],
        "experts": format_of(record),
        "system": system_of(record),
        "budget": budget_of(record),
        "tokens": record["tokens"],
        "prefill, ms": record["prefill_ms"],
        "transfers, ms": record.get("transfer_ms"),
        "peak, MiB": peak and peak / 2**20,
        "commit": listed(commits_of([record])) or None,
    }


def _key(record: dict[str, Any], named: bool = True) -> tuple[str, str]:
    """System and, where curves name it, budget."""
    return system_of(record), (budget_of(record) or "") if named else ""


def _styles(records: Records, named: bool) -> Styles:
    """Label and style of every curve, by system and, where curves name it, budget."""
    budgets = budgets_of(records) if named else [""]
    keys = {_key(r, named) for r in records}
    keys = sorted(keys, key=lambda key: (budgets.index(key[1]), key[0]))
    systems = places(system for system, _ in keys)
    styles: Styles = {}
    for system, budget in keys:
        style = line_style(systems[system])
        if named:
            style["color"] = colour(budgets.index(budget))
        label = ", ".join(filter(None, (system, budget)))
        if named and len(commits_of(records)) > 1:
            commits = commits_of(r for r in records if _key(r) == (system, budget))
            label += f" ({listed(commits)})" if commits else ""
        styles[system, budget] = label, style
    return styles


def _sentence(records: Records) -> str:
    parts = []
    for place, ours in by_experts(records).items():
        longest = max(record["tokens"] for record in ours)
        at_longest = [record for record in ours if record["tokens"] == longest]
        at_longest.sort(key=lambda record: record["prefill_ms"])
        times = [
            f"{record['prefill_ms']:.0f} ms ({', '.join(filter(None, _key(record)))})"
            for record in at_longest[:4]
        ]
        parts.append(f"{listed(times)} for {longest} tokens on {place_name(place)}")
    return f"Prefill takes {'; '.join(parts)}."
