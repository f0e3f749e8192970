"""From what a user names to a converted directory: Hugging Face ones are converted once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from specter_jax.checkpoint import MANIFEST_NAME, read_manifest
from specter_jax.config.checks import shown
from specter_jax.errors import CheckpointError, InvalidRequestError, MissingFileError
from specter_jax.paths import CACHE_VARIABLE, as_path, cache_root, reason


def resolve_checkpoint(
    path: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    expert_format: str | None = None,
    progress: Any = None,
) -> Path:
    """The converted directory for `path`, converting a Hugging Face directory if need be.

    While another process converts it, this one waits and then uses the result.

    expert_format: "nested" or "plain", or None for what there is or is the default. A converted
    directory is refused if it has another one.

    Raises InvalidRequestError if an argument is no path or the cache cannot be used,
    MissingFileError if there is no such directory, CheckpointError if it is neither a converted nor
    a Hugging Face one or a file cannot be read or written, and whatever else the conversion raises.
    """
    directory = as_path("path", path)
    try:
        if not directory.is_dir():
            what = "not a directory" if directory.exists() else "no such directory"
            raise MissingFileError(f"{directory}: {what}; expected the directory of a model")
        if (directory / MANIFEST_NAME).exists():
            _check_format(directory, expert_format)
            return directory
        is_source = (directory / "config.json").exists()
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read ({reason(error)})") from error
    if not is_source:
        raise CheckpointError(
            f"{directory}: neither a converted model ({MANIFEST_NAME}) nor a Hugging Face one "
            "(config.json)"
        )
    # Imported late: conversion sits above this package and is not needed for converted models.
    from convert import convert_checkpoint

    target = conversion_path(directory, cache_dir, expert_format)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(
            f"{target.parent}: cannot keep conversions there ({reason(error)}); choose another "
            f"directory with cache_dir or {CACHE_VARIABLE}"
        ) from error
    try:
        # A changed source replaces its earlier conversion.
        convert_checkpoint(
            directory,
            target,
            expert_format=expert_format,
            force=True,
            wait=True,
            progress=progress,
        )
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or target}: {reason(error)}, while converting {directory} into "
            f"{target.parent}"
        ) from error
    return target


def _check_format(directory: Path, expert_format: str | None) -> None:
    """Raises InvalidRequestError if a converted directory's experts have another format."""
    if expert_format is None:
        return
    stored = read_manifest(directory).expert_format
    if stored != expert_format:
        raise InvalidRequestError(
            f"{directory} holds {stored} experts, not {expert_format}; convert the source with "
            f"expert_format={shown(expert_format)} (--expert-format)"
        )


def conversion_path(
    directory: Path,
    cache_dir: str | os.PathLike[str] | None = None,
    expert_format: str | None = None,
) -> Path:
    """Where the conversion of a Hugging Face directory is kept: by name, resolved path, format."""
    if cache_dir is None:
        cache_dir = cache_root()
    resolved = directory.resolve()
    digest = hashlib.sha256(str(resolved).encode()).hexdigest()[:12]
    name = f"{resolved.name}-{digest}"
    if expert_format is not None:
        name += f"-{expert_format}"
    return as_path("cache_dir", cache_dir) / name
