"""Routing recorded elsewhere, cut into verifications: figures 2, 3, 4, 13 and 16 at true size.

A trace is an `.npz` file as `scripts/replay_traces.py` describes it. Behind a rejected token it
holds the text's own tokens, not those the draft would have gone on with; both models ran on the
same text.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from specter_jax.errors import InvalidRequestError
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
    """Records of every trace in the directory; raises InvalidRequestError if there is none."""
    files = sorted(Path(directory).glob("*.npz"))
    if not files:
        raise InvalidRequestError(f"{directory}: no .npz traces there")
    merged: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        for section, records in _records_of(file, settings).items():
            merged.setdefault(section, []).extend(records)
    return merged


def _records_of(file: Path, settings: Settings) -> dict[str, list[dict[str, Any]]]:
    try:
        with np.load(file) as trace:
            target = trace[f"{KIND}_target_experts"]
            draft = trace[f"{KIND}_draft_experts"]
            agree = trace[f"{KIND}_target_argmax"] == trace[f"{KIND}_draft_argmax"]
            first_output = int(trace["prompt_tokens"])
            tasks = [str(name) for name in trace["task"]]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise InvalidRequestError(f"{file}: not a routing trace ({error})") from error
    depths = {*settings.depths, settings.depth, settings.diversity_depth}
    by_depth = {
        depth: [
            iterations(target[:, p], draft[:, p], agree[p], first_output, depth)
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
    # No model here leaves its last experts unused in thousands of tokens.
    num_experts = int(max(target.max(), draft.max())) + 1
    return routing_records(common, num_experts, by_depth, by_task, settings)


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
