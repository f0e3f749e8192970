"""Runs all measurements and gathers them into one JSON object."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

import specter_jax.model
from specter_jax.checkpoint import open_checkpoint
from specter_jax.model import Model
from specter_jax.report import SECTIONS, TRUE_SIZE
from specter_jax.report.measure_experts import measure_draft_formats, measure_verification
from specter_jax.report.measure_machine import describe_model, load_average, machine
from specter_jax.report.measure_routing import measure_routing
from specter_jax.report.measure_runs import (
    measure_batch,
    measure_depth,
    measure_policies,
    measure_prefill,
    measure_systems,
)
from specter_jax.report.measure_timeline import measure_timeline
from specter_jax.report.prompts import Task
from specter_jax.report.settings import Settings
from specter_jax.source import resolve_checkpoint
from specter_jax.systems import SYSTEMS

SCHEMA = 1
"""Of the JSON; raised when a reader of the old one would misread the new one."""

Progress = Callable[[str], None]
Records = dict[str, list[dict[str, Any]]]


def measure(
    models: Sequence[str | os.PathLike[str]],
    tasks: Sequence[Task],
    settings: Settings,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress = lambda what: None,
) -> dict[str, Any]:
    """Measures everything that can be measured on this machine.

    models: directories as `specter_jax.load` takes them; the first of them is also run at all
    batch sizes. progress: told what is being measured.

    Returns a JSON-ready object: "schema", "meta", "settings", "tasks", "models", "results" (of
    other machines, see `add_results`) and "records" by section.

    Raises what `specter_jax.load` and `specter_jax.generate` do.
    """
    records: Records = {section: [] for section in SECTIONS}
    meta = machine() | {"load_average_before": load_average()}
    descriptions = []
    for number, source in enumerate(models):
        name = Path(source).resolve().name
        path = resolve_checkpoint(source, cache_dir=cache_dir)
        experts = _Budgets(path, settings)
        model = experts.load(1.0)
        descriptions.append(describe_model(model, name, source))
        _extend(records, measure_routing(model, name, tasks, settings, progress))
        records["draft"] += measure_draft_formats(model, name, settings, progress)
        records["verification"] += measure_verification(model, name, tasks, settings, progress)
        del model
        for share in sorted({*settings.shares, settings.share}):
            _measure_share(records, experts, name, share, tasks, settings, progress)
        if number == 0 and settings.batches:
            _measure_batches(records, experts, name, tasks, settings, progress)
    meta["load_average_after"] = load_average()
    return {
        "schema": SCHEMA,
        "meta": meta,
        "settings": {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in dataclasses.asdict(settings).items()
        },
        "tasks": [{"task": task.name, "prompts": len(task.prompts)} for task in tasks],
        "models": descriptions,
        "results": [],
        "records": records,
    }


def add_results(
    report: dict[str, Any], records: Records, metas: Sequence[dict[str, Any]] | None = None
) -> None:
    """Adds true-size records measured elsewhere, in place of what the report has of their sections.

    metas: what the files they come from say of their machine; replaces what is there, unless None.
    """
    for section, found in records.items():
        kept = [old for old in report["records"][section] if old["setting"] != TRUE_SIZE]
        report["records"][section] = kept + found
    if metas is not None:
        report["results"] = list(metas)


@dataclasses.dataclass(frozen=True)
class _Budgets:
    """Loads one converted model under different budgets, never two at a time."""

    path: Path
    settings: Settings

    def load(self, share: float, *, context: int | None = None, batch: int = 1) -> Model:
        # Of the model before: its arrays, and its programs, whose number a process can't let grow.
        gc.collect()
        jax.clear_caches()
        config = open_checkpoint(self.path).config
        total = config.num_moe_layers * config.num_experts
        return specter_jax.model.load(
            self.path,
            expert_slots=max(round(total * share), config.top_k),
            dtype=self.settings.dtype,
            max_context=min(config.max_context, context or self.settings.context),
            max_batch=batch,
        )


def _measure_share(
    records: Records,
    experts: _Budgets,
    name: str,
    share: float,
    tasks: Sequence[Task],
    settings: Settings,
    progress: Progress,
) -> None:
    """What is measured under one budget, and under the main one besides."""
    model = experts.load(share)
    if share in settings.shares:
        systems = list(SYSTEMS.values())
        records["hit_rate"] += measure_policies(model, name, share, tasks, settings, progress)
        records["end_to_end"] += measure_systems(
            model, name, share, tasks, systems, settings, progress
        )
    if share != settings.share:
        return
    records["depth"].append(measure_depth(model, name, tasks, settings, progress))
    timeline = measure_timeline(model, name, tasks, settings, progress)
    records["timeline"] += [] if timeline is None else [timeline]
    del model
    model = experts.load(share, context=max(settings.prefill_tokens) + 1)
    records["prefill"] += measure_prefill(model, name, tasks, settings, progress)


def _measure_batches(
    records: Records,
    experts: _Budgets,
    name: str,
    tasks: Sequence[Task],
    settings: Settings,
    progress: Progress,
) -> None:
    model = experts.load(settings.share, batch=max(settings.batches))
    systems = list(SYSTEMS.values())
    for batch in settings.batches:
        records["batch"] += measure_batch(model, name, batch, tasks, systems, settings, progress)


def _extend(records: Records, more: Records) -> None:
    for section, found in more.items():
        records[section] += found
