"""What the subcommands share: the process's environment, the model, checks, progress."""

import argparse
import itertools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from specter_jax.entry import importing
from specter_jax.errors import InvalidRequestError, MissingFileError
from specter_jax.output import is_special, is_writable
from specter_jax.text import check_text, read_prompts

if TYPE_CHECKING:
    from specter_jax.model import Model

# Set before JAX starts, unless the user did. The first lets the budget, not JAX, decide how much
# of the device's memory is taken; the others keep libraries from talking.
ENVIRONMENT = {
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


def prepare_environment() -> None:
    """Set defaults of environment variables that JAX reads when it starts, and load it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Text that the terminal's encoding lacks is shown as "?", not an error.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    with importing():
        import specter_jax.api  # noqa: F401


def check_model(path: str) -> None:
    """Raises MissingFileError unless the model's directory is there."""
    if not Path(path).is_dir():
        raise MissingFileError(f"{path}: no such directory")


def check_output(option: str, path: str | None) -> None:
    """Raises InvalidRequestError if a file could not be written there, before any work is done."""
    if path is None:
        return
    if not path or not is_writable(path):
        raise InvalidRequestError(f"{option} {path}: cannot be written")


def check_distinct(files: Mapping[str, str | None]) -> None:
    """Raises InvalidRequestError if two options name one file, where one would replace the other.

    files: by option. What is written to directly, such as /dev/stdout, may be named twice.
    """
    given = [(option, path) for option, path in files.items() if path is not None]
    for (option, path), (other, same) in itertools.combinations(given, 2):
        replaced = not (is_special(path) and is_special(same))
        if replaced and os.path.realpath(path) == os.path.realpath(same):
            raise InvalidRequestError(f"{option} and {other} are the same file, {same}: name two")


def prompts_of(options: argparse.Namespace) -> list[str]:
    """The prompts of --prompt or --prompts, none if neither is given; raises PromptError."""
    if options.prompts is not None:
        return read_prompts(options.prompts)
    prompts = list(options.prompt or ())
    for number, prompt in enumerate(prompts):
        check_text(prompt, f"prompt {number}")
    return prompts


def load_model(options: argparse.Namespace) -> "Model":
    """The model with the options' budget, telling on a terminal how loading goes."""
    from specter_jax.model import load

    with Progress() as progress:
        return load(
            options.model,
            gpu_memory=options.gpu_memory,
            expert_slots=options.expert_slots,
            dtype=options.dtype,
            max_context=options.max_context,
            max_batch=options.batch_size,
            cache_dir=options.cache_dir,
            verify=options.verify,
            progress=progress,
        )


class Progress:
    """One line on standard error that is written over, where that is a terminal.

    lines: elsewhere, a line for each new step, for what takes minutes; else nothing.
    """

    def __init__(self, *, lines: bool = False) -> None:
        self._shown = sys.stderr.isatty()
        self._lines = lines and not self._shown
        self._last = ""

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` steps of `what` are finished."""
        if self._shown:
            # A finished step clears its line, for text may follow.
            shown = f"{what} {done}/{total}" if done < total else ""
            print(f"\r\033[K{shown}", end="", file=sys.stderr, flush=True)
        elif self._lines and what != self._last:
            print(what, file=sys.stderr, flush=True)
            self._last = what

    def __enter__(self) -> "Progress":
        if self._shown:
            print("\r\033[Kloading", end="", file=sys.stderr, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
