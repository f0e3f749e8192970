"""A conversion that is interrupted when all its parts are finished: nothing of it is lost."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import convert.destination
import convert.workspace
from convert import convert_checkpoint
from convert.cli import EXIT_INTERRUPTED, main
from specter_jax.checkpoint import open_checkpoint
from specter_jax.errors import InvalidRequestError
from tests.convert_cases import digests, small_source

NUM_PARTS = 7  # companions, outer, three layers' shared parts, two MoE layers


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_source(tmp_path / "source")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def names_beside(out: Path) -> list[str]:
    return sorted(path.name for path in out.parent.iterdir())


@contextlib.contextmanager
def failing_sync(directory: Path, error: BaseException) -> Iterator[None]:
    """Flushing `directory` fails once every part is finished, so that a manifest exists."""
    sync = convert.workspace._sync

    def failing(path: Path) -> None:
        if path == directory and list(directory.glob("**/manifest.json")):
            raise error
        sync(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert.workspace, "_sync", failing)
        yield


@contextlib.contextmanager
def failing_rename(target: Path, error: BaseException, *, after: bool = False) -> Iterator[None]:
    """Renaming the partial directory to `target` fails, before or after it is done."""
    rename = Path.rename

    def failing(path: Path, new: Path) -> Path:
        if path.name != "out.partial" or new != target:
            return rename(path, new)
        if after:
            rename(path, new)
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rename", failing)
        yield


@contextlib.contextmanager
def interrupted_discard(name: str) -> Iterator[None]:
    """Deleting a file or directory of this name is interrupted."""
    discard = convert.destination.discard

    def interrupted(path: Path) -> None:
        if path.name == name and path.exists():
            raise KeyboardInterrupt
        discard(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert.destination, "discard", interrupted)
        yield


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.EIO, "Input/output error")], ids=repr
)
@pytest.mark.parametrize("step", [failing_sync, failing_rename])
def test_complete_conversion_that_is_not_published_goes_on_from_there(
    source: Path,
    out: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    step: Callable,
    error: BaseException,
) -> None:
    expected = digests(convert_checkpoint(source, tmp_path / "straight").path)
    partial = out.with_name("out.partial")
    with step(partial if step is failing_sync else out, error):
        code = main([str(source), str(out)])
    assert code == (EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 2)
    assert f"; finished parts are in {partial}, the same" in capsys.readouterr().err
    assert not out.exists()
    assert convert_checkpoint(source, out).num_resumed == NUM_PARTS
    assert digests(out) == expected
    assert names_beside(out) == ["out", "source", "straight"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "I/O error")], ids=repr)
def test_replacement_that_is_interrupted_puts_the_old_conversion_back(
    source: Path, out: Path, error: BaseException
) -> None:
    convert_checkpoint(source, out, group_size=16)
    before = digests(out)
    with failing_rename(out, error), pytest.raises(type(error)):
        convert_checkpoint(source, out, force=True)
    assert digests(out) == before
    assert open_checkpoint(out, verify="checksums").group_sizes.gate_up == 16
    assert names_beside(out) == ["out", "out.partial", "source"]
    assert convert_checkpoint(source, out, force=True).num_resumed == NUM_PARTS
    assert open_checkpoint(out, verify="checksums").group_sizes.gate_up == 64
    assert names_beside(out) == ["out", "source"]


@pytest.mark.parametrize("empty_directory", [False, True])
def test_next_run_puts_back_what_a_killed_one_could_not(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, empty_directory: bool
) -> None:
    convert_checkpoint(source, out, group_size=16)
    before = digests(out)
    with monkeypatch.context() as patch, failing_rename(out, KeyboardInterrupt()):
        patch.setattr(convert.workspace, "_put_back", lambda *_: None)  # as if killed
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(source, out, force=True)
    assert not out.exists()
    if empty_directory:
        out.mkdir()
    with pytest.raises(InvalidRequestError, match="--force"):
        convert_checkpoint(source, out)
    assert digests(out) == before
    assert convert_checkpoint(source, out, force=True).num_resumed == NUM_PARTS


@pytest.mark.parametrize("step", ["renamed", "flush", "replaced", "journal.json"])
def test_published_conversion_is_usable_and_tidied_up_by_the_next_run(
    source: Path, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture, step: str
) -> None:
    expected = digests(convert_checkpoint(source, tmp_path / "straight").path)
    convert_checkpoint(source, out, group_size=16)
    interruption = {
        "renamed": lambda: failing_rename(out, KeyboardInterrupt(), after=True),
        "flush": lambda: failing_sync(tmp_path, KeyboardInterrupt()),
    }.get(step, lambda: interrupted_discard(step))
    with interruption():
        assert main([str(source), str(out), "--force"]) == EXIT_INTERRUPTED
    message = capsys.readouterr().err
    assert message == f"interrupted; {out} is complete, the same command tidies up\n"
    assert (out / "journal.json").exists()
    assert open_checkpoint(out, verify="checksums").group_sizes.gate_up == 64
    assert convert_checkpoint(source, out).already_there
    assert digests(out) == expected
    assert names_beside(out) == ["out", "source", "straight"]


def test_conversion_is_not_tidied_up_while_its_run_is_at_it(source: Path, out: Path) -> None:
    with interrupted_discard("journal.json"), pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, out)
    descriptor = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert convert_checkpoint(source, out).already_there
        assert (out / "journal.json").exists()
    finally:
        os.close(descriptor)
    assert convert_checkpoint(source, out).already_there
    assert not (out / "journal.json").exists()


@pytest.mark.parametrize(
    "step", [(convert.workspace, "record_file"), (convert.workspace.Workspace, "_write_journal")]
)
def test_interruption_while_finished_parts_are_checked_loses_none(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, step: tuple[object, str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with failing_rename(out, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, out)
    with monkeypatch.context() as patch:
        patch.setattr(*step, stop)
        with pytest.raises(KeyboardInterrupt):
            convert_checkpoint(source, out)
    assert convert_checkpoint(source, out).num_resumed == NUM_PARTS
