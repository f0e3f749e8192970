"""The figure of `specter profile`, in the report's colours."""

import os
from typing import TYPE_CHECKING

from specter_jax.errors import InvalidRequestError
from specter_jax.report.style import BLUE, GREEN, GREY, LIGHT, VERMILION

if TYPE_CHECKING:
    from specter_jax.profile import Profile

FORMATS = ("svg", "png", "pdf")
INSTALL_HINT = "matplotlib is not installed; install it with: pip install matplotlib"


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raises InvalidRequestError if `plot_profile` could not draw to this name."""
    ending = os.fspath(path).rpartition(".")[2].lower()
    if ending not in FORMATS:
        raise InvalidRequestError(
            f"{path}: cannot draw to this kind of file; expected .{', .'.join(FORMATS)}"
        )
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise InvalidRequestError(INSTALL_HINT) from error


def plot_profile(profile: "Profile", path: str | os.PathLike[str]) -> None:
    """Draw time per token, working set and acceptance over depth to an SVG, PNG or PDF file.

    Raises:
        InvalidRequestError: another kind of file, or matplotlib is missing.
        OSError: the file cannot be written.
    """
    check_plot(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.4), layout="constrained")
    time, working_set, acceptance = figure.subplots(1, 3)
    depths = [point.depth for point in profile.points]
    # Depths double, so they stand at equal distances.
    places = list(range(len(depths)))
    for axes in (time, working_set, acceptance):
        axes.set_xticks(places, [str(depth) if depth else "0\nplain" for depth in depths])
        axes.set_xlabel("depth (tokens drafted)")
        axes.grid(axis="y", color=LIGHT, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)

    times = [point.tpot_ms for point in profile.points]
    best = times.index(min(times))
    time.plot(places, times, color=BLUE, marker="o")
    time.plot(
        places[best], times[best], color=VERMILION, marker="*", markersize=15, linestyle="none"
    )
    time.set_ylim(0, max(times) * 1.1)
    # Told here: beside the star it would lie on the line or outside of the frame.
    time.set_title(f"time per output token, ms (best: {depths[best]})")

    experts = [point.experts_per_layer for point in profile.points]
    working_set.plot(places, experts, color=GREEN, marker="s")
    working_set.axhline(profile.num_experts, color=GREY, linestyle="--", linewidth=1)
    working_set.annotate(
        f"all {profile.num_experts}",
        (0, profile.num_experts),
        textcoords="offset points",
        xytext=(0, 4),
        color=GREY,
    )
    working_set.set_ylim(0, profile.num_experts * 1.15)
    working_set.set_title("distinct experts per layer")

    drafted = [(place, p) for place, p in zip(places, profile.points, strict=True) if p.depth]
    rates = [(place, p.acceptance_rate) for place, p in drafted if p.acceptance_rate is not None]
    acceptance.plot(
        *zip(*rates, strict=True), color=VERMILION, marker="^", label="judged tokens accepted"
    )
    hits = [
        (place, p.hit_rate)
        for place, p in zip(places, profile.points, strict=True)
        if p.hit_rate is not None
    ]
    acceptance.plot(
        *zip(*hits, strict=True),
        color=BLUE,
        marker="o",
        linestyle="--",
        label="expert uses without a wait",
    )
    acceptance.set_ylim(0, 1.05)
    acceptance.set_title("acceptance and hit rate")
    acceptance.legend(frameon=False, loc="lower left", fontsize="small")

    total = f"{profile.expert_slots} expert slots"
    figure.suptitle(f"{profile.family}, {total}, {profile.policy}, {profile.device}", fontsize=10)
    figure.savefig(path, dpi=150)
