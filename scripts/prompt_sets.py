"""Prompts of a JSON-lines data set and a model to run them on, for the scripts that measure."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specter_jax.text import encode_prompts, load_tokenizer

if TYPE_CHECKING:
    from specter_jax.model import Model

ROOT = Path(__file__).resolve().parents[1]

DEFAULT_MODEL = ROOT / "tests" / "data" / "tiny-deepseek_v2"
DEFAULT_DATASET = ROOT / "tests" / "data" / "prompts.jsonl"
"""A few prompts of our own; the README's figures are of Spec-Bench's `spec_bench.jsonl`."""

# Spec-Bench (Xia et al. 2024) counts the eight categories of MT-bench as one task.
_MT_BENCH = frozenset(
    ["coding", "extraction", "humanities", "math", "reasoning", "roleplay", "stem", "writing"]
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One prompt: its number in the data set, its task, and its token ids, int32 [tokens]."""

    name: str
    task: str
    ids: np.ndarray


def read_cases(dataset: Path, model_path: Path, *, limit: int | None, tokens: int) -> list[Case]:
    """The data set's prompts (`prompt`, or the first of `turns`), cut to `tokens` tokens.

    limit: this many, evenly spread over the data set; None for all.
    """
    with dataset.open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file if line.strip()]
    if limit is not None and limit < len(lines):
        lines = [lines[i * len(lines) // limit] for i in range(limit)]
    texts = [line["prompt"] if "prompt" in line else line["turns"][0] for line in lines]
    ids = encode_prompts(load_tokenizer(model_path), texts)
    return [
        Case(
            name=str(line.get("question_id", number)),
            task=_task(line.get("category", "all")),
            ids=prompt[:tokens],
        )
        for number, (line, prompt) in enumerate(zip(lines, ids, strict=True))
    ]


def batches(cases: list[Case], size: int) -> list[list[Case]]:
    """Batches of at most `size` cases of one task each, tasks in order of first appearance."""
    by_task: dict[str, list[Case]] = {}
    for case in cases:
        by_task.setdefault(case.task, []).append(case)
    return [
        group[start : start + size]
        for group in by_task.values()
        for start in range(0, len(group), size)
    ]


def load_quarter(
    model: Path,
    *,
    expert_slots: int | None,
    dtype: str,
    max_context: int,
    max_batch: int = 1,
    cache_dir: str | None = None,
    expert_format: str | None = None,
) -> Model:
    """The model, with slots for a quarter of its experts unless `expert_slots` says otherwise."""
    import specter_jax as sj
    from specter_jax.checkpoint import open_checkpoint
    from specter_jax.source import resolve_checkpoint

    path = resolve_checkpoint(model, cache_dir=cache_dir, expert_format=expert_format)
    config = open_checkpoint(path).config
    return sj.load(
        path,
        expert_slots=expert_slots or config.num_moe_layers * config.num_experts // 4,
        dtype=dtype,
        max_context=min(config.max_context, max_context),
        max_batch=max_batch,
    )


def percent(value: float | None) -> str:
    """A rate for a table."""
    return "-" if value is None else f"{value:.1%}"


def _task(category: str) -> str:
    return "mt_bench" if category in _MT_BENCH else category
