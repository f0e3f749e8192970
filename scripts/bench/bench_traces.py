"""Routing traces for cells: of the model, and of the kind of text that a cell was measured on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from specter_jax.config import ModelConfig
from specter_jax.planner.traces import RoutingTrace, bundled_trace, load_trace

TASKS = {"mt_bench": "chat", "human_eval": "human_eval"}
"""What a trace file's `task` calls the prompts of a dataset."""

Traces = dict[str | tuple[str, str], RoutingTrace]
"""By model, and by model and dataset where the trace tells one text from another."""


def traces_of(
    configs: Mapping[str, ModelConfig],
    folder: Path | None,
    *,
    text: str = "greedy",
    num_prompts: int,
    new_tokens: int,
) -> Traces:
    """Traces of the models by name: the files of `folder` that begin with it, or the package's.

    num_prompts, new_tokens: as many at most of each trace. Raises SystemExit if there is no file.
    """
    found: Traces = {}
    for name, config in configs.items():
        if folder is None:
            found[name] = bundled_trace(config).select(num_prompts, new_tokens)
            continue
        files = sorted(folder.glob(f"{name}*.npz"))
        if not files:
            raise SystemExit(f"{folder}: no trace of {name} there")
        trace = load_trace(files[0], text)
        found[name] = trace.select(num_prompts, new_tokens)
        with np.load(files[0]) as arrays:
            tasks = arrays["task"].astype(str) if "task" in arrays else np.zeros(0, str)
        for dataset, task in TASKS.items():
            rows = np.flatnonzero(tasks == task)
            if len(rows):
                found[name, dataset] = trace.take(rows).select(num_prompts, new_tokens)
    return found
