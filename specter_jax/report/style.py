"""How figures look: colours and marks that survive grey print and colour-blind eyes, and sizes.

Colours are Okabe and Ito's. No two series differ by colour alone: lines have their own marker and
dash, bars their own hatch. Figures are drawn without pyplot: no global state, no display needed.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK, GREY, LIGHT = "#000000", "#666666", "#dddddd"
BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"
PURPLE, ORANGE, SKY = "#CC79A7", "#E69F00", "#56B4E9"

COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
HATCHES = ("", "//", "xx", "--", "\\\\", "++", "||")

# Ours looks the same in every figure, whatever else is compared.
PLACES = {
    "specter": 0,
    "lookahead": 0,
    "sp-moe": 1,
    "sp-l": 1,
    "mo-sm": 2,
    "sp-e": 2,
    "specmoeoff": 3,
    "lru-s": 3,
    "mo": 4,
    "lru": 4,
    "transformers": 5,
    "expert-wise": 0,
    "token-wise": 1,
}

WIDTHS = {1: 5.2, 2: 8.5}
FULL_WIDTH = 10.0
"""Of a figure, inches, by columns of axes; shown at 96 pixels an inch or scaled to the page."""

_MORE_DIGITS = re.compile(rb"(?<=[ \"(,-])(\d+\.\d\d)\d+(?=[ \")\n,])")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PARAMETERS = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    # Identical input gives identical files.
    "svg.hashsalt": "specter",
}


@dataclasses.dataclass(frozen=True)
class Panel:
    """One drawn figure: a picture, the sentence that says what it shows, and its numbers."""

    svg: bytes
    sentence: str
    rows: list[dict[str, Any]]

    @property
    def data_uri(self) -> str:
        """The picture as the address of an image that needs no file."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg).decode("ascii")


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Everything inside is drawn in this module's style."""
    import matplotlib

    with matplotlib.rc_context(_PARAMETERS):
        yield


def grid(
    rows: int, columns: int, height: float, width: float | None = None, **options: Any
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of `rows` x `columns` axes, `height` inches each row; axes by row and column."""
    from matplotlib.figure import Figure

    width = width or WIDTHS.get(columns, FULL_WIDTH)
    figure = Figure(figsize=(width, height * rows + 0.3), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for row in axes:
        for one in row:
            one.grid(axis="y", color=LIGHT, linewidth=0.6)
            one.set_axisbelow(True)
    return figure, [list(row) for row in axes]


def svg_of(figure: Figure) -> bytes:
    """The figure as SVG, without a date; coordinates to a hundredth of a point."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _MORE_DIGITS.sub(rb"\1", buffer.getvalue())


def colour(place: int) -> str:
    """The colour of the series at this place."""
    return COLOURS[place % len(COLOURS)]


def line_style(place: int) -> dict[str, Any]:
    """Colour, marker and dash of the series at this place."""
    return {
        "color": colour(place),
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": DASHES[place % len(DASHES)],
        "markersize": 5,
        "linewidth": 1.5,
    }


def bar_style(place: int) -> dict[str, Any]:
    """Colour and hatch of the bars at this place."""
    return {
        "facecolor": colour(place),
        "hatch": HATCHES[place % len(HATCHES)],
        "edgecolor": "white",
        "linewidth": 0.5,
    }


def places(names: Iterable[str]) -> dict[str, int]:
    """A place for each name: the fixed one of its first word if no other has it, else a free one.

    "specter, nested" takes the place of "specter", "transformers (random weights)" likewise.
    """
    names = list(dict.fromkeys(names))
    found: dict[str, int] = {}
    for name in names:
        place = PLACES.get(name.partition(",")[0].partition(" (")[0])
        if place is not None and place not in found.values():
            found[name] = place
    free = (place for place in range(1000) if place not in found.values())
    for name in names:
        if name not in found:
            found[name] = next(free)
    return {name: found[name] for name in names}


def even_ticks(axes: Axes, values: Sequence[Any], label: str) -> None:
    """Marks values that stand at equal distances 0, 1, ... on the x axis."""
    axes.set_xticks(range(len(values)), [str(value) for value in values])
    axes.set_xlabel(label)


def log_axis(axes: Axes, axis: str = "y") -> None:
    """Makes an axis logarithmic, with plain numbers at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import LogLocator, NullLocator

    getattr(axes, f"set_{axis}scale")("log")
    scale = getattr(axes, f"{axis}axis")
    scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
    scale.set_major_formatter(lambda value, _: f"{value:g}")
    scale.set_minor_locator(NullLocator())


def mark_log(axes: Axes) -> None:
    """Says in the corner that an axis is logarithmic, where other panels' are not."""
    axes.margins(y=0.15)
    axes.text(0.01, 0.99, "log", transform=axes.transAxes, va="top", fontsize=7, color=GREY)


def legend_below(figure: Figure, axes: Axes, columns: int = 7) -> None:
    """One legend for all axes, of the series of one of them, below the figure."""
    legend_of_all(figure, [axes], axes.get_legend_handles_labels()[1], columns)


def legend_of_all(
    figure: Figure, axes: Iterable[Axes], order: Sequence[str], columns: int = 7
) -> None:
    """One legend below the figure, of the series of all axes, each once, in this order."""
    found: dict[str, Any] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    names = [name for name in order if name in found]
    figure.legend(
        [found[name] for name in names],
        names,
        loc="outside lower center",
        ncols=min(columns, max(len(names), 1)),
    )


def grouped(records: Iterable[dict[str, Any]], *names: str) -> dict[Any, list[dict[str, Any]]]:
    """Records by the values of some of their fields, in order of appearance; one name: no tuple."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for record in records:
        key = tuple(record.get(name) for name in names)
        groups.setdefault(key[0] if len(names) == 1 else key, []).append(record)
    return groups


def budget_order(name: str) -> tuple[float, str]:
    """Sort key of budgets such as "16 GiB": by number, names without one last."""
    number = _NUMBER.match(name)
    return (float(number.group()) if number else float("inf"), name)


def listed(parts: Sequence[str]) -> str:
    """Parts of a sentence joined by commas and a final "and"."""
    if len(parts) < 2:
        return "".join(parts)
    return ", ".join(parts[:-1]) + " and " + parts[-1]
