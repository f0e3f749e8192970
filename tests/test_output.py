"""Files that a user asks for: whole or not at all, in place of nothing else."""

import os
import stat
import subprocess
import sys
import threading

import pytest

from specter_jax.output import is_special, is_writable, write_text_atomically


def test_a_new_file_has_usual_permissions_and_no_companion(tmp_path):
    write_text_atomically(tmp_path / "out.json", "text ä")
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert (tmp_path / "out.json").read_text(encoding="utf-8") == "text ä"
    (tmp_path / "plain").touch()
    assert (tmp_path / "out.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_replaced_file_keeps_its_permissions(tmp_path):
    target = tmp_path / ("n" * 255)
    target.write_text("old, and longer")
    target.chmod(0o640)
    write_text_atomically(target, "new")
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch):
    target = tmp_path / "out.json"
    target.write_text("old")

    def refuse(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_text_atomically(target, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert target.read_text() == "old"


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_a_link_and_its_target_is_written(tmp_path, exists):
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "real", tmp_path / "link"
    if exists:
        target.write_text("old")
    link.symlink_to("there/real")
    assert is_writable(link)
    write_text_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["real"]


def test_a_pipe_stays_a_pipe_and_carries_the_text(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert is_writable(pipe)
    received = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()), daemon=True)
    reader.start()
    write_text_atomically(pipe, "text")
    reader.join(timeout=10)
    assert received == ["text"]
    assert pipe.is_fifo()


def test_a_device_stays_a_device(tmp_path):
    assert is_special(os.devnull)
    assert is_writable(os.devnull)
    # By a link: had it been replaced, only the link would be lost.
    link = tmp_path / "null"
    link.symlink_to(os.devnull)
    write_text_atomically(link, "text")
    assert link.is_symlink()
    assert link.is_char_device()
    with pytest.raises(OSError, match="No space left"):
        write_text_atomically("/dev/full", "text")


@pytest.mark.parametrize("to_file", [True, False], ids=["file", "pipe"])
def test_the_standard_output_can_be_named(tmp_path, to_file):
    program = """
import sys
from specter_jax.output import is_writable, write_text_atomically
assert is_writable("/dev/stdout")
print("before", flush=True)
write_text_atomically("/dev/stdout", "text\\n")
print("after", flush=True)
"""
    command = [sys.executable, "-c", program]
    if to_file:
        with open(tmp_path / "all", "w") as file:
            subprocess.run(command, stdout=file, check=True, timeout=60)
        text = (tmp_path / "all").read_text()
        assert text.startswith("before\n")
    else:
        text = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
        assert text == "before\ntext\nafter\n"


def test_what_cannot_be_written_is_told_beforehand(tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "dangling").symlink_to("no/such/folder/file")
    (tmp_path / "file").touch()
    for path in ("", "circle", "dangling", "no/folder/file", "file/below", "n" * 300):
        assert not is_writable(tmp_path / path), path
    assert not is_writable("a\0b")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
