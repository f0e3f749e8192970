"""From a directory to a converted one: converted once, kept, and redone when the source changes."""

import errno
import fcntl
import json
import os
import shutil

import pytest

import specter_jax as sj
from specter_jax.checkpoint import MANIFEST_NAME, open_checkpoint
from specter_jax.errors import CheckpointError, InvalidRequestError, MissingFileError
from specter_jax.source import CACHE_VARIABLE, conversion_path, resolve_checkpoint
from tests.conftest import TINY_SOURCE


@pytest.fixture
def source(tmp_path):
    return shutil.copytree(TINY_SOURCE, tmp_path / "hf")


def test_a_converted_directory_is_taken_as_it_is(tiny_directory, tmp_path):
    assert resolve_checkpoint(tiny_directory, cache_dir=tmp_path) == tiny_directory
    assert not any(tmp_path.iterdir())


def test_a_hugging_face_directory_is_converted_once(source, tmp_path):
    first = resolve_checkpoint(source, cache_dir=tmp_path / "cache")
    written = (first / MANIFEST_NAME).stat().st_mtime_ns
    again = resolve_checkpoint(source, cache_dir=tmp_path / "cache")
    assert again == first
    assert (first / MANIFEST_NAME).stat().st_mtime_ns == written
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [first.name]


def test_a_changed_source_is_converted_again(source, tmp_path):
    first = resolve_checkpoint(source, cache_dir=tmp_path / "cache")
    assert open_checkpoint(first).config.eos_token_ids == (0,)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    generation = json.loads((source / "generation_config.json").read_text())
    (source / "generation_config.json").write_text(json.dumps(generation | {"eos_token_id": 2}))
    again = resolve_checkpoint(source, cache_dir=tmp_path / "cache")
    assert again == first
    assert open_checkpoint(first).config.eos_token_ids == (2,)
    # Touching a file counts as a change too: the times of the weights stand for their contents.
    fingerprint = open_checkpoint(first).manifest.source_fingerprint
    os.utime(next(source.glob("*.safetensors")), ns=(0, 0))
    assert resolve_checkpoint(source, cache_dir=tmp_path / "cache") == first
    assert open_checkpoint(first).manifest.source_fingerprint != fingerprint


def test_sources_of_one_name_have_their_own_conversions(tmp_path):
    paths = {conversion_path(tmp_path / name / "model", tmp_path) for name in ("a", "b")}
    assert len(paths) == 2


def test_formats_of_one_source_have_their_own_conversions(source, tmp_path):
    for expert_format in ("plain", "nested"):
        path = resolve_checkpoint(source, cache_dir=tmp_path, expert_format=expert_format)
        assert open_checkpoint(path).manifest.expert_format == expert_format
        assert resolve_checkpoint(path, expert_format=expert_format) == path
    with pytest.raises(InvalidRequestError, match="holds nested experts, not plain"):
        resolve_checkpoint(path, expert_format="plain")


def test_the_environment_names_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "elsewhere"))
    assert conversion_path(TINY_SOURCE).parent == tmp_path / "elsewhere"


def test_a_hugging_face_directory_can_be_loaded(source, tmp_path):
    model = sj.load(source, expert_slots=8, max_context=32, cache_dir=tmp_path / "cache")
    assert model.path.parent == tmp_path / "cache"


@pytest.mark.parametrize("load", [sj.load, resolve_checkpoint])
def test_what_is_no_model_is_refused_by_name(tmp_path, load):
    with pytest.raises(MissingFileError, match="no such directory"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    with pytest.raises(MissingFileError, match="file: not a directory"):
        load(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"neither .*config\.json"):
        load(tmp_path / "empty")


@pytest.mark.parametrize("argument", ["path", "cache_dir"])
@pytest.mark.parametrize("value", [b"", b"model", 5, "", "a\0b", ["model"]])
def test_what_is_no_path_is_refused(tmp_path, argument, value):
    arguments = {"path": TINY_SOURCE, "cache_dir": tmp_path, argument: value}
    with pytest.raises(InvalidRequestError, match=f"^{argument}=.*expected the path"):
        resolve_checkpoint(arguments.pop("path"), **arguments)


@pytest.mark.parametrize("value", [None, b"", 5, ""])
def test_a_checkpoint_is_opened_by_path_only(value):
    with pytest.raises(InvalidRequestError, match=r"^path="):
        open_checkpoint(value)


def test_a_name_too_long_is_a_typed_error(tmp_path):
    for opened in (resolve_checkpoint, open_checkpoint):
        with pytest.raises(CheckpointError, match="name too long"):
            opened(tmp_path / ("x" * 300))
    with pytest.raises(InvalidRequestError, match="name too long"):
        resolve_checkpoint(TINY_SOURCE, cache_dir=tmp_path / ("x" * 300))


def test_a_cache_that_is_a_file_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidRequestError, match=r"file: cannot keep .*cache_dir"):
        resolve_checkpoint(TINY_SOURCE, cache_dir=tmp_path / "file")
    with pytest.raises(InvalidRequestError, match=r"file/below: cannot keep"):
        resolve_checkpoint(TINY_SOURCE, cache_dir=tmp_path / "file" / "below")


def test_a_system_error_while_converting_is_typed_and_names_the_file(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "some/file")

    monkeypatch.setattr("convert.convert_checkpoint", full, raising=False)
    with pytest.raises(CheckpointError, match="some/file: No space left on device, while"):
        resolve_checkpoint(TINY_SOURCE, cache_dir=tmp_path)


def test_a_running_conversion_is_waited_for_and_used(tmp_path, tiny_directory):
    target = conversion_path(TINY_SOURCE, tmp_path)
    partial = target.with_name(f"{target.name}.partial")
    partial.mkdir()
    lock = os.open(partial, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    told = []

    def the_other_one_finishes(what, done, total):
        told.append(what)
        shutil.copytree(tiny_directory, target)
        partial.rmdir()
        os.close(lock)

    assert resolve_checkpoint(TINY_SOURCE, cache_dir=tmp_path, progress=the_other_one_finishes)
    assert told == [f"waiting for another conversion into {target}"]
    assert list(tmp_path.iterdir()) == [target]
