"""Figures of routing: 2 (match), 3 and 4 (depth), 13 (tasks), 16 (batch)."""

from __future__ import annotations

from typing import Any

import numpy as np

from specter_jax.report.style import (
    GREY,
    Panel,
    bar_style,
    even_ticks,
    grid,
    legend_below,
    line_style,
    listed,
    svg_of,
)

Records = list[dict[str, Any]]


def draw_match(records: Records) -> Panel:
    """Figure 2: how many of the target's experts the draft had named."""
    figure, ((histogram, layers, requests),) = grid(1, 3, 3.0)
    width = 0.8 / len(records)
    for place, record in enumerate(records):
        counts = np.array(record["matched_counts"]) / record["observations"] * 100
        # Models differ in k; what is shown is the share, so bars stand at shares.
        shares = np.arange(len(counts)) / record["top_k"] * 4
        offset = (place - (len(records) - 1) / 2) * width
        histogram.bar(shares + offset, counts, width, label=record["model"], **bar_style(place))
        style = line_style(place)
        numbers = range(1, len(record["per_layer"]) + 1)
        layers.plot(numbers, _percent(record["per_layer"]), label=record["model"], **style)
        values = np.sort(_percent(record["per_request"]))
        spots = place + np.linspace(-0.25, 0.25, len(values))
        requests.plot(spots, values, **(style | {"linestyle": "none"}))
        requests.plot([place - 0.35, place + 0.35], [record["mean"] * 100] * 2, color=GREY)
    histogram.set_yscale("log")
    histogram.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    least = min(histogram.get_ylim()[0], 1.0)
    histogram.set_ylim(10 ** np.floor(np.log10(least)), 100)
    histogram.set_xticks(range(5), ["0", "25", "50", "75", "100"])
    histogram.set_xlabel("experts that match, % of k")
    histogram.set_ylabel("observations, % (log)")
    histogram.set_title("all observations")
    layers.set_xlabel("MoE layer")
    layers.set_ylabel("matching choices, %")
    layers.set_title("mean of each layer")
    requests.set_xticks([])
    requests.set_xlabel("requests of each model, in order")
    requests.set_ylabel("matching choices, %")
    requests.set_title("mean of each request (bar: of all)")
    legend_below(figure, layers)
    means = [f"{record['mean']:.1%} ({record['model']})" for record in records]
    whole = [f"{record['matched_counts'][-1] / record['observations']:.1%}" for record in records]
    return Panel(
        svg_of(figure),
        f"Of the experts that the target chooses, the draft had named {listed(means)} for the same "
        f"position; all k of them in {listed(whole)} of the (position, layer) observations.",
        [
            {
                "model": record["model"],
                "observations": record["observations"],
                "mean": record["mean"],
                "lowest layer": min(record["per_layer"]),
                "lowest request": min(record["per_request"]),
            }
            for record in records
        ],
    )


def draw_distinct(records: Records) -> Panel:
    """Figures 3 and 4: distinct experts per layer over depth."""
    svg = _draw_growth(records, "depth", "depth (depth + 1 positions are verified)")
    growth = []
    for record in records:
        first, last = record["points"][0], record["points"][-1]
        growth.append(
            f"from {first['mean']:.1f} at depth {first['depth']} to {last['mean']:.1f} of "
            f"{record['experts']} at depth {last['depth']} ({record['model']})"
        )
    first, last = records[0]["points"][0], records[0]["points"][-1]
    factor = (last["depth"] + 1) / (first["depth"] + 1)
    return Panel(
        svg,
        f"The distinct experts that a verification needs per layer grow {listed(growth)}, while "
        f"the positions grow {factor:.1f} times.",
        _growth_rows(records, "depth"),
    )


def draw_batch_experts(records: Records) -> Panel | None:
    """Figure 16: distinct experts per layer over batch size; None if no batch could be formed."""
    records = [record for record in records if record["points"]]
    if not records:
        return None
    svg = _draw_growth(records, "batch", "sequences decoded together")
    growth = []
    for record in records:
        first, last = record["points"][0], record["points"][-1]
        growth.append(
            f"{first['mean']:.1f} at batch {first['batch']} and {last['mean']:.1f} of "
            f"{record['experts']} at batch {last['batch']} ({record['model']})"
        )
    depth = records[0]["depth"]
    return Panel(
        svg,
        f"At depth {depth}, a verification needs {listed(growth)} distinct experts per layer; "
        "sequences are joined verification by verification, as a batch advances.",
        _growth_rows(records, "batch"),
    )


def _draw_growth(records: Records, name: str, label: str) -> bytes:
    figure, (row,) = grid(1, len(records), 3.0)
    for place, (axes, record) in enumerate(zip(row, records, strict=True)):
        points = record["points"]
        x = range(len(points))
        style = line_style(place)
        low, high = ([point[key] for point in points] for key in ("p10", "p90"))
        axes.fill_between(
            x, low, high, color=style["color"], alpha=0.2, linewidth=0, label="10th to 90th pct."
        )
        for key, text in (("min", "least and most"), ("max", None)):
            values = [point[key] for point in points]
            axes.plot(x, values, color=GREY, linewidth=0.8, linestyle=":", label=text)
        axes.plot(x, [point["mean"] for point in points], label="mean", **style)
        axes.axhline(record["experts"], color=GREY, linewidth=0.8, linestyle="--", label="all")
        axes.set_ylim(0, record["experts"] * 1.08)
        even_ticks(axes, [point[name] for point in points], label)
        axes.set_title(f"{record['model']}: {record['experts']} experts, top {record['top_k']}")
    row[0].set_ylabel("distinct experts per layer")
    legend_below(figure, row[0])
    return svg_of(figure)


def _growth_rows(records: Records, name: str) -> Records:
    keys = (name, "mean", "p10", "p90", "min", "max", "verifications")
    return [
        {"model": record["model"], **{key: point[key] for key in keys}}
        for record in records
        for point in record["points"]
    ]


def draw_diversity(records: Records) -> Panel:
    """Figure 13: distinct experts per task, and distances between the tasks' expert use."""
    most = max(len(record["tasks"]) for record in records)
    figure, (above, below) = grid(2, len(records), 2.6)
    largest = max(max(map(max, record["distances"])) for record in records) or 1.0
    image = None
    for place, record in enumerate(records):
        tasks = record["tasks"]
        x = np.arange(len(tasks))
        mean = np.array([task["mean"] for task in tasks])
        spans = np.abs([[task["p10"], task["p90"]] for task in tasks] - mean[:, None]).T
        style = line_style(place) | {"linestyle": "none"}
        above[place].errorbar(x, mean, yerr=spans, capsize=3, **style)
        above[place].set_ylim(0, record["experts"])
        above[place].set_title(f"{record['model']}, {record['experts']} experts")
        image = _draw_distances(below[place], record, largest, fontsize=min(7.0, 36 / most))
        for axes in (above[place], below[place]):
            names = [task["task"] for task in tasks]
            axes.set_xticks(x, names, rotation=40, ha="right", fontsize=7)
    above[0].set_ylabel("distinct experts per layer")
    figure.colorbar(image, ax=below, label="Jensen-Shannon distance", shrink=0.9)
    return Panel(svg_of(figure), _diversity_sentence(records), _diversity_rows(records))


def _draw_distances(axes: Any, record: dict[str, Any], largest: float, fontsize: float) -> Any:
    distances = np.array(record["distances"])
    names = [task["task"] for task in record["tasks"]]
    axes.grid(False)
    image = axes.imshow(distances, cmap="cividis", vmin=0, vmax=largest)
    for (i, j), value in np.ndenumerate(distances):
        # On the diagonal stands what chance makes of one task's halves.
        shown = record["halves"][i] if i == j else value
        if shown is not None:
            text = f"({shown:.2f})" if i == j else f"{shown:.2f}"
            colour = "black" if value > 0.55 * largest else "white"
            axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=fontsize)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    return image


def _diversity_sentence(records: Records) -> str:
    parts = []
    for record in records:
        tasks = sorted(record["tasks"], key=lambda task: task["mean"])
        pairs = np.array(record["distances"])[np.triu_indices(len(tasks), 1)]
        text = (
            f"{record['model']} from {tasks[0]['mean']:.1f} ({tasks[0]['task']}) to "
            f"{tasks[-1]['mean']:.1f} ({tasks[-1]['task']})"
        )
        if len(pairs):
            text += f", at distances of {pairs.min():.2f} to {pairs.max():.2f} between tasks"
        parts.append(text)
    return (
        f"Mean distinct experts per layer at depth {records[0]['depth']} (whiskers: 10th to 90th "
        f"percentile) range for {listed(parts)}; in brackets the distance between two halves of "
        "one task, which so few requests give by chance."
    )


def _diversity_rows(records: Records) -> Records:
    return [
        {
            "model": record["model"],
            **{key: task[key] for key in ("task", "requests", "mean", "p10", "p90")},
            "distance of halves": half,
        }
        for record in records
        for task, half in zip(record["tasks"], record["halves"], strict=True)
    ]


def _percent(values: list[float]) -> list[float]:
    return [value * 100 for value in values]
