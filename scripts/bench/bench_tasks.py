"""The parts of `h200.py` as processes to run: scripts and their arguments."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specter_jax.systems import SYSTEMS

PARTS = ("steps", "cells", "kernels", "formats", "baseline", "planner")
WEIGHTS = {"cells": 4.0, "baseline": 2.0}
"""Shares of the time left, 1 for all other parts."""
FORMATS = ("nested", "plain")
POLICIES = ("lookahead", "sp-l", "lru-s", "sp-e", "lru")
DEPTHS = ("auto", "1", "2", "4", "16")
"""Beside depth 8, at one budget."""
BATCHES = ("4", "8", "16", "32")
BATCH_POLICIES = ("lookahead", "specmoeoff", "sp-l", "mo")
DATASETS = ("mt_bench", "human_eval")
PROMPTS = (128, 512, 2047)
"""Lengths for the prefill; a longer one and its first token do not fit the context."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One process: its part, what it is about, and the arguments of its script.

    gathers: whether it takes `--out FILE`. has_limit: whether it takes `--limit-s`.
    """

    part: str
    model: str | None = None
    expert_format: str | None = None
    script: str
    arguments: tuple[str, ...] = ()
    gathers: bool = True
    has_limit: bool = False

    @property
    def name(self) -> str:
        """For the log."""
        return " ".join(word for word in (self.part, self.model, self.expert_format) if word)


def tasks(args: argparse.Namespace) -> Iterator[Task]:
    """What is to be run, in order: short and informative parts first."""
    data = ("--data", str(args.data))
    known = ("--missing", str(args.missing)) if args.missing else ()
    for part in sorted(args.parts, key=PARTS.index):
        if part == "kernels":
            yield Task(part=part, script="kernel_times.py")
        if part == "formats":
            yield Task(part=part, script="draft_formats.py")
        if part == "planner":
            results = str(args.out / "h200.json")
            options = (results, *data, "--out", results)
            yield Task(part=part, script="validate_planner.py", arguments=options, gathers=False)
        if part not in ("steps", "cells", "baseline"):
            continue
        for model in args.models:
            about = (*data, "--model", model)
            if part == "steps":
                yield Task(
                    part=part, model=model, script="steps.py", arguments=about, gathers=False
                )
            if part == "baseline":
                options = (*about, *_numbers("--budgets", args.budgets))
                options += () if args.quick else _numbers("--prefill", PROMPTS)
                yield Task(
                    part=part,
                    model=model,
                    script="transformers_baseline.py",
                    arguments=(*options, *known),
                    has_limit=True,
                )
            for form in args.formats if part == "cells" else ():
                yield Task(
                    part=part,
                    model=model,
                    expert_format=form,
                    script="cells.py",
                    arguments=(*about, "--format", form, *_cells_options(args), *known),
                    has_limit=True,
                )


def _cells_options(args: argparse.Namespace) -> tuple[str, ...]:
    """What `cells.py` measures: everything, or with `--quick` two policies and short outputs."""
    policies = args.policies or (POLICIES[:2] if args.quick else POLICIES)
    depths = args.depths or ["8"]
    options = [*_numbers("--budgets", args.budgets), "--policies", *policies, "--depths", *depths]
    if args.quick:
        options += ["--prompts", "2", "--new-tokens", "64", "--cell-s", "8"]
        return *options, *shlex.split(args.cells_options)
    options += ["--prompts", "3", "--new-tokens", "128", "--datasets", *DATASETS]
    options += ["--systems", *SYSTEMS, "--sweep-depths", *DEPTHS]
    options += ["--batches", *BATCHES, "--batch-policies", *BATCH_POLICIES]
    # What is given last counts.
    return (
        *options,
        *_numbers("--prefill", PROMPTS),
        "--overlap",
        *shlex.split(args.cells_options),
    )


def _numbers(option: str, values: Sequence[int] | None) -> tuple[str, ...]:
    return (option, *map(str, values)) if values else ()
