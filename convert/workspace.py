"""The directory a conversion grows in: locked, resumable, and renamed when it is complete.

`DST.partial` stands beside DST, on the same file system. A journal in it records each finished
part (one Orbax directory, or one MoE layer) with the checksums of its files, after these are on the
disk. A later run with the same source and options keeps the parts whose files still have those
checksums. The journal goes last, when the directory has its final name and a conversion that it
replaced is deleted, so that an interruption at any time can be made good by a later run.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from convert.destination import (
    JOURNAL_NAME,
    REPLACED_NAME,
    discard,
    is_conversion,
    is_vacant,
    tidy_up,
)
from convert.lock import lock_directory
from specter_jax.checkpoint import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    record_file,
)
from specter_jax.errors import ConversionError, InvalidRequestError
from specter_jax.json_files import read_json_object
from specter_jax.paths import naming

_NEW_JOURNAL = "journal.json.new"
PARTIAL_SUFFIX = ".partial"


def partial_path(destination: Path) -> Path:
    """Where the conversion into `destination` is prepared."""
    return destination.with_name(destination.name + PARTIAL_SUFFIX)


def is_resumable(path: Path) -> bool:
    """Whether `path` is the partial directory of an unfinished conversion."""
    return (path / JOURNAL_NAME).is_file()


def _is_just_begun(path: Path) -> bool:
    """Whether a partial directory has at most the first attempt at a journal."""
    return {entry.name for entry in path.iterdir()} <= {_NEW_JOURNAL}


def _put_back(path: Path, destination: Path) -> None:
    """Undoes a replacement that ended between its two renames."""
    if (path / REPLACED_NAME).exists() and is_vacant(destination):
        (path / REPLACED_NAME).rename(destination)


class Workspace:
    """A locked partial directory with the parts that its journal records; see `open_workspace`.

    Attributes:
        path: the directory.
        resumed: names of the parts that an earlier run finished.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path = path
        self._fingerprint = fingerprint
        self._parts = self._recorded_parts()
        self.resumed: frozenset[str] = frozenset()

    @property
    def num_finished(self) -> int:
        """Parts that a later run could keep; recorded ones count before they are checked."""
        return len(self._parts)

    def files(self) -> dict[str, FileRecord]:
        """Files of all finished parts by relative path."""
        return {name: record for part in self._parts.values() for name, record in part.items()}

    def _recorded_parts(self) -> dict[str, dict[str, FileRecord]]:
        """Parts that the journal records for the same source; none if it cannot be used."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            journal = read_json_object(self.path / JOURNAL_NAME, "journal")
            if journal["fingerprint"] == self._fingerprint:
                return {
                    part: {name: FileRecord(**record) for name, record in files.items()}
                    for part, files in journal["parts"].items()
                }
        return {}

    def resume(self) -> None:
        """Keeps what an earlier run on the same source finished and deletes everything else.

        The old journal stays until the new one is there, so that an interruption in between loses
        no finished part.
        """
        kept = {part: files for part, files in self._parts.items() if self._intact(files)}
        self._parts = kept
        self.resumed = frozenset(kept)
        wanted = {self.path / name for name in (*self.files(), JOURNAL_NAME)}
        for path in sorted(self.path.rglob("*"), reverse=True):  # children before their parents
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.rmdir()  # only if empty by now
            elif path not in wanted:
                path.unlink()
        self._write_journal()

    def _intact(self, records: dict[str, FileRecord]) -> bool:
        with contextlib.suppress(OSError):
            return all(
                (self.path / name).is_file() and record_file(self.path / name) == record
                for name, record in records.items()
            )
        return False

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
        temporary.replace(self.path / JOURNAL_NAME)

    def publish(self, manifest: Manifest, destination: Path) -> None:
        """Writes the manifest and puts the directory in its place in one step.

        A conversion to be replaced is moved aside first and deleted afterwards, so that at no time
        there is a mixture of both. Ended in between, it is back in its place.
        """
        manifest_path = self.path / MANIFEST_NAME
        with naming(manifest_path):
            manifest_path.write_text(manifest.to_json(), encoding="utf-8")
        _sync(manifest_path)
        _sync(self.path)
        try:
            if not is_vacant(destination):
                destination.rename(self.path / REPLACED_NAME)
            self.path.rename(destination)
        except BaseException:
            _put_back(self.path, destination)
            raise
        _sync(destination.parent)
        tidy_up(destination)


@contextlib.contextmanager
def open_workspace(
    destination: Path, fingerprint: str, on_wait: Callable[[], None] | None = None
) -> Iterator[Workspace]:
    """Creates or resumes the partial directory and holds its lock.

    A conversion that a killed run had moved aside to replace it is put back first.

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
    descriptor = lock_directory(path, destination, on_wait)
    try:
        # Looked at under the lock only: another run may be about to write or remove it.
        if not (is_resumable(path) or is_conversion(path) or _is_just_begun(path)):
            raise InvalidRequestError(taken)
        _put_back(path, destination)
        workspace = Workspace(path, fingerprint)
        try:
            workspace.resume()
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
