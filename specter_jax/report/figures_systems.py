"""Figures that compare systems and policies: 14, 15, 17, and the planner against measurement."""

from __future__ import annotations

from typing import Any

import numpy as np

from specter_jax.report.style import (
    BLACK,
    FULL_WIDTH,
    GREY,
    Panel,
    bar_style,
    even_ticks,
    grid,
    grouped,
    legend_below,
    line_style,
    listed,
    log_axis,
    places,
    svg_of,
)

Records = list[dict[str, Any]]

WIDE_RANGE = 30.0
"""Ratio of the largest to the smallest bar above which bars are shown on a logarithmic axis."""
ALL = "geometric mean"


def draw_end_to_end(records: Records) -> Panel | None:
    """Figure 14: time per token of models x data sets x budgets x systems."""
    records = [record for record in records if record.get("tpot_ms")]
    if not records:
        return None
    models, budgets = list(grouped(records, "model")), list(grouped(records, "budget"))
    where = places(sorted({record["system"] for record in records}, key=_order))
    figure, axes = grid(len(models), len(budgets), 2.2, FULL_WIDTH)
    for row, model in zip(axes, models, strict=True):
        for panel, budget in zip(row, budgets, strict=True):
            ours = [r for r in records if (r["model"], r["budget"]) == (model, budget)]
            if ours:
                _end_to_end_bars(panel, ours, where)
            else:
                panel.text(0.5, 0.5, "not measured", ha="center", transform=panel.transAxes)
            panel.set_title(f"{model}, {budget}")
        row[0].set_ylabel("time per token, ms")
    handles = [panel for row in axes for panel in row if panel.get_legend_handles_labels()[0]]
    fullest = max(handles, key=lambda panel: len(panel.get_legend_handles_labels()[0]))
    legend_below(figure, fullest)
    return Panel(
        svg_of(figure),
        _end_to_end_sentence(records),
        [
            {
                "model": record["model"],
                "budget": record["budget"],
                "dataset": record["dataset"],
                "system": record["system"],
                "depth": record.get("depth"),
                "TPOT, ms": record["tpot_ms"],
                "hit rate": (record.get("stats") or {}).get("hit_rate"),
                "acceptance": (record.get("stats") or {}).get("acceptance_rate"),
            }
            for record in records
        ],
    )


def _is_ours(system: str) -> bool:
    return system.partition(",")[0] == "specter"


def _order(system: str) -> tuple[bool, str]:
    """Ours last."""
    return _is_ours(system), system


def _end_to_end_bars(axes: Any, records: Records, where: dict[str, int]) -> None:
    datasets = list(grouped(records, "dataset"))
    systems = [name for name in where if any(r["system"] == name for r in records)]
    groups = [*datasets, ALL] if len(datasets) > 1 else datasets
    width = 0.84 / len(systems)
    for place, system in enumerate(systems):
        times = {r["dataset"]: r["tpot_ms"] for r in records if r["system"] == system}
        if len(times) == len(datasets) > 1:
            times[ALL] = _geometric_mean(list(times.values()))
        x = np.array([groups.index(name) for name in times])
        x = x + (place - (len(systems) - 1) / 2) * width
        axes.bar(x, list(times.values()), width, label=system, **bar_style(where[system]))
    values = [record["tpot_ms"] for record in records]
    if max(values) > WIDE_RANGE * min(values):
        log_axis(axes)
    if len(datasets) > 1:
        axes.axvline(len(datasets) - 0.5, color=GREY, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(groups)), groups, rotation=35, ha="right", fontsize=7)


def _end_to_end_sentence(records: Records) -> str:
    """Systems on the geometric mean over the cells that all of them ran in.

    Where there is no such cell, those that ran in the fewest are left aside until there is one.
    """
    cells = grouped(records, "model", "budget", "dataset")
    every = sorted({record["system"] for record in records}, key=_order)
    systems, common = every, _cells_of_all(cells, every)
    while not common and len(systems) > 2:
        counts = [sum(r["system"] == name for r in records) for name in systems]
        # Of equals the first: ours come last.
        rarest = systems[counts.index(min(counts))]
        systems = [name for name in systems if name != rarest]
        common = _cells_of_all(cells, systems)
    if not common:
        return f"Time per output token of {listed(every)}; no cell was run by all of them."
    means = {
        system: _geometric_mean(
            [r["tpot_ms"] for cell in common for r in cell if r["system"] == system]
        )
        for system in systems
    }
    ranked = sorted(means, key=means.get)
    shown = listed([f"{name} {means[name]:.2f} ms" for name in ranked])
    who = "all systems" if systems == every else f"these {len(systems)} systems"
    text = f"Geometric mean over the {len(common)} cells that {who} ran in: {shown}"
    ours = [name for name in ranked if _is_ours(name)]
    rivals = [name for name in ranked if not _is_ours(name)]
    if ours and rivals:
        ratio = means[ours[0]] / means[rivals[0]]
        text += (
            f"; {ours[0]} takes {ratio:.2f} times as long as {rivals[0]}, the best of the others"
        )
    return f"{text}."


def _cells_of_all(cells: dict[Any, Records], systems: list[str]) -> list[Records]:
    """Those that every one of the systems ran in."""
    return [cell for cell in cells.values() if {r["system"] for r in cell} >= set(systems)]


def _geometric_mean(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def draw_batch(records: Records) -> Panel:
    """Figure 15: time per token and throughput over batch size."""
    groups = grouped(records, "model", "budget")
    where = places(record["system"] for record in records)
    figure, axes = grid(len(groups), 2, 2.8)
    parts = []
    for (times, throughput), ((model, budget), ours) in zip(axes, groups.items(), strict=True):
        batches = sorted({record["batch"] for record in ours})
        for (system, _), curve in grouped(ours, "system", "dataset").items():
            curve = sorted(curve, key=lambda record: record["batch"])
            for panel, field in ((times, "tpot_ms"), (throughput, "tokens_per_s")):
                known = [(batches.index(r["batch"]), r[field]) for r in curve if r.get(field)]
                if known:
                    panel.plot(*zip(*known, strict=True), label=system, **line_style(where[system]))
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
            f"({best['system']}, batch {best['batch']})"
        )
    legend_below(figure, axes[0][0])
    return Panel(
        svg_of(figure),
        f"The highest throughput is {listed(parts)}; time per token is of one sequence.",
        [
            {
                "model": record["model"],
                "budget": record["budget"],
                "system": record["system"],
                "batch": record["batch"],
                "depth": record.get("depth"),
                "TPOT, ms": record["tpot_ms"],
                "tokens per s": record["tokens_per_s"],
            }
            for record in records
        ],
    )


def draw_hit_rate(records: Records) -> Panel:
    """Figure 17: expert uses that never waited, by policy and budget."""
    models = grouped(records, "model")
    order = ("lru", "lru-s", "sp-e", "sp-l", "lookahead")
    names = [name for name in order if any(r["policy"] == name for r in records)]
    names += [name for name in grouped(records, "policy") if name not in names]
    where = places(names)
    figure, (row,) = grid(1, len(models), 3.0, sharey=True)
    for axes, (model, ours) in zip(row, models.items(), strict=True):
        budgets = list(grouped(ours, "budget"))
        width = 0.84 / len(names)
        for place, policy in enumerate(names):
            mine = grouped([r for r in ours if r["policy"] == policy], "budget")
            x = np.array([budgets.index(budget) for budget in mine], float)
            x += (place - (len(names) - 1) / 2) * width
            rates = [_mean([r["hit_rate"] for r in found]) * 100 for found in mine.values()]
            resident = [_mean([r["resident"] for r in found]) * 100 for found in mine.values()]
            bars = axes.bar(x, rates, width, label=policy, **bar_style(where[policy]))
            axes.bar_label(bars, [f"{rate:.0f}" for rate in rates], fontsize=6, padding=1)
            axes.hlines(resident, x - width / 2, x + width / 2, color=BLACK, linewidth=1.2)
        axes.set_xticks(range(len(budgets)), budgets)
        axes.set_title(model)
        axes.set_ylim(0, 108)
    row[0].set_ylabel("expert uses without a wait, %")
    legend_below(figure, row[0])
    return Panel(svg_of(figure), _hit_rate_sentence(records), _hit_rate_rows(records))


def _hit_rate_sentence(records: Records) -> str:
    tightest = {model: ours[0]["budget"] for model, ours in grouped(records, "model").items()}
    parts = []
    for model, budget in tightest.items():
        ours = [r for r in records if (r["model"], r["budget"]) == (model, budget)]
        rates = {
            policy: _mean([r["hit_rate"] for r in found])
            for policy, found in grouped(ours, "policy").items()
        }
        best = max(rates, key=rates.get)
        others = listed([f"{name} {rates[name]:.1%}" for name in rates if name != best])
        parts.append(f"{best} {rates[best]:.1%} against {others} ({model}, {budget})")
    return (
        f"Share of expert uses that never wait: {'; '.join(parts)}; the black line is the part "
        "that was resident before the iteration, the rest was prefetched in time."
    )


def _hit_rate_rows(records: Records) -> Records:
    keys = ("model", "budget", "policy", "depth", "hit_rate", "resident", "prefetched", "waited")
    return [{key: record.get(key) for key in keys} for record in records]


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
                "budget": record.get("budget"),
                "dataset": record.get("dataset"),
                "system": record["system"],
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
