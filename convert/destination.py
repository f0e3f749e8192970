"""What is at a conversion's destination: nothing, a finished conversion, or something else."""

import contextlib
import os
import shutil
from pathlib import Path

from convert.lock import try_lock
from specter_jax.checkpoint import MANIFEST_NAME, Manifest, check_files, read_manifest
from specter_jax.checkpoint.manifest import FORMAT_NAME
from specter_jax.errors import CheckpointError, InvalidRequestError
from specter_jax.json_files import read_json_object

JOURNAL_NAME = "journal.json"
"""See `convert.workspace`; in a published conversion only until it is tidied up."""
REPLACED_NAME = "replaced"
"""The conversion that was there before, until it is deleted; inside, where a later run finds it."""


def is_finished(destination: Path) -> bool:
    """Whether a conversion was interrupted after it was published, while it tidied up."""
    return is_conversion(destination) and (destination / JOURNAL_NAME).is_file()


def existing_conversion(destination: Path, fingerprint: str, *, force: bool) -> Manifest | None:
    """Decides what to do about something at `destination`.

    A conversion there that was interrupted while it tidied up is tidied up.

    Returns:
        The manifest if there is a finished conversion with this fingerprint; None if the conversion
        may go ahead.

    Raises:
        InvalidRequestError: there is something else and `force` is off, or something that is not a
            conversion: that is never replaced.
    """
    if is_vacant(destination):
        return None
    if not is_conversion(destination):
        raise InvalidRequestError(
            f"{destination} exists and is not a converted model; choose another destination, or "
            "remove it if it was one and is damaged"
        )
    _tidy_up_if_left(destination)
    with contextlib.suppress(CheckpointError):
        manifest = read_manifest(destination)
        if manifest.source_fingerprint == fingerprint:
            check_files(destination, manifest, "sizes")
            return manifest
    if not force:
        raise InvalidRequestError(
            f"{destination} holds another conversion (source, options or format version differ, or "
            "files are missing); use --force to replace it"
        )
    return None


def is_vacant(path: Path) -> bool:
    """Whether there is nothing, or an empty directory: a directory can be renamed to this."""
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def is_conversion(path: Path) -> bool:
    """Whether a directory was written by a conversion, whatever the format version."""
    try:
        return read_json_object(path / MANIFEST_NAME, "manifest").get("format") == FORMAT_NAME
    except (OSError, ValueError):
        return False


def tidy_up(destination: Path) -> None:
    """Deletes what a published conversion does not need; the journal last, as it tells of it."""
    discard(destination / REPLACED_NAME)
    discard(destination / JOURNAL_NAME)


def _tidy_up_if_left(destination: Path) -> None:
    """Tidies up after an interrupted run, unless that is not permitted or a run is at it."""
    if not is_finished(destination):
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(destination, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # A lock belongs to the directory, whatever its name: a run that has just published it
            # still holds it.
            if try_lock(descriptor):
                tidy_up(destination)
        finally:
            os.close(descriptor)


def discard(path: Path) -> None:
    """Deletes a file or directory if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
