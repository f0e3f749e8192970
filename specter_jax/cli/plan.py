"""`specter plan`: predicted time per token, best depth and hit rate on hardware not at hand."""

import argparse
import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING

from specter_jax.cli.plan_arguments import DEFAULT_TEXT
from specter_jax.cli.session import (
    Progress,
    check_distinct,
    check_model,
    check_output,
    prepare_environment,
    prompts_of,
)
from specter_jax.errors import BudgetError, InvalidRequestError
from specter_jax.planner.calibration import DEFAULT_CALIBRATION, load_calibration

if TYPE_CHECKING:
    from specter_jax.planner.model import PlannedModel
    from specter_jax.planner.predict import Cell, Prediction
    from specter_jax.planner.timing import Hardware
    from specter_jax.planner.traces import RoutingTrace

_WIDEST = 1000
MAX_BUDGETS = 6
"""Rows without --gpu-memory: the largest of the usual sizes that fit the card."""


def run(options: argparse.Namespace) -> None:
    """Predict and report; raises SpecterError or OSError."""
    check_model(options.model)
    _check_routing(options)
    calibration = load_calibration(options.calibration or DEFAULT_CALIBRATION)
    if options.record is None and "jax" not in sys.modules:
        # Nothing here needs a GPU, and a JAX that finds one takes memory on it.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    prepare_environment()
    from specter_jax.controller import DEPTH_BUCKETS
    from specter_jax.planner.model import planned_model
    from specter_jax.planner.predict import check_request, predict
    from specter_jax.planner.traces import save_trace

    hardware = _hardware(options)
    model = planned_model(options.model, calibration, options.expert_format)
    # Recording takes minutes: all that can be refused is, before it.
    budgets = _budgets(options, model)
    check_request(model, budgets=budgets, policy=options.policy, max_context=options.max_context)
    with contextlib.ExitStack() as at_end:
        with Progress() as progress:
            trace = _trace(options, model, progress)
            if options.record is not None:
                # After the results, which a full disk must not lose; though there be none.
                at_end.callback(save_trace, trace, options.record)
            prediction = predict(
                model,
                trace.select(options.num_prompts, options.max_new_tokens),
                hardware,
                calibration,
                budgets=budgets,
                depths=options.depth or DEPTH_BUCKETS,
                policy=options.policy,
                max_context=options.max_context,
                progress=progress,
            )
        if options.json:
            print(json.dumps(prediction.to_dict(), indent=1))
        else:
            _print_table(prediction, options)


def _check_routing(options: argparse.Namespace) -> None:
    """Raises InvalidRequestError for options that contradict where routing comes from."""
    check_output("--record", options.record)
    if options.record is None and (options.prompt or options.prompts):
        raise InvalidRequestError(
            "--prompt and --prompts are what --record runs the model on; give it too, or leave them"
        )
    if options.trace is None and options.text != DEFAULT_TEXT:
        raise InvalidRequestError(
            f"--text {options.text} needs --trace: the package's traces and those that --record "
            f"makes have {DEFAULT_TEXT} text only"
        )
    inputs = {"--prompts": options.prompts, "--calibration": options.calibration}
    check_distinct({**inputs, "--record": options.record})


def _hardware(options: argparse.Namespace) -> "Hardware":
    """Nominal figures, a card's where none are given."""
    from specter_jax.planner.timing import Hardware

    card, bandwidth, link = options.card, options.bandwidth, options.link
    if card is None and (bandwidth is None or link is None):
        raise InvalidRequestError("no hardware named: give --card, or --bandwidth and --link")
    return Hardware(
        bandwidth=(card.bandwidth if bandwidth is None else bandwidth) * 1e12,
        link=(card.link if link is None else link) * 1e9,
    )


def _budgets(options: argparse.Namespace, model: "PlannedModel") -> list[int]:
    from specter_jax.info import USUAL_BUDGETS_GIB
    from specter_jax.planner.predict import feasible

    if options.gpu_memory:
        return sorted(set(options.gpu_memory))
    if options.card is None:
        raise InvalidRequestError("no memory budget: give --gpu-memory, or --card")
    most = options.card.memory_gib
    sizes = [gib for gib in USUAL_BUDGETS_GIB if gib < most] + [most]
    found = feasible(model, [round(gib * 2**30) for gib in sizes], options.max_context)
    if not found:
        raise BudgetError(
            f"{options.card.title} has {most:g} GiB, which cannot hold this model's shared "
            "parameters and 4-bit experts"
        )
    return found[-MAX_BUDGETS:]


def _trace(
    options: argparse.Namespace, model: "PlannedModel", progress: Progress
) -> "RoutingTrace":
    """From a file, recorded here, or from the package."""
    from specter_jax.planner.traces import bundled_trace, load_trace

    if options.trace is not None:
        return load_trace(options.trace, options.text)
    if options.record is None:
        return bundled_trace(model.config)
    if not model.has_weights:
        raise InvalidRequestError(f"{model.path} has no weights to record from: convert it first")
    from specter_jax.cli.profile import DEFAULT_PROMPTS
    from specter_jax.model import load
    from specter_jax.planner.record import prompts_to_record, record_trace

    prompts = (prompts_of(options) or list(DEFAULT_PROMPTS))[: options.num_prompts]
    prompts_to_record(
        model.path,
        prompts,
        max_new_tokens=options.max_new_tokens,
        max_context=model.context(options.max_context),
    )
    return record_trace(
        load(model.path, max_context=options.max_context, progress=progress),
        prompts,
        max_new_tokens=options.max_new_tokens,
        source=f"recorded from {model.path.name}",
    )


def _print_table(prediction: "Prediction", options: argparse.Namespace) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    model, hardware = prediction.model, prediction.hardware
    where = "" if options.card is None else f"{options.card.title}: "
    table = Table(
        title=f"Predicted time per token in ms, {model.config.family}, {model.expert_format} "
        f"experts, {prediction.policy}\n{where}{hardware.bandwidth / 1e12:g} TB/s, link "
        f"{hardware.link / 1e9:g} GB/s",
        caption="K is the depth; hit rate and loaded MiB a token are those at the best one.\n"
        "All figures are predicted, none is measured.\n"
        f"Routing: {prediction.trace.source}.\n"
        f"Costs: {prediction.calibration.source}.",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    depths = [cell.depth for cell in prediction.at(prediction.budgets[0])]
    headings = ("GiB", "slots", *(f"K={depth}" for depth in depths))
    for heading in (*headings, "best", "hits", "MiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for budget in prediction.budgets:
        best = prediction.best(budget)
        stats = best.stats
        table.add_row(
            f"{budget / 2**30:g}",
            f"{best.expert_slots:,}",
            *(_time(cell, best) for cell in prediction.at(budget)),
            str(best.depth),
            "-" if stats.hit_rate is None else f"{stats.hit_rate:.1%}",
            f"{stats.bytes_host_to_device / stats.new_tokens / 2**20:,.0f}",
        )
    console = Console()
    # Lines that are too long wrap; a figure that is cut off would be lost.
    needed = console.measure(table, options=console.options.update_width(_WIDEST)).maximum
    console.width = max(console.width, needed)
    console.print(table)


def _time(cell: "Cell", best: "Cell") -> str:
    text = f"{cell.stats.tpot_ms:.1f}"
    return f"[bold]{text}[/bold]" if cell is best else text
