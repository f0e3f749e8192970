"""Paths from callers, and system errors that say which file they are about."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specter_jax.config.checks import shown
from specter_jax.errors import InvalidRequestError

CACHE_VARIABLE = "SPECTER_CACHE"
"""Environment variable that names the directory of what this package keeps between runs."""


def cache_root() -> Path:
    """Where conversions and compiled programs are kept; InvalidRequestError without a home."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE])
    try:
        return Path.home() / ".cache" / "specter-jax"
    except RuntimeError:  # neither $HOME nor an entry for the user
        raise InvalidRequestError(
            f"there is no home directory to keep conversions in; set cache_dir or {CACHE_VARIABLE}"
        ) from None


def as_path(name: str, value: Any) -> Path:
    """A caller's argument as a path; InvalidRequestError if it is none."""
    try:
        text = os.fspath(value)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidRequestError(f"{name}={shown(value)}, expected the path of a directory")
    return Path(text)


def reason(error: OSError) -> str:
    """What happened, without the number and the file."""
    return error.strerror or " ".join(str(error).split()) or type(error).__name__


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file to system errors that lack it.

    Those of opening a file have its name, but not those of writing to it (disk full) and reading.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
