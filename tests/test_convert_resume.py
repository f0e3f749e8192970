"""Interruption, resumption and publication of a conversion."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import convert.conversion
import convert.layers
from convert import convert_checkpoint
from convert.cli import EXIT_INTERRUPTED, main
from specter_jax.checkpoint import open_checkpoint
from specter_jax.errors import ConversionError, InvalidRequestError
from tests.convert_cases import digests, small_source

LAST_LAYER = "experts/layers_02"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_source(tmp_path / "source")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def interrupt_in(part: str, error: BaseException):
    """A progress callback that raises in a part."""

    def callback(current: str, done: int, total: int) -> None:
        if current == part:
            raise error

    return callback


def interrupt(source: Path, out: Path, part: str = LAST_LAYER) -> Path:
    """Interrupts a conversion within a part; returns the partial directory."""
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, out, progress=interrupt_in(part, KeyboardInterrupt()))
    return out.with_name("out.partial")


def count_writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the Orbax directories written from now on."""
    written: list[str] = []
    save_tree = convert.layers.save_tree

    def counting(path: Path, tree: dict) -> None:
        written.append(f"{path.parent.name}/{path.name}")
        save_tree(path, tree)

    monkeypatch.setattr(convert.layers, "save_tree", counting)
    return written


def test_resumed_conversion_is_identical_and_keeps_finished_layers(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = digests(convert_checkpoint(source, tmp_path / "straight").path)
    interrupt(source, out)
    assert not out.exists()
    written = count_writes(monkeypatch)
    result = convert_checkpoint(source, out)
    assert written == ["draft/layers_02"]
    assert result.num_resumed == 6  # companions, outer, three layers' shared parts, one MoE layer
    assert digests(out) == expected
    assert not out.with_name("out.partial").exists()


def test_layer_damaged_since_the_interruption_is_written_again(
    source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = digests(convert_checkpoint(source, tmp_path / "straight").path)
    partial = interrupt(source, out)
    path = partial / "experts" / "layers_01.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # same size
    path.write_bytes(content)
    written = count_writes(monkeypatch)
    convert_checkpoint(source, out)
    assert written == ["draft/layers_01", "draft/layers_02"]
    assert digests(out) == expected


@pytest.mark.parametrize("change", ["source", "option", "journal"])
def test_parts_of_another_conversion_are_not_kept(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    partial = interrupt(source, out)
    group_size = None
    if change == "source":
        shard = next(iter(sorted(source.glob("*.safetensors"))))
        os.utime(shard, ns=(0, 0))
    elif change == "option":
        group_size = 16
    else:
        (partial / "journal.json").write_text("{")
    written = count_writes(monkeypatch)
    assert convert_checkpoint(source, out, group_size=group_size).num_resumed == 0
    assert len(written) == 6
    open_checkpoint(out, verify="checksums")


def test_interruption_before_anything_is_finished_leaves_nothing(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert.conversion, "_write_companions", stop)
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(source, out)
    assert list(out.parent.iterdir()) == [source]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_command_says_how_to_go_on(
    source: Path,
    out: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    save_tree = convert.layers.save_tree

    def interrupted(path: Path, tree: dict) -> None:
        if path.name == "layers_01":
            signal.raise_signal(number)
        save_tree(path, tree)

    with monkeypatch.context() as patch:
        patch.setattr(convert.layers, "save_tree", interrupted)
        assert main([str(source), str(out)]) == EXIT_INTERRUPTED
    message = capsys.readouterr().err
    assert message.startswith("interrupted; finished parts are in ")
    assert message.count("\n") == 1
    assert sorted(path.name for path in out.parent.iterdir()) == ["out.partial", "source"]
    assert main([str(source), str(out)]) == 0
    assert "parts kept from before" in capsys.readouterr().out


def test_full_disk_keeps_what_is_finished(
    source: Path, out: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, tree: dict) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(convert.layers, "save_tree", full)
        assert main([str(source), str(out)]) == 2
    message = capsys.readouterr().err
    assert "No space left on device; finished parts are in " in message
    assert message.count("\n") == 1
    assert convert_checkpoint(source, out).num_resumed == 1


def test_bad_value_late_in_the_source_removes_everything(source: Path, out: Path) -> None:
    error = ConversionError("as if a tensor of the last layer were bad")
    with pytest.raises(ConversionError):
        convert_checkpoint(source, out, progress=interrupt_in(LAST_LAYER, error))
    assert list(out.parent.iterdir()) == [source]


def test_source_changed_meanwhile_is_noticed(source: Path, out: Path) -> None:
    def change(part: str, done: int, total: int) -> None:
        if done == total:
            os.utime(source / "model-00001-of-00002.safetensors", ns=(0, 0))

    with pytest.raises(ConversionError, match="changed while"):
        convert_checkpoint(source, out, progress=change)
    assert list(out.parent.iterdir()) == [source]


def test_destination_appears_only_when_complete(source: Path, out: Path) -> None:
    seen: list[bool] = []
    convert_checkpoint(source, out, progress=lambda *_: seen.append(out.exists()))
    assert seen
    assert not any(seen)
    assert out.exists()


def test_finished_conversion_is_left_alone(source: Path, out: Path) -> None:
    assert not convert_checkpoint(source, out).already_there
    before = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in sorted(out.rglob("*"))]
    assert convert_checkpoint(source, out).already_there
    assert before == [(p.stat().st_ino, p.stat().st_mtime_ns) for p in sorted(out.rglob("*"))]


def test_other_conversion_is_replaced_only_by_force(source: Path, out: Path) -> None:
    convert_checkpoint(source, out, group_size=16)
    before = digests(out)
    with pytest.raises(InvalidRequestError, match="--force"):
        convert_checkpoint(source, out)
    assert digests(out) == before
    convert_checkpoint(source, out, force=True)
    assert open_checkpoint(out, verify="checksums").manifest.group_sizes.gate_up == 64
    assert sorted(path.name for path in out.parent.iterdir()) == ["out", "source"]


def test_failed_replacement_keeps_the_old_conversion(source: Path, out: Path) -> None:
    convert_checkpoint(source, out, group_size=16)
    before = digests(out)
    with pytest.raises(ConversionError):
        convert_checkpoint(
            source, out, force=True, progress=interrupt_in(LAST_LAYER, ConversionError("bad"))
        )
    assert digests(out) == before


def test_damaged_conversion_is_not_taken_for_finished(source: Path, out: Path) -> None:
    convert_checkpoint(source, out)
    (out / "config.json").unlink()
    with pytest.raises(InvalidRequestError, match="files are missing"):
        convert_checkpoint(source, out)
    convert_checkpoint(source, out, force=True)
    open_checkpoint(out, verify="checksums")


def test_foreign_directories_are_never_replaced(source: Path, out: Path) -> None:
    for path in (out, out.with_name("out.partial")):
        path.mkdir()
        (path / "thesis.txt").write_text("only copy")
        with pytest.raises(InvalidRequestError, match="exists and is not"):
            convert_checkpoint(source, out, force=True)
        assert (path / "thesis.txt").read_text() == "only copy"
        (path / "thesis.txt").unlink()
        path.rmdir()
    out.write_text("a file")
    with pytest.raises(InvalidRequestError, match="not a directory"):
        convert_checkpoint(source, out, force=True)


def test_empty_directory_is_a_fine_destination(source: Path, out: Path) -> None:
    out.mkdir()
    convert_checkpoint(source, out)
    open_checkpoint(out)


@pytest.mark.parametrize("destination", [".", ".."])
def test_source_cannot_be_its_own_destination(source: Path, destination: str) -> None:
    before = digests(source)
    with pytest.raises(InvalidRequestError, match="overwrite the source"):
        convert_checkpoint(source, source / destination, force=True)
    assert digests(source) == before


def test_destination_inside_of_the_source_is_refused(source: Path) -> None:
    before = digests(source)
    for destination in (source / "out", source / "deep" / "er", source / ".." / source.name / "x"):
        with pytest.raises(InvalidRequestError, match="inside of the source"):
            convert_checkpoint(source, destination, force=True)
    assert digests(source) == before


@pytest.mark.parametrize("length", [250, 300])  # with and without room for ".partial"
def test_destination_with_too_long_a_name_is_one_line(
    source: Path, capsys: pytest.CaptureFixture, length: int
) -> None:
    assert main([str(source), str(source.parent / ("x" * length))]) == 2
    message = capsys.readouterr().err
    assert message.endswith("File name too long\n")
    assert message.count("\n") == 1


def test_file_that_cannot_be_written_further_is_named(
    source: Path, out: Path, capsys: pytest.CaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))  # fails within an expert file
    try:
        assert main([str(source), str(out), "--expert-format", "plain"]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    message = capsys.readouterr().err
    assert "out.partial/experts/layers_01.safetensors: File too large; finished" in message
    assert message.count("\n") == 1


def test_second_conversion_into_the_same_place_is_refused(source: Path, out: Path) -> None:
    partial = interrupt(source, out)
    before = digests(partial)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(ConversionError, match="another conversion"):
            convert_checkpoint(source, out)
    finally:
        os.close(descriptor)
    assert digests(partial) == before
    assert convert_checkpoint(source, out).num_resumed == 6


MEMORY_PROGRAM = """
import resource, sys
from pathlib import Path
import ml_dtypes, numpy as np
from tests.checkpoints import tiny_config
from convert import ArraySource, LazyTensor, convert_checkpoint
from convert.mapping import expert_names, shared_targets
from specter_jax.config import ModelConfig

def source(layers):
    hf = tiny_config("qwen3_moe", hidden_size=512, moe_intermediate_size=512, num_experts=16,
                     num_hidden_layers=layers)
    config = ModelConfig.from_hf(hf)
    shapes = {name: target.shape for name, target in shared_targets(config).items()}
    for layer in config.moe_layers:
        for expert in range(config.num_experts):
            shapes.update(dict.fromkeys(expert_names(config, layer, expert), (512, 512)))
    def make(shape):
        count = int(np.prod(shape))
        return np.resize(np.linspace(-1, 1, 1000), count).reshape(shape).astype(ml_dtypes.bfloat16)
    tensors = {name: LazyTensor(shape=shape, dtype=ml_dtypes.bfloat16,
                                read=lambda shape=shape: make(shape))
               for name, shape in shapes.items()}
    return ArraySource(hf, tensors, identity=f"{layers} layers")

out = Path(sys.argv[1])
peaks = []
for layers in (2, 10):
    result = convert_checkpoint(source(layers), out / str(layers))
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
written = sum(record.bytes for record in result.manifest.files.values()) / 2**20
print(peaks[1] - peaks[0], written)
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    # A model of 10 layers after one of 2: 12 MiB of experts and 6 MiB of draft a layer. What is
    # held is one layer's draft and one expert, so the larger model may take hardly more.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    finished = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM, str(tmp_path)],
        env=environment,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    growth_mib, written_mib = map(float, finished.stdout.split())
    assert written_mib > 100
    assert growth_mib < 16
