"""Prompts of the true-size runs, cut to one length so that times to the first token compare."""

from __future__ import annotations

from pathlib import Path

import specter_jax as sj
from specter_jax.report.prompts import read_tasks
from specter_jax.text import load_tokenizer


def token_prompts(data: Path, model: sj.Model, num_tokens: int) -> dict[str, list[list[int]]]:
    """Per task four prompts of `num_tokens` token ids; a task's short prompts are joined."""
    tokenizer = load_tokenizer(model.path)
    prompts = {}
    for task in read_tasks(data / "datasets"):
        tokens: list[int] = []
        for text in task.prompts:
            tokens += [int(token) for token in tokenizer(text)["input_ids"]]
            if len(tokens) >= 4 * num_tokens:
                break
        ends = range(num_tokens, len(tokens) + 1, num_tokens)
        prompts[task.name] = [tokens[end - num_tokens : end] for end in ends][:4]
    return prompts
