"""Routing recorded elsewhere, cut into verifications: figures 2, 3, 4, 13 and 16 at true size.

A trace is an `.npz` file as `scripts/replay_traces.py` describes it. Behind a rejected token it
holds the text's own tokens, not those the draft would have gone on with; both models ran on the
same text.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from specter_jax.errors import InvalidRequestError
from specter_jax.planner.traces import RoutingTrace, load_trace, read_arrays
from specter_jax.report import TRUE_SIZE
from specter_jax.report.measure_routing import routing_records
from specter_jax.report.routing import Iteration
from specter_jax.report.settings import Settings
from specter_jax.report.sources import origin

KIND = "sampled"
"""Of a trace's two texts: small models' greedy text runs into loops, which repeat their experts."""


def trace_records(
    directory: str | os.PathLike[str], settings: Settings
) -> dict[str, list[dict[str, Any]]]:
    """Records of every trace in the directory.

    Raises:
        InvalidRequestError: there is none, or one is damaged or too short; names the file.
        OSError: a file cannot be opened.
    """
    files = sorted(Path(directory).glob("*.npz"))
    if not files:
        raise InvalidRequestError(f"{directory}: no .npz traces there")
    merged: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        for section, records in _records_of(file, settings).items():
            merged.setdefault(section, []).extend(records)
    return merged


def _records_of(file: Path, settings: Settings) -> dict[str, list[dict[str, Any]]]:
    trace = load_trace(file, KIND)
    tasks = _tasks_of(file, trace)
    depths = {*settings.depths, settings.depth, settings.diversity_depth}
    outputs = trace.target_argmax.shape[1]
    if outputs <= max(depths):
        raise InvalidRequestError(
            f"{file}: {outputs} outputs of a prompt; verifications of {max(depths)} drafted tokens "
            "need more"
        )
    target, draft, agree = trace.target_experts, trace.draft_experts, trace.agree
    by_depth = {
        depth: [
            iterations(target[:, p], draft[:, p], agree[p], trace.prompt_tokens, depth)
            for p in range(len(agree))
        ]
        for depth in depths
    }
    by_task = {
        name: [
            request
            for task, request in zip(tasks, by_depth[settings.diversity_depth], strict=True)
            if task == name
        ]
        for name in dict.fromkeys(tasks)
    }
    common = {"model": file.stem, "setting": TRUE_SIZE, "text": KIND}
    common["sources"] = origin({"file": file.name})
    # Where the file does not say: no model leaves its last experts unused in thousands of tokens.
    num_experts = trace.num_experts or trace.highest_expert + 1
    return routing_records(common, num_experts, by_depth, by_task, settings)


def _tasks_of(file: Path, trace: RoutingTrace) -> list[str]:
    """The task of each prompt, which a replay has no need of; raises InvalidRequestError."""
    try:
        tasks = read_arrays(file, ["task"]).get("task")
    except InvalidRequestError as error:
        raise InvalidRequestError(f'{file}: {error}: "task" cannot be read') from None
    if tasks is None or tasks.shape != (trace.num_prompts,):
        found = "is missing" if tasks is None else f"has shape {tasks.shape}"
        raise InvalidRequestError(
            f'{file}: "task" {found}; expected the name of a task for each of the '
            f"{trace.num_prompts} prompts"
        )
    return [str(name) for name in tasks]


def iterations(
    target: np.ndarray, draft: np.ndarray, agree: np.ndarray, first_output: int, depth: int
) -> list[Iteration]:
    """Verifications at `depth` of one text, as acceptance would have cut it.

    target, draft: int [M, positions, k]; agree: bool [output tokens], whether the two models'
    most likely token is the same; first_output: position of the first output token.
    """
    cut, start = [], 0
    while start + depth < len(agree):
        accepted = int(np.cumprod(agree[start : start + depth]).sum())
        # The position before the first new token is the first to be computed.
        first = first_output + start - 1
        positions = slice(first, first + depth + 1)
        cut.append(
            Iteration(
                draft=draft[:, first : first + depth],
                target=target[:, positions],
                num_new=accepted + 1,
            )
        )
        start += accepted + 1
    return cut
