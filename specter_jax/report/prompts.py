"""Prompt sets of the evaluation: files of a directory, by task, or a few built-in ones."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specter_jax.errors import PromptError
from specter_jax.text import check_text, encode_prompts, load_tokenizer

# Spec-Bench (Xia et al. 2024) counts the eight categories of MT-bench as one task.
MT_BENCH = frozenset(
    ["coding", "extraction", "humanities", "math", "reasoning", "roleplay", "stem", "writing"]
)
ENDINGS = (".jsonl", ".jsonl.gz")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Prompts of one kind."""

    name: str
    prompts: tuple[str, ...]


BUILT_IN = (
    Task(
        name="stories",
        prompts=(
            "Late in the autumn a fisherman found a bottle on the beach, and in it was",
            "My grandmother kept a garden behind the house. Every morning before school we",
            "The train stopped between two stations, and nobody in the carriage knew why. At last",
            "When the last shop of the street had closed, the old watchmaker opened his door and",
        ),
    ),
    Task(
        name="sums",
        prompts=(
            "Question: A farmer has 18 hens and sells a third of them. Each hen brings 7 dollars. "
            "How much does he get?\nAnswer:",
            "Question: Tom reads 12 pages a day for 5 days and 20 pages on the sixth. How many "
            "pages has he read?\nAnswer:",
            "Question: A bus has 40 seats. At the first stop 15 people get on, at the second 9 "
            "more and 4 leave. How many seats are free?\nAnswer:",
            "Question: Anna buys 3 books for 14 dollars each and pays with a 50 dollar note. How "
            "much change is there?\nAnswer:",
        ),
    ),
    Task(
        name="code",
        prompts=(
            'def is_sorted(numbers):\n    """Whether a list is in ascending order."""\n',
            "import json\n\n\ndef load_settings(path):\n    with open(path) as file:\n",
            "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self",
            'def mean(values):\n    """Return the average, 0 for an empty list."""\n    if not',
        ),
    ),
)
"""For runs without data sets."""


def read_tasks(directory: str | os.PathLike[str] | None) -> tuple[Task, ...]:
    """The prompts of a directory's `.jsonl` and `.jsonl.gz` files by task; None: `BUILT_IN`.

    A line is an object with `prompt`, or with `turns` of which the first is taken. Lines are put
    into tasks by `category`, a file without categories is one task, named like the file.

    Raises:
        PromptError: there is no such directory, no prompt in it, a file is damaged, or a line is
            malformed or its prompt no text; names file and line.
    """
    if directory is None:
        return BUILT_IN
    folder = Path(directory)
    files = sorted(f for f in folder.glob("*") if f.name.endswith(ENDINGS))
    if not files:
        raise PromptError(f"{directory}: no {' or '.join(ENDINGS)} files there")
    tasks: dict[str, list[str]] = {}
    for file in files:
        for name, prompt in _read_file(file):
            tasks.setdefault(name, []).append(prompt)
    if not tasks:
        raise PromptError(f"{directory}: the files hold no prompts")
    return tuple(Task(name=name, prompts=tuple(prompts)) for name, prompts in tasks.items())


def _read_file(file: Path) -> list[tuple[str, str]]:
    """(task, prompt) of every line."""
    opener = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rt", encoding="utf-8") as opened:
            lines = [(number, line) for number, line in enumerate(opened, 1) if line.strip()]
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise PromptError(f"{file}: cannot be read ({error})") from error
    fallback = file.name.partition(".")[0]
    return [_task_and_prompt(line, fallback, f"{file}, line {number}") for number, line in lines]


def _task_and_prompt(line: str, fallback: str, where: str) -> tuple[str, str]:
    try:
        fields = json.loads(line)
        prompt = fields["prompt"] if "prompt" in fields else fields["turns"][0]
        category = fields.get("category", fallback)
        if not isinstance(prompt, str) or not isinstance(category, str):
            raise TypeError("prompt and category must be texts")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise PromptError(
            f'{where}: expected "prompt" or "turns", got {line.strip()[:40]!r} ({error})'
        ) from error
    # Here, not when it is encoded or written: by then much has been measured.
    check_text(prompt, f"{where}: the prompt")
    check_text(category, f"{where}: the category")
    return "mt_bench" if category in MT_BENCH else category, prompt


def spread(items: Sequence, count: int) -> list:
    """`count` of the items at equal distances, all of them if there are fewer."""
    if count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def mixed(tasks: Sequence[Task], count: int) -> list[str]:
    """`count` prompts taken from the tasks in turn, fewer if there are not as many."""
    each = -(-count // len(tasks))
    columns = [spread(task.prompts, each) for task in tasks]
    in_turn = [column[i] for i in range(each) for column in columns if i < len(column)]
    return in_turn[:count]


def token_ids(model_path: Path, prompts: Sequence[str], tokens: int) -> list[np.ndarray]:
    """int32 ids of each prompt, cut to its first `tokens`; raises PromptError, CheckpointError."""
    return [ids[:tokens] for ids in encode_prompts(load_tokenizer(model_path), prompts)]


def long_prompt(model_path: Path, tasks: Sequence[Task], tokens: int) -> np.ndarray:
    """int32 [tokens]: the tasks' prompts one after another, over and over if need be."""
    ids = np.concatenate(token_ids(model_path, mixed(tasks, 64), tokens))
    return np.resize(ids, tokens).astype(np.int32)
