"""Figures that compare systems and policies: 15, 17, and the planner against measurement."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specter_jax.report.panels import (
    MAX_COLUMNS,
    budgets_of,
    by_experts,
    filled,
    place_name,
    system_of,
)
from specter_jax.report.sources import budget_of, format_of
from specter_jax.report.style import (
    BLACK,
    GREY,
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
    places,
    svg_of,
)

Records = list[dict[str, Any]]

HOLLOW = {"markerfacecolor": "white", "linestyle": "--"}
"""Beside solid lines and marks: the second format of the experts."""


def draw_batch(records: Records) -> Panel:
    """Figure 15: time per token and throughput over batch size.

    Colours and marks tell systems; where there are two formats of the experts, hollow marks and
    dashes tell the second.
    """
    groups: dict[tuple[str, str], Records] = {}
    for record in records:
        groups.setdefault((record["model"], budget_of(record) or ""), []).append(record)
    styles = _batch_styles(records)
    figure, axes = grid(len(groups), 2, 2.8)
    parts = []
    for (times, throughput), ((model, budget), ours) in zip(axes, groups.items(), strict=True):
        batches = sorted({record["batch"] for record in ours})
        for curve in grouped(ours, "system", "expert_format", "dataset", "depth").values():
            curve = sorted(curve, key=lambda record: record["batch"])
            label = _batch_label(curve[0])
            for panel, field in ((times, "tpot_ms"), (throughput, "tokens_per_s")):
                known = [(batches.index(r["batch"]), r[field]) for r in curve if r.get(field)]
                if known:
                    panel.plot(*zip(*known, strict=True), label=label, **styles[label])
        for panel, label in ((times, "time per token, ms"), (throughput, "tokens per second")):
            panel.set_ylim(bottom=0)
            panel.set_ylabel(label)
            panel.set_title(f"{model}, {budget}")
            even_ticks(panel, batches, "sequences decoded together")
        best = max(
            (r for r in ours if r.get("tokens_per_s")), key=lambda record: record["tokens_per_s"]
        )
        parts.append(
            f"{best['tokens_per_s']:,.0f} tokens per second on {model} with {budget} "
            f"({_batch_label(best)}, batch {best['batch']})"
        )
    legend_of_all(figure, [panel for row in axes for panel in row], list(styles), columns=4)
    return Panel(
        svg_of(figure),
        f"The highest throughput is {listed(parts)}; time per token is of one sequence.",
        filled(
            [
                {
                    "model": record["model"],
                    "experts": format_of(record),
                    "budget": budget_of(record),
                    "system": system_of(record),
                    "batch": record["batch"],
                    "depth": record.get("depth"),
                    "TPOT, ms": record["tpot_ms"],
                    "tokens per s": record["tokens_per_s"],
                }
                for record in records
            ]
        ),
    )


def _batch_label(record: dict[str, Any]) -> str:
    return ", ".join(filter(None, (system_of(record), format_of(record))))


def _batch_styles(records: Records) -> dict[str, dict[str, Any]]:
    """Style of every curve by its label, ordered by system."""
    where = places(system_of(record) for record in records)
    formats = sorted({format_of(record) or "" for record in records})
    styles = {}
    for record in sorted(records, key=lambda r: (where[system_of(r)], format_of(r) or "")):
        second = formats.index(format_of(record) or "") % 2
        style = line_style(where[system_of(record)]) | {"linestyle": "-"}
        styles[_batch_label(record)] = style | (HOLLOW if second else {})
    return styles


def draw_hit_rate(records: Records) -> Panel:
    """Figure 17: expert uses that never waited, by policy and budget; models and formats apart."""
    found = by_experts(records)
    order = ("lru", "lru-s", "sp-e", "sp-l", "lookahead")
    names = [name for name in order if any(r["policy"] == name for r in records)]
    names += [name for name in grouped(records, "policy") if name not in names]
    where = places(names)
    columns = min(len(found), MAX_COLUMNS)
    figure, rows = grid(math.ceil(len(found) / columns), columns, 2.6, sharey=True)
    every = [axes for row in rows for axes in row]
    for axes, (place, ours) in zip(every, found.items(), strict=False):
        _hit_rate_bars(axes, ours, where)
        axes.set_title(place_name(place))
    for axes in every[len(found) :]:
        axes.set_axis_off()
    for row in rows:
        row[0].set_ylabel("expert uses without a wait, %")
    legend_of_all(figure, every, names)
    return Panel(svg_of(figure), _hit_rate_sentence(records), _hit_rate_rows(records))


def _hit_rate_bars(axes: Any, records: Records, where: dict[str, int]) -> None:
    budgets = budgets_of(records)
    names = [name for name in where if any(r["policy"] == name for r in records)]
    width = 0.84 / len(names)
    for place, policy in enumerate(names):
        mine = [r for r in records if r["policy"] == policy]
        by_budget = {
            budget: ours
            for budget in budgets
            if (ours := [r for r in mine if (budget_of(r) or "") == budget])
        }
        x = np.array([budgets.index(budget) for budget in by_budget], float)
        x += (place - (len(names) - 1) / 2) * width
        rates = [_mean([r["hit_rate"] for r in found]) * 100 for found in by_budget.values()]
        resident = [_mean([r["resident"] for r in found]) * 100 for found in by_budget.values()]
        bars = axes.bar(x, rates, width, label=policy, **bar_style(where[policy]))
        axes.bar_label(bars, [f"{rate:.0f}" for rate in rates], fontsize=6, padding=1)
        axes.hlines(resident, x - width / 2, x + width / 2, color=BLACK, linewidth=1.2)
    axes.set_xticks(range(len(budgets)), budgets)
    axes.set_ylim(0, 108)


def _hit_rate_sentence(records: Records) -> str:
    parts = []
    for place, found in by_experts(records).items():
        budget = budgets_of(found)[0]
        ours = [r for r in found if (budget_of(r) or "") == budget]
        rates = {
            policy: _mean([r["hit_rate"] for r in of_policy])
            for policy, of_policy in grouped(ours, "policy").items()
        }
        best = max(rates, key=rates.get)
        others = listed([f"{name} {rates[name]:.1%}" for name in rates if name != best])
        against = f" against {others}" if others else ""
        parts.append(f"{best} {rates[best]:.1%}{against} ({place_name(place)}, {budget})")
    return (
        f"Share of expert uses that never wait: {'; '.join(parts)}; the black line is the part "
        "that was resident before the iteration, the rest was prefetched in time."
    )


def _hit_rate_rows(records: Records) -> Records:
    keys = ("dataset", "policy", "depth", "hit_rate", "resident", "prefetched", "waited")
    return filled(
        [
            {"model": r["model"], "experts": format_of(r), "budget": budget_of(r)}
            | {key: r.get(key) for key in keys}
            for r in records
        ]
    )


def _mean(values: list[float]) -> float:
    return float(np.mean(values))


def draw_planner(records: Records) -> Panel:
    """Predicted against measured time per token."""
    figure, (row,) = grid(1, 2, 4.0)
    scatter, bars = row
    where = places(record["system"] for record in records)
    for system, ours in grouped(records, "system").items():
        style = line_style(where[system]) | {"linestyle": "none"}
        pairs = [(r["measured_tpot_ms"], r["predicted_tpot_ms"]) for r in ours]
        scatter.plot(*zip(*pairs, strict=True), label=system, **style)
    times = [r[name] for r in records for name in ("measured_tpot_ms", "predicted_tpot_ms")]
    span = np.array([min(times) * 0.9, max(times) * 1.1])
    scatter.plot(span, span, color=BLACK, linewidth=0.8, label="equal")
    scatter.fill_between(span, span * 0.8, span * 1.2, color=GREY, alpha=0.2, label="within 20 %")
    log_axis(scatter, "x")
    log_axis(scatter, "y")
    scatter.set_xlabel("measured time per token, ms")
    scatter.set_ylabel("predicted time per token, ms")
    errors = {
        system: [_error(r) for r in ours] for system, ours in grouped(records, "system").items()
    }
    for place, (system, values) in enumerate(errors.items()):
        bars.bar(place, _mean(values) * 100, 0.7, **bar_style(where[system]))
    bars.axhline(20, color=BLACK, linewidth=0.8, linestyle="--")
    bars.set_xticks(range(len(errors)), list(errors))
    bars.set_ylabel("mean error of prediction, %")
    legend_below(figure, scatter)
    every = [error for values in errors.values() for error in values]
    return Panel(
        svg_of(figure),
        f"On the vertical axis predicted by the planner, not measured: over {len(every)} cells it "
        f"is off by {_mean(every):.0%} on average and {max(every):.0%} at most.",
        [
            {
                "model": record["model"],
                "experts": format_of(record),
                "budget": record.get("budget"),
                "dataset": record.get("dataset"),
                "system": record["system"],
                "depth": record.get("depth"),
                "predicted TPOT, ms": record["predicted_tpot_ms"],
                "measured TPOT, ms": record["measured_tpot_ms"],
                "error": _error(record),
            }
            for record in records
        ],
    )


def _error(record: dict[str, Any]) -> float:
    """Relative error of the prediction."""
    return abs(record["predicted_tpot_ms"] / record["measured_tpot_ms"] - 1)
