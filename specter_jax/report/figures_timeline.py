"""Figure 9: one iteration as it ran."""

from __future__ import annotations

from typing import Any

from specter_jax.report.style import BLACK, FULL_WIDTH, Panel, colour, grid, listed, places, svg_of

Records = list[dict[str, Any]]
Span = dict[str, Any]

IN_FLIGHT = "in flight"
NAMES = {
    "draft": "draft chunks",
    "host": "snapshots",
    "transfers": "transfers issued",
    IN_FLIGHT: "transfers in flight",
    "commits": "slot writes",
    "verification": "verification",
    "waits": "waits",
}
"""What the runtime's tracks are called here, from top to bottom."""
LEAST_WIDTH = 1 / 800
"""Of the whole: what is shorter is drawn this wide, or it could not be seen."""


def draw_timeline(records: Records) -> Panel:
    """Figure 9: drafting, snapshots, transfers, waits and verification of one iteration."""
    figure, axes = grid(len(records), 1, 2.6, FULL_WIDTH)
    colours = places(NAMES)
    for (panel,), record in zip(axes, records, strict=True):
        rows = _rows(record["spans"])
        names = [name for name in NAMES if name in rows] + [n for n in rows if n not in NAMES]
        total = max(span["end_us"] for span in record["spans"])
        for row, name in enumerate(names):
            place = colours.get(name, len(colours))
            _draw_row(panel, row, rows[name], total, {"color": colour(place), "linewidth": 0})
        panel.set_yticks(range(len(names)), [NAMES.get(name, name) for name in names])
        panel.invert_yaxis()
        panel.set_xlim(0, total / 1e3)
        panel.grid(axis="x", color="#eeeeee", linewidth=0.5)
        panel.set_xlabel("ms since the iteration began")
        names = ("budget", "expert_format")
        parts = [f"depth {record.get('depth')}", *(record.get(name) for name in names)]
        panel.set_title(", ".join([record["model"], *filter(None, parts)]))
        _mark_verification(panel, rows.get("verification", []))
    rows = [row for record in records for row in _table(record)]
    return Panel(svg_of(figure), listed([_sentence(record) for record in records]) + ".", rows)


def _rows(spans: list[Span]) -> dict[str, list[Span]]:
    """Spans by row, transfers in flight apart from their issue."""
    rows: dict[str, list[Span]] = {}
    for span in spans:
        rows.setdefault(IN_FLIGHT if span.get("in_flight") else span["track"], []).append(span)
    return rows


def _draw_row(axes: Any, row: int, spans: list[Span], total: float, style: dict[str, Any]) -> None:
    lanes = _lanes(spans)
    height = 0.8 / max(max(lanes) + 1, 1)
    for span, lane in zip(spans, lanes, strict=True):
        begin = span["begin_us"] / 1e3
        width = max(span["end_us"] - span["begin_us"], total * LEAST_WIDTH) / 1e3
        axes.barh(row - 0.4 + (lane + 0.5) * height, width, height, begin, **style)


def _lanes(spans: list[Span]) -> list[int]:
    """A lane for each span such that none overlap within a lane."""
    ends: list[float] = []
    lanes = []
    for span in spans:
        free = [lane for lane, end in enumerate(ends) if end <= span["begin_us"]]
        if free:
            lane = free[0]
        else:
            lane = len(ends)
            ends.append(0.0)
        ends[lane] = span["end_us"]
        lanes.append(lane)
    return lanes


def _mark_verification(axes: Any, spans: list[Span]) -> None:
    if spans:
        begin = min(span["begin_us"] for span in spans) / 1e3
        axes.axvline(begin, color=BLACK, linewidth=0.8, linestyle="--")


def _length(spans: list[Span]) -> float:
    """Time covered by spans, ms; where they overlap it counts once."""
    covered, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span["begin_us"]):
        covered += max(span["end_us"] - max(span["begin_us"], reached), 0.0)
        reached = max(reached, span["end_us"])
    return covered / 1e3


def _sentence(record: dict[str, Any]) -> str:
    rows = _rows(record["spans"])
    total = _end_us(record["spans"]) / 1e3
    draft, flights = rows.get("draft", []), rows.get(IN_FLIGHT, [])
    drafted_at = max((span["end_us"] for span in draft), default=0.0)
    early = sum(span["begin_us"] < drafted_at for span in flights)
    waits = _length(rows.get("waits", []))
    return (
        f"{record['model']}: of {total:.1f} ms, {len(draft)} draft chunks take "
        f"{_length(draft):.1f} ms, snapshots {_length(rows.get('host', [])):.1f} ms, issuing "
        f"verification {_length(rows.get('verification', [])):.1f} ms and waiting for its routing "
        f"{waits:.1f} ms; {early} of {len(flights)} transfers begin before drafting ends"
    )


def _end_us(spans: list[Span]) -> float:
    """When the host was done; a guess that nobody waits for may still be in flight then."""
    ends = [span["end_us"] for span in spans if not span.get("in_flight")]
    return max(ends or [span["end_us"] for span in spans])


def _table(record: dict[str, Any]) -> Records:
    return [
        {
            "model": record["model"],
            "row": NAMES.get(name, name),
            "spans": len(spans),
            "covers, ms": _length(spans),
        }
        for name, spans in _rows(record["spans"]).items()
    ]
