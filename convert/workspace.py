"""The directory a conversion grows in: locked, resumable, and renamed when it is complete.

`DST.partial` stands beside DST, on the same file system. A journal in it records each finished
part (one Orbax directory, or one MoE layer) with the checksums of its files, after these are on the
disk. A later run with the same source and options keeps the parts whose files still have those
checksums.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from specter_jax.checkpoint import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    check_files,
    read_manifest,
    record_file,
)
from specter_jax.checkpoint.manifest import FORMAT_NAME
from specter_jax.errors import CheckpointError, ConversionError, InvalidRequestError
from specter_jax.json_files import read_json_object
from specter_jax.paths import naming

_JOURNAL = "journal.json"
_NEW_JOURNAL = "journal.json.new"
PARTIAL_SUFFIX = ".partial"


def partial_path(destination: Path) -> Path:
    """Where the conversion into `destination` is prepared."""
    return destination.with_name(destination.name + PARTIAL_SUFFIX)


def is_resumable(path: Path) -> bool:
    """Whether `path` is the partial directory of an unfinished conversion."""
    return (path / _JOURNAL).is_file()


def existing_conversion(destination: Path, fingerprint: str, *, force: bool) -> Manifest | None:
    """Decides what to do about something at `destination`.

    Returns:
        The manifest if there is a finished conversion with this fingerprint; None if the conversion
        may go ahead.

    Raises:
        InvalidRequestError: there is something else and `force` is off, or something that is not a
            conversion: that is never replaced.
    """
    if not destination.exists() or _is_empty_directory(destination):
        return None
    if not _is_conversion(destination):
        raise InvalidRequestError(
            f"{destination} exists and is not a converted model; choose another destination, or "
            "remove it if it was one and is damaged"
        )
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


def _is_empty_directory(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _is_just_begun(path: Path) -> bool:
    """Whether a partial directory has at most the first attempt at a journal."""
    return {entry.name for entry in path.iterdir()} <= {_NEW_JOURNAL}


def _is_conversion(path: Path) -> bool:
    """Whether a directory was written by a conversion, whatever the format version."""
    try:
        return read_json_object(path / MANIFEST_NAME, "manifest").get("format") == FORMAT_NAME
    except (OSError, ValueError):
        return False


class Workspace:
    """A locked partial directory; see `open_workspace`.

    Attributes:
        path: the directory.
        resumed: names of the parts that an earlier run finished.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self._fingerprint = fingerprint
        self._parts: dict[str, dict[str, FileRecord]] = {}
        self.resumed: frozenset[str] = frozenset()

    @property
    def num_finished(self) -> int:
        """Parts that a later run could keep."""
        return len(self._parts)

    def files(self) -> dict[str, FileRecord]:
        """Files of all finished parts by relative path."""
        return {name: record for part in self._parts.values() for name, record in part.items()}

    def load_journal(self) -> None:
        """Keeps what an earlier run on the same source finished and deletes everything else."""
        kept: dict[str, dict[str, FileRecord]] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            journal = read_json_object(self.path / _JOURNAL, "journal")
            if journal["fingerprint"] == self._fingerprint:
                for part, files in journal["parts"].items():
                    records = {name: FileRecord(**record) for name, record in files.items()}
                    if self._intact(records):
                        kept[part] = records
        self._parts = kept
        self.resumed = frozenset(kept)
        wanted = {self.path / name for name in self.files()}
        for path in sorted(self.path.rglob("*"), reverse=True):  # children before their parents
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.rmdir()  # only if empty by now
            elif path not in wanted:
                path.unlink()
        self._write_journal()

    def _intact(self, records: dict[str, FileRecord]) -> bool:
        return all(
            (self.path / name).is_file() and record_file(self.path / name) == record
            for name, record in records.items()
        )

    def begin(self, *paths: Path) -> None:
        """Makes room for a part's files: parents exist, the paths themselves do not."""
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            discard(path)

    def finish(self, part: str, *paths: Path) -> None:
        """Records a part whose files are these, or lie below these directories."""
        records = {}
        for path in paths:
            for file in _files_below(path):
                _sync(file)
                records[file.relative_to(self.path).as_posix()] = record_file(file)
            for directory in [path, *path.rglob("*")] if path.is_dir() else []:
                if directory.is_dir():
                    _sync(directory)
            _sync(path.parent)
        self._parts[part] = records
        self._write_journal()

    def _write_journal(self) -> None:
        journal = {
            "fingerprint": self._fingerprint,
            "parts": {
                part: {name: dataclasses.asdict(record) for name, record in files.items()}
                for part, files in self._parts.items()
            },
        }
        temporary = self.path / _NEW_JOURNAL
        with naming(temporary):
            temporary.write_text(json.dumps(journal))
        _sync(temporary)
        temporary.replace(self.path / _JOURNAL)

    def publish(self, manifest: Manifest, destination: Path) -> None:
        """Writes the manifest and puts the directory in its place in one step.

        A conversion to be replaced is moved aside first and deleted afterwards, so that at no time
        there is a mixture of both.
        """
        manifest_path = self.path / MANIFEST_NAME
        with naming(manifest_path):
            manifest_path.write_text(manifest.to_json(), encoding="utf-8")
        _sync(manifest_path)
        (self.path / _JOURNAL).unlink()
        _sync(self.path)
        aside = None
        if destination.exists() and not _is_empty_directory(destination):
            prefix = f"{destination.name}.replaced-"
            aside = Path(tempfile.mkdtemp(prefix=prefix, dir=destination.parent))
            destination.rename(aside)
        try:
            self.path.rename(destination)
        except OSError:
            if aside is not None:
                aside.rename(destination)
            raise
        _sync(destination.parent)
        if aside is not None:
            discard(aside)


@contextlib.contextmanager
def open_workspace(
    destination: Path, fingerprint: str, on_wait: Callable[[], None] | None = None
) -> Iterator[Workspace]:
    """Creates or resumes the partial directory and holds its lock.

    When the block ends with a `ConversionError` the source is bad and the directory is removed.
    When it ends otherwise without having published (interrupted, disk full), the directory stays if
    at least one part is finished.

    Args:
        destination: where the conversion will be published.
        fingerprint: of source and options.
        on_wait: called once before waiting for another process's conversion into the same
            destination; without it that is an error.

    Raises:
        ConversionError: another process is converting into the same destination.
        InvalidRequestError: the partial directory's name is taken by something else.
    """
    path = partial_path(destination)
    path.parent.mkdir(parents=True, exist_ok=True)
    taken = f"{path} exists and is not an unfinished conversion; move it away"
    if path.exists() and not path.is_dir():
        raise InvalidRequestError(taken)
    descriptor = _lock(path, destination, on_wait)
    # Looked at under the lock only: another run may be about to write or remove it.
    if not (is_resumable(path) or _is_conversion(path) or _is_just_begun(path)):
        os.close(descriptor)
        raise InvalidRequestError(taken)
    workspace = Workspace(path, fingerprint)
    try:
        workspace.load_journal()
        yield workspace
    except ConversionError:
        discard(path)
        raise
    except BaseException:
        if not workspace.num_finished:
            discard(path)
        raise
    finally:
        os.close(descriptor)


def _lock(path: Path, destination: Path, on_wait: Callable[[], None] | None) -> int:
    """Creates the directory and locks it; the lock ends with the process or the descriptor."""
    told = False
    while True:
        path.mkdir(exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # another run published or removed it in between
        try:
            if not _try_lock(descriptor):
                if on_wait is None:
                    raise ConversionError(
                        f"{destination}: another conversion into it is running (it holds {path}); "
                        "wait for it or choose another destination"
                    )
                if not told:
                    on_wait()
                    told = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # what was locked is no longer what has this name


def _try_lock(descriptor: int) -> bool:
    """Locks without waiting; false if another process has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # A file system without locks: go on, as there is nothing better to be had.
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True


def _files_below(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file())


def _sync(path: Path) -> None:
    """Flushes a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(path: Path) -> None:
    """Deletes a file or directory if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
