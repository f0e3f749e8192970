"""From what a user names to a converted directory: Hugging Face ones are converted once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from specter_jax.checkpoint import MANIFEST_NAME
from specter_jax.errors import CheckpointError, MissingFileError

CACHE_VARIABLE = "SPECTER_CACHE"
"""Environment variable that names the directory of conversions."""


def resolve_checkpoint(
    path: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: Any = None,
) -> Path:
    """The converted directory for `path`, converting a Hugging Face directory if need be.

    Raises MissingFileError if there is no such directory, CheckpointError if it is neither a
    converted nor a Hugging Face one, and whatever the conversion raises.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise MissingFileError(f"{directory}: no such directory")
    if (directory / MANIFEST_NAME).exists():
        return directory
    if not (directory / "config.json").exists():
        raise CheckpointError(
            f"{directory}: neither a converted model ({MANIFEST_NAME}) nor a Hugging Face one "
            "(config.json)"
        )
    # Imported late: conversion sits above this package and is not needed for converted models.
    from convert import convert_checkpoint

    target = conversion_path(directory, cache_dir)
    target.parent.mkdir(parents=True, exist_ok=True)
    # A changed source replaces its earlier conversion.
    convert_checkpoint(directory, target, force=True, progress=progress)
    return target


def conversion_path(directory: Path, cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where the conversion of a Hugging Face directory is kept: by name and resolved path."""
    if cache_dir is None:
        cache_dir = os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "specter-jax"
    resolved = directory.resolve()
    digest = hashlib.sha256(str(resolved).encode()).hexdigest()[:12]
    return Path(cache_dir) / f"{resolved.name}-{digest}"
