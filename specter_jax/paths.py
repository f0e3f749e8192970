"""Paths from callers, and system errors that say which file they are about."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specter_jax.config.checks import shown
from specter_jax.errors import InvalidRequestError


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
