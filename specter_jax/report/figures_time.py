"""Figures of time: 7 (depth), 11 (formats of the draft), 12 (ways to verify)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specter_jax.report.panels import MAX_COLUMNS, by_budget, by_experts, filled, place_name
from specter_jax.report.sources import budget_of, format_of
from specter_jax.report.style import (
    BLACK,
    Panel,
    bar_style,
    even_ticks,
    grid,
    grouped,
    legend_below,
    legend_of_all,
    line_style,
    listed,
    log_axis,
    mark_log,
    places,
    svg_of,
)

Records = list[dict[str, Any]]

WIDE_RANGE = 10.0
"""Ratio of the largest to the smallest time above which a logarithmic axis shows both."""
THOUSANDS_FROM = 1e5


def draw_depth(records: Records) -> Panel:
    """Figure 7: time per token over depth, the least marked, and what `auto` chose.

    A panel for each model and format of its experts. Where depths were swept, curves of plain
    decoding and one depth are left to the table: they have no least depth to show.
    """
    every = sorted(records, key=by_budget)
    found = {place: _swept(curves) for place, curves in by_experts(every).items()}
    drawn = [record for curves in found.values() for record in curves]
    columns = min(len(found), MAX_COLUMNS)
    height = 3.2 + 0.2 * max(map(len, found.values()))
    figure, rows = grid(math.ceil(len(found) / columns), columns, height)
    panels = [axes for row in rows for axes in row]
    for axes in panels[len(found) :]:
        axes.set_axis_off()
    for axes, (place, curves) in zip(panels, found.items(), strict=False):
        depths = sorted({point["depth"] for curve in curves for point in curve["points"]})
        for number, curve in enumerate(curves):
            points = curve["points"]
            style = line_style(number)
            x = [depths.index(point["depth"]) for point in points]
            label, auto = _where(curve), curve.get("auto")
            if auto:
                axes.axhline(auto["tpot_ms"], color=style["color"], linewidth=1, linestyle=":")
                told = f"auto (dotted) {auto['tpot_ms']:.2f}, mostly depth {auto['depth']}"
                label = "\n".join(filter(None, (label, told)))
            axes.plot(x, [point["tpot_ms"] for point in points], label=label, **style)
            best = _best(curve)
            label = "least" if number == len(curves) - 1 else None
            spot = (depths.index(best["depth"]), best["tpot_ms"])
            axes.plot(*spot, "*", color=BLACK, markersize=9, label=label, zorder=5)
        times = [point["tpot_ms"] for curve in curves for point in curve["points"]]
        if max(times) > WIDE_RANGE * min(times):
            log_axis(axes)
            mark_log(axes)
        else:
            axes.set_ylim(bottom=0)
        even_ticks(axes, depths, "depth (0: plain decoding)")
        axes.set_title(place_name(place))
        # Below: curves may be anywhere within.
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), fontsize=7)
    for row in rows:
        row[0].set_ylabel("time per output token, ms")
    text = _depth_sentence(drawn)
    if any(len(record["points"]) == 2 for record in drawn):
        text += " Where two depths were run, it is the least of these two."
    if len(drawn) < len(every):
        text += f" {len(every) - len(drawn)} places without a sweep are only in the numbers below."
    return Panel(svg_of(figure), text, _depth_rows(every))


def _swept(curves: Records) -> Records:
    """Curves of more than two depths; all of them if there is none."""
    return [curve for curve in curves if len(curve["points"]) > 2] or curves


def _best(curve: dict[str, Any]) -> dict[str, Any]:
    return min(curve["points"], key=lambda point: point["tpot_ms"])


def _where(record: dict[str, Any]) -> str:
    name = format_of(record)
    parts = (budget_of(record), f"{name} experts" if name else None, record.get("dataset"))
    # The panel's title has the format as well, but a legend may be read alone.
    return ", ".join(str(part) for part in parts if part)


def _depth_sentence(records: Records) -> str:
    parts = []
    for record in records[:6]:
        best, auto = _best(record), record.get("auto")
        text = f"depth {best['depth']} with {best['tpot_ms']:.2f} ms ({record['model']}"
        text += f", {_where(record)})" if len(records) > 3 else ")"
        if auto:
            ratio = auto["tpot_ms"] / best["tpot_ms"]
            text += f", where auto ran mostly at {auto['depth']} and took {ratio:.2f} times that"
        parts.append(text)
    more = f" (first {len(parts)} of {len(records)} curves)" if len(parts) < len(records) else ""
    return f"Time per output token is least at {listed(parts)}{more}."


def _depth_rows(records: Records) -> Records:
    rows = []
    for record in records:
        points = [(str(point["depth"]), point) for point in record["points"]]
        if record.get("auto"):
            points.append((f"auto ({record['auto']['depth']})", record["auto"]))
        rows += [
            {
                "model": record["model"],
                "experts": format_of(record),
                "budget": budget_of(record),
                "dataset": record.get("dataset"),
                "depth": depth,
                "TPOT, ms": point["tpot_ms"],
                "acceptance": (point.get("stats") or {}).get("acceptance_rate"),
                "hit rate": (point.get("stats") or {}).get("hit_rate"),
            }
            for depth, point in points
        ]
    return filled(rows)


def draw_draft_formats(records: Records) -> Panel:
    """Figure 11: time per token and throughput of the draft by format of its experts."""
    batches = sorted({record["batch"] for record in records})
    formats = {name: place for place, name in enumerate(grouped(records, "format"))}
    figure, ((times, throughput),) = grid(1, 2, 3.2)
    single = [record for record in records if record["batch"] == batches[0]]
    largest = [record for record in records if record["batch"] == batches[-1]]
    _format_bars(times, single, formats, "tpot_ms", "{:.3g}")
    many = max((record["tokens_per_s"] for record in largest), default=0.0) >= THOUSANDS_FROM
    # Longer numbers than these would run into the next bar's.
    if many:
        scale, unit, shown = 1e-3, "thousand tokens per second", "{:.3g}"
    else:
        scale, unit, shown = 1.0, "tokens per second", "{:,.0f}"
    _format_bars(throughput, largest, formats, "tokens_per_s", shown, scale)
    scope = records[0].get("scope", "draft step")
    times.set_ylabel(f"{scope}, ms")
    times.set_title(f"time per token at batch {batches[0]}")
    throughput.set_ylabel(unit)
    throughput.set_title(f"throughput at batch {batches[-1]}")
    legend_below(figure, times)
    parts = []
    for model, ours in grouped(single, "model").items():
        values = [f"{record['tpot_ms']:.3g} ms ({record['format']})" for record in ours]
        parts.append(f"{listed(values)} on {model}")
    return Panel(
        svg_of(figure),
        f"At batch {batches[0]}, one token through the draft ({scope}) takes {'; '.join(parts)}.",
        [
            {
                "model": record["model"],
                "format": record["format"],
                "batch": record["batch"],
                "time, ms": record["tpot_ms"],
                "tokens per s": record["tokens_per_s"],
            }
            for record in records
        ],
    )


def _format_bars(
    axes: Any, records: Records, formats: dict, field: str, shown: str, scale: float = 1.0
) -> None:
    models = list(grouped(records, "model"))
    width = 0.8 / len(formats)
    for name, place in formats.items():
        ours = [record for record in records if record["format"] == name]
        x = np.array([models.index(record["model"]) for record in ours])
        x = x + (place - (len(formats) - 1) / 2) * width
        values = [record[field] * scale for record in ours]
        bars = axes.bar(x, values, width, label=name, **bar_style(place))
        axes.bar_label(bars, [shown.format(value) for value in values], fontsize=6, padding=1)
    axes.set_xticks(range(len(models)), models)


def draw_verification(records: Records) -> Panel:
    """Figure 12: one layer's experts for all positions of a verification, in different orders."""
    models = grouped(records, "model")
    orders = places(record["order"] for record in records)
    # One kind of axis for all models, which are compared.
    wide = any(_spread(ours) > WIDE_RANGE for ours in models.values())
    figure, (row,) = grid(1, len(models), 3.0)
    parts = []
    for axes, (model, ours) in zip(row, models.items(), strict=True):
        positions = sorted({record["positions"] for record in ours})
        for order, curve in grouped(ours, "order").items():
            curve = sorted(curve, key=lambda record: record["positions"])
            x = [positions.index(record["positions"]) for record in curve]
            times = [record["layer_ms"] for record in curve]
            axes.plot(x, times, label=order, **line_style(orders[order]))
        if wide:
            log_axis(axes)
            mark_log(axes)
        else:
            axes.set_ylim(bottom=0)
        even_ticks(axes, positions, "positions verified")
        axes.set_title(model)
        parts += _ratio_of_orders(model, ours)
    row[0].set_ylabel("routed experts of one layer, ms")
    legend_of_all(figure, row, list(orders))
    text = f"One layer's experts, {listed(list(orders))}."
    if parts:
        text = (
            f"Token-wise execution takes {listed(parts)} times as long as expert-wise execution of "
            "the same work."
        )
    return Panel(
        svg_of(figure),
        text,
        [
            {
                "model": record["model"],
                "order": record["order"],
                "positions": record["positions"],
                "layer, ms": record["layer_ms"],
                "distinct experts": record.get("distinct"),
            }
            for record in records
        ],
    )


def _spread(records: Records) -> float:
    """Ratio of the longest to the shortest time."""
    times = [record["layer_ms"] for record in records]
    return max(times) / min(times)


def _ratio_of_orders(model: str, records: Records) -> list[str]:
    by_order = {
        order: {record["positions"]: record["layer_ms"] for record in curve}
        for order, curve in grouped(records, "order").items()
    }
    token_wise, expert_wise = (by_order.get(name, {}) for name in ("token-wise", "expert-wise"))
    both = sorted(token_wise.keys() & expert_wise.keys())
    if not both:
        return []
    ratio = token_wise[both[-1]] / expert_wise[both[-1]]
    return [f"{ratio:.2f} ({model}, {both[-1]} positions)"]
