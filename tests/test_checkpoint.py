"""Reading a converted checkpoint: what was written comes back, and damage is named."""

import json
import logging
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from convert import convert_checkpoint
from specter_jax.checkpoint import FORMAT_VERSION, open_checkpoint, orbax_io, read_manifest
from specter_jax.config import ModelConfig
from specter_jax.errors import (
    CheckpointError,
    ChecksumError,
    FormatVersionError,
    InvalidRequestError,
    MissingFileError,
)
from tests.checkpoints import (
    bfloat16,
    draft_tree,
    packed_expert,
    random_tensors,
    shared_tree,
    tiny_config,
    write_checkpoint,
)
from tests.convert_cases import edit_json

HF_CONFIG = tiny_config("deepseek_v2")
TENSORS = bfloat16(random_tensors(HF_CONFIG))
EXPERT_FILE = "experts/layers_02.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("converted")
    source = write_checkpoint(directory / "source", HF_CONFIG, TENSORS)
    return convert_checkpoint(source, directory / "model", expert_format="plain").path


@pytest.fixture
def converted(original: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def test_config_and_shared_parameters_come_back_exactly(original: Path) -> None:
    checkpoint = open_checkpoint(original, verify="checksums")
    config = ModelConfig.from_hf(HF_CONFIG)
    assert checkpoint.config == config
    expected = shared_tree(config, TENSORS, ml_dtypes.bfloat16)
    shared = checkpoint.load_shared("bfloat16")
    assert jax.tree.structure(shared) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, shared, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(shared)} == {np.dtype(ml_dtypes.bfloat16)}


def test_shared_parameters_are_converted_to_the_type_asked_for(original: Path) -> None:
    shared = open_checkpoint(original).load_shared("float32")
    assert {leaf.dtype for leaf in jax.tree.leaves(shared)} == {np.dtype(np.float32)}


def test_arrays_are_placed_on_the_device_asked_for(original: Path) -> None:
    device = jax.devices("cpu")[0]
    checkpoint = open_checkpoint(original)
    leaves = jax.tree.leaves(
        (checkpoint.load_shared("float32", device), checkpoint.load_draft(device))
    )
    assert all(leaf.devices() == {device} and leaf.committed for leaf in leaves)


def test_draft_is_the_encoding_of_each_expert(original: Path) -> None:
    expected = draft_tree(ModelConfig.from_hf(HF_CONFIG), TENSORS)
    draft = open_checkpoint(original).load_draft()
    assert jax.tree.structure(draft) == jax.tree.structure(expected)
    for result, value in zip(jax.tree.leaves(draft), jax.tree.leaves(expected), strict=True):
        assert result.dtype == value.dtype
        np.testing.assert_array_equal(result, value)


def test_experts_are_read_only_views_in_packed_order(original: Path) -> None:
    config = ModelConfig.from_hf(HF_CONFIG)
    experts = open_checkpoint(original).open_experts()
    assert experts.dtype == ml_dtypes.bfloat16
    assert experts.expert_bytes == 2 * config.expert_elements
    for moe_index, layer in enumerate(config.moe_layers):
        for expert in range(config.num_experts):
            view = experts.get(moe_index, expert)
            np.testing.assert_array_equal(view, packed_expert(config, TENSORS, layer, expert))
            assert not view.flags.owndata
            assert not view.flags.writeable


@pytest.mark.parametrize("index", [(-1, 0), (0, -1), (2, 0), (0, 8)])
def test_expert_out_of_range_is_refused(original: Path, index: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequestError, match="2 MoE layers of 8 experts"):
        open_checkpoint(original).open_experts().get(*index)


def test_expert_files_are_valid_for_the_safetensors_library(original: Path) -> None:
    config = ModelConfig.from_hf(HF_CONFIG)
    with safe_open(original / EXPERT_FILE, "numpy") as file:
        assert sorted(file.keys()) == [f"expert_{expert:03d}" for expert in range(8)]
        np.testing.assert_array_equal(
            file.get_tensor("expert_005"), packed_expert(config, TENSORS, 2, 5)
        )


def test_manifest_lists_every_other_file(original: Path) -> None:
    files = {
        path.relative_to(original).as_posix() for path in original.rglob("*") if path.is_file()
    }
    assert set(open_checkpoint(original).manifest.files) == files - {"manifest.json"}


@pytest.mark.parametrize(
    "name",
    [EXPERT_FILE, "config.json", "shared/outer/embed.weight/0.0", "draft/layers_01/_METADATA"],
)
@pytest.mark.parametrize("verify", ["sizes", "checksums"])
def test_truncated_file_is_named(converted: Path, name: str, verify: str) -> None:
    path = converted / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ChecksumError, match=rf"{name}.*bytes"):
        open_checkpoint(converted, verify=verify)


@pytest.mark.parametrize("name", [EXPERT_FILE, "draft/layers_01/tables/0.0.0"])
def test_missing_file_is_named(converted: Path, name: str) -> None:
    (converted / name).unlink()
    with pytest.raises(MissingFileError, match=name):
        open_checkpoint(converted)


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)


def test_changed_byte_is_found_by_checksums_only(converted: Path) -> None:
    flip_last_byte(converted / EXPERT_FILE)
    open_checkpoint(converted, verify="sizes")
    with pytest.raises(ChecksumError, match=rf"{EXPERT_FILE}.*SHA-256"):
        open_checkpoint(converted, verify="checksums")


def exchange(first: Path, second: Path) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def test_exchanged_expert_files_are_noticed(converted: Path) -> None:
    exchange(converted / "experts/layers_01.safetensors", converted / EXPERT_FILE)
    checkpoint = open_checkpoint(converted)
    with pytest.raises(ChecksumError, match=r"layers_01.*of decoder layer 2 .*those of layer 1"):
        checkpoint.open_experts()


@pytest.mark.parametrize("parts", ["draft", "shared"])
def test_exchanged_parameter_directories_are_noticed(
    original: Path, converted: Path, parts: str
) -> None:
    exchange(converted / parts / "layers_01", converted / parts / "layers_02")
    # Compressed sizes may differ; where they happen to be equal the contents must tell.
    manifest = read_manifest(original)
    sizes = {name: (converted / name).stat().st_size for name in manifest.files}
    files = {name: replace(record, bytes=sizes[name]) for name, record in manifest.files.items()}
    (converted / "manifest.json").write_text(replace(manifest, files=files).to_json())
    with pytest.raises(ChecksumError, match=rf"{parts}/layers_0.*SHA-256"):
        open_checkpoint(converted)


def test_draft_with_other_group_sizes_than_the_manifests_is_refused(converted: Path) -> None:
    edit_json(converted / "manifest.json", group_sizes={"gate_up": 8, "down": 32})
    with pytest.raises(CheckpointError, match=r"draft/layers_01: .*shapes"):
        open_checkpoint(converted).load_draft()


def test_experts_of_another_type_than_the_manifests_are_refused(converted: Path) -> None:
    edit_json(converted / "manifest.json", dtype="float16")
    with pytest.raises(ChecksumError, match=r"layers_01.*float16"):
        open_checkpoint(converted).open_experts()


def test_unreadable_array_names_its_part(converted: Path) -> None:
    path = converted / "draft" / "layers_01" / "down_codes" / "0.0.0"
    checkpoint = open_checkpoint(converted)
    path.write_bytes(b"\0" * path.stat().st_size)
    with pytest.raises(CheckpointError, match=r"draft/layers_01: not a readable"):
        checkpoint.load_draft()


def test_damaged_expert_header_is_named(converted: Path) -> None:
    path = converted / EXPERT_FILE
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"expert_007"', b'"expert_777"'))
    with pytest.raises(ChecksumError, match=rf"{EXPERT_FILE}: expected 8 tensors"):
        open_checkpoint(converted).open_experts()


@pytest.mark.parametrize("version", ["1", 1.0, True, None])
def test_format_version_that_is_no_number_is_refused(converted: Path, version: object) -> None:
    edit_json(converted / "manifest.json", version=version)
    with pytest.raises(FormatVersionError, match=rf"version={version!r}, expected the number 2"):
        open_checkpoint(converted)


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1])
def test_other_format_version_is_refused(converted: Path, version: object) -> None:
    edit_json(converted / "manifest.json", version=version)
    with pytest.raises(FormatVersionError, match=rf"version {version}.*reads version"):
        open_checkpoint(converted)


def test_unknown_and_missing_manifest_keys_are_named(converted: Path) -> None:
    edit_json(converted / "manifest.json", compression="zip")
    with pytest.raises(CheckpointError, match=r"unknown compression; .*group_sizes"):
        open_checkpoint(converted)
    edit_json(converted / "manifest.json", compression=None, family=None)
    with pytest.raises(CheckpointError, match="missing family"):
        open_checkpoint(converted)


def test_manifest_cannot_point_outside_of_its_directory(converted: Path) -> None:
    path = converted / "manifest.json"
    path.write_text(path.read_text().replace('"config.json"', '"../config.json"'))
    with pytest.raises(CheckpointError, match="outside"):
        open_checkpoint(converted)


@pytest.mark.parametrize("text", ["", "[]", '{"format": "other"}', '{"format": "specter-jax"'])
def test_what_is_no_manifest_is_refused(converted: Path, text: str) -> None:
    (converted / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        open_checkpoint(converted)


def test_unusable_model_config_is_refused(converted: Path) -> None:
    model = json.loads((converted / "manifest.json").read_text())["model"]
    edit_json(converted / "manifest.json", model={**model, "num_heds": 4})
    with pytest.raises(CheckpointError, match="num_heds"):
        open_checkpoint(converted)


def test_directory_without_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="no such file"):
        open_checkpoint(tmp_path)
    with pytest.raises(MissingFileError, match="no such directory"):
        open_checkpoint(tmp_path / "nowhere")


def test_unknown_way_to_verify_is_refused(original: Path) -> None:
    with pytest.raises(InvalidRequestError, match="verify"):
        open_checkpoint(original, verify="quick")


def test_threads_left_by_an_interrupt_do_not_report_the_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reported: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(str(args.exc_value)))
    monkeypatch.setattr(logging.getLogger("absl"), "filters", [])
    orbax_io._silence_shutdown.cache_clear()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("orbax.checkpoint.Checkpointer.save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        orbax_io.save_tree(tmp_path / "x", {"x": np.zeros(3)})

    def fail(message: str) -> None:
        logging.getLogger("absl").error("thread raised an exception: %s", message)
        raise RuntimeError(message)

    for message in ("cannot schedule new futures after interpreter shutdown", "disk on fire"):
        thread = threading.Thread(target=fail, args=(message,))
        thread.start()
        thread.join()
    assert reported == ["disk on fire"]
    assert [record.getMessage() for record in caplog.records if record.name == "absl"] == [
        "thread raised an exception: disk on fire"
    ]
