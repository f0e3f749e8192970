"""Prompts of the true-size runs, cut to one length so that times to the first token compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import specter_jax as sj
from specter_jax.report.prompts import read_tasks
from specter_jax.text import load_tokenizer


def token_prompts(
    data: Path, model: sj.Model, num_tokens: int, *, datasets: Sequence[str], count: int
) -> dict[str, list[list[int]]]:
    """Per dataset `count` different prompts of `num_tokens` token ids; short ones are joined.

    Raises SystemExit where there is no such dataset, or not as much text.
    """
    tokenizer = load_tokenizer(model.path)
    tasks = {task.name: task.prompts for task in read_tasks(data / "datasets")}
    prompts = {}
    for name in datasets:
        if name not in tasks:
            raise SystemExit(f"error: no dataset {name!r}; there are {', '.join(tasks)}")
        tokens: list[int] = []
        for text in tasks[name]:
            tokens += [int(token) for token in tokenizer(text)["input_ids"]]
            if len(tokens) >= count * num_tokens:
                break
        else:
            raise SystemExit(f"error: {name} has no {count} prompts of {num_tokens} tokens")
        prompts[name] = [tokens[i * num_tokens :][:num_tokens] for i in range(count)]
    return prompts
