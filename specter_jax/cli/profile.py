"""`specter profile`: time per token, working set and acceptance over depth; a table and a plot."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from specter_jax.cli.session import (
    Progress,
    check_distinct,
    check_model,
    check_output,
    load_model,
    prepare_environment,
    prompts_of,
)
from specter_jax.errors import InvalidRequestError
from specter_jax.profile import profile, require_measurable, require_speculative
from specter_jax.sizes import format_size

if TYPE_CHECKING:
    from specter_jax.profile import Profile

DEFAULT_PLOT = "specter-profile.svg"
# One of each kind of text; a profile over one kind only would say little.
DEFAULT_PROMPTS = (
    "The history of the city begins with a small settlement by the river, where",
    "Question: A baker sells 24 loaves in the morning and half as many in the afternoon. "
    "How many loaves does she sell in all?\nAnswer:",
    'def read_lines(path):\n    """Return the lines of a file."""\n',
)


def run(options: argparse.Namespace) -> None:
    """Measure and report; raises SpecterError or OSError."""
    prompts = prompts_of(options) or list(DEFAULT_PROMPTS)
    check_model(options.model)
    require_speculative(options.policy)
    require_measurable(options.max_new_tokens)
    plot = _plot_path(options)
    prepare_environment()
    options.batch_size = min(options.batch_size, len(prompts))
    model = load_model(options)
    with Progress() as progress:
        measured = profile(
            model,
            prompts,
            max_new_tokens=options.max_new_tokens,
            policy=options.policy,
            progress=progress,
        )
    if options.json:
        print(json.dumps(measured.to_dict(), indent=1))
    else:
        _print_table(measured)
    if plot is not None:
        from specter_jax.plots import plot_profile

        plot_profile(measured, plot)
        print(f"plot: {plot}", file=sys.stderr)


def _plot_path(options: argparse.Namespace) -> str | None:
    """Where to draw; None, with a note, if nobody asked and it cannot be done."""
    from specter_jax.plots import check_plot

    path = DEFAULT_PLOT if options.plot is None else options.plot
    try:
        check_plot(path)
        check_output("--plot", path)
        check_distinct({"--prompts": options.prompts, "--plot": path})
    except InvalidRequestError as error:
        if options.plot is not None:
            raise
        print(f"no plot: {error}", file=sys.stderr)
        return None
    return path


def _print_table(measured: "Profile") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{measured.family}, {measured.expert_slots} expert slots, {measured.policy}, "
        f"{measured.device}",
        title_justify="left",
    )
    headings = (
        "depth",
        "time per\ntoken",
        "drafted\naccepted",
        "tokens per\niteration",
        f"experts per\nlayer of {measured.num_experts}",
        "hit\nrate",
        "loaded per\ntoken",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for point in measured.points:
        table.add_row(
            str(point.depth),
            f"{point.tpot_ms:.2f} ms",
            "-" if point.acceptance_rate is None else f"{point.acceptance_rate:.1%}",
            f"{point.tokens_per_iteration:.2f}",
            f"{point.experts_per_layer:.1f}",
            "-" if point.hit_rate is None else f"{point.hit_rate:.1%}",
            format_size(round(point.bytes_per_token)),
            style="bold" if point == measured.best else "",
        )
    Console().print(table)
