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
from specter_jax.errors import InvalidRequestError
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
from specter_jax.report.prompts import Task, token_ids
from specter_jax.report.settings import Settings
from specter_jax.source import resolve_checkpoint
from specter_jax.systems import SYSTEMS

SCHEMA = 1
"""Of the JSON; raised when a reader of the old one would misread the new one."""

Progress = Callable[[str], None]
Keep = Callable[[dict[str, Any]], object]
Records = dict[str, list[dict[str, Any]]]


def measure(
    models: Sequence[str | os.PathLike[str]],
    tasks: Sequence[Task],
    settings: Settings,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Progress = lambda what: None,
    keep: Keep = lambda report: None,
) -> dict[str, Any]:
    """Measures everything that can be measured on this machine.

    models: directories as `specter_jax.load` takes them; the first of them is also run at all
    batch sizes. progress: told what is being measured. keep: given the report so far, to store
    it, before every model but the first, and if an error or an interruption ends the measurement.

    Returns a JSON-ready object: "schema", "meta", "settings", "tasks", "models", "results" (of
    other machines, see `add_results`) and "records" by section.

    Raises what `specter_jax.load` and `specter_jax.generate` do. A directory that is no model, is
    given twice, cannot encode the prompts or has too short a context for them is refused before
    anything is measured.
    """
    opened = _opened(models, tasks, settings, cache_dir)
    descriptions: list[dict[str, Any]] = []
    records: Records = {section: [] for section in SECTIONS}
    meta = machine() | {"load_average_before": load_average()}

    def report() -> dict[str, Any]:
        # Lists of its own: `keep` may add to them while these grow.
        return {
            "schema": SCHEMA,
            "meta": meta | {"load_average_after": load_average()},
            "settings": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in dataclasses.asdict(settings).items()
            },
            "tasks": [{"task": task.name, "prompts": len(task.prompts)} for task in tasks],
            "models": list(descriptions),
            "results": [],
            "records": {section: list(found) for section, found in records.items()},
        }

    try:
        for experts in opened:
            if descriptions:
                keep(report())
            _measure_model(records, descriptions, experts, tasks, settings, progress)
    except BaseException:
        if any(records.values()):
            keep(report())
        raise
    return report()


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
    """Loads one converted model under different budgets, never two at a time.

    name: what the report calls it. source: the directory that was given.
    """

    name: str
    source: str | os.PathLike[str]
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


def _opened(
    models: Sequence[str | os.PathLike[str]],
    tasks: Sequence[Task],
    settings: Settings,
    cache_dir: str | os.PathLike[str] | None,
) -> list[_Budgets]:
    """All models, Hugging Face ones converted, with everything checked but their large files."""
    prompts = [prompt for task in tasks for prompt in task.prompts]
    opened = []
    for source, name in zip(models, model_names(models), strict=True):
        path = resolve_checkpoint(source, cache_dir=cache_dir)
        most = open_checkpoint(path).config.max_context
        needed = max(map(len, token_ids(path, prompts, settings.prompt_tokens)))
        needed += settings.new_tokens
        if needed > most:
            raise InvalidRequestError(
                f"{source}: the report's prompts with their outputs have up to {needed} tokens, "
                f"this model's context {most}; leave it out of --models"
            )
        opened.append(_Budgets(name, source, path, settings))
    return opened


def model_names(models: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Each directory's name, with as many directories above it as tell it from the others.

    Raises InvalidRequestError if a directory is given twice: records are told apart by name.
    """
    paths = [Path(model).resolve() for model in models]
    for model, path in zip(models, paths, strict=True):
        if paths.count(path) > 1:
            raise InvalidRequestError(f"{model}: this model is given twice; name each once")

    def unique(path: Path) -> str:
        for length in range(1, len(path.parts)):
            ends = [other.parts[-length:] for other in paths]
            if ends.count(path.parts[-length:]) == 1:
                return "/".join(path.parts[-length:])
        return str(path)

    return [unique(path) for path in paths]


def _measure_model(
    records: Records,
    descriptions: list[dict[str, Any]],
    experts: _Budgets,
    tasks: Sequence[Task],
    settings: Settings,
    progress: Progress,
) -> None:
    """Everything of one model, added to `records` part by part; and what it is."""
    name, is_first = experts.name, not descriptions
    model = experts.load(1.0)
    descriptions.append(describe_model(model, name, experts.source))
    _extend(records, measure_routing(model, name, tasks, settings, progress))
    records["draft"] += measure_draft_formats(model, name, settings, progress)
    records["verification"] += measure_verification(model, name, tasks, settings, progress)
    del model
    for share in sorted({*settings.shares, settings.share}):
        _measure_share(records, experts, share, tasks, settings, progress)
    if is_first and settings.batches:
        _measure_batches(records, experts, tasks, settings, progress)


def _measure_share(
    records: Records,
    experts: _Budgets,
    share: float,
    tasks: Sequence[Task],
    settings: Settings,
    progress: Progress,
) -> None:
    """What is measured under one budget, and under the main one besides."""
    name = experts.name
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
    tasks: Sequence[Task],
    settings: Settings,
    progress: Progress,
) -> None:
    name = experts.name
    model = experts.load(settings.share, batch=max(settings.batches))
    systems = list(SYSTEMS.values())
    for batch in settings.batches:
        records["batch"] += measure_batch(model, name, batch, tasks, systems, settings, progress)


def _extend(records: Records, more: Records) -> None:
    for section, found in more.items():
        records[section] += found
