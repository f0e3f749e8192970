"""Conversion to nested experts: exact, as small as needed, and refused where it is not possible."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from convert import convert_checkpoint
from convert.cli import main
from pallas_kernels.nested import NestedLayout
from specter_jax.checkpoint import open_checkpoint
from specter_jax.errors import ChecksumError, ConversionError, InvalidRequestError
from tests.checkpoints import bfloat16, packed_expert, random_tensors, tiny_config, write_checkpoint
from tests.convert_cases import edit_json, small_source, stored_expert

HF_CONFIG = tiny_config("qwen2_moe")
EXPERT_FILE = "experts/layers_01.safetensors"


def spread_tensors() -> dict[str, np.ndarray]:
    """Weights over all magnitudes, more of them in later layers: every expert has other escapes."""
    rng = np.random.default_rng(0)
    tensors = bfloat16(random_tensors(HF_CONFIG))
    for name, array in tensors.items():
        if ".experts." in name:
            low = 2.0 ** -rng.integers(0, 40, array.shape)
            tensors[name] = bfloat16({name: array.astype(np.float32) * low})[name]
    return tensors


TENSORS = spread_tensors()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("nested")
    source = write_checkpoint(directory / "source", HF_CONFIG, TENSORS)
    return convert_checkpoint(source, directory / "model").path


@pytest.fixture
def converted(original: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(original, tmp_path / "model"))


def test_every_expert_comes_back_bit_for_bit(original: Path) -> None:
    checkpoint = open_checkpoint(original, verify="checksums")
    config = checkpoint.config
    assert checkpoint.manifest.expert_format == "nested"
    for moe_index, layer in enumerate(config.moe_layers):
        for expert in range(config.num_experts):
            np.testing.assert_array_equal(
                stored_expert(checkpoint, moe_index, expert).view(np.uint16),
                packed_expert(config, TENSORS, layer, expert).view(np.uint16),
            )


def test_experts_have_their_own_length_on_disk_and_one_length_in_slots(original: Path) -> None:
    checkpoint = open_checkpoint(original)
    config, experts = checkpoint.config, checkpoint.open_experts()
    sizes = (config.hidden_size, config.expert_intermediate_size)
    counts = {}
    for moe_index, layer in enumerate(config.moe_layers):
        with safe_open(original / f"experts/layers_{layer:02d}.safetensors", "numpy") as file:
            for expert in range(config.num_experts):
                stored = file.get_tensor(f"expert_{expert:03d}")
                layout = NestedLayout.from_words(*sizes, len(stored))
                counts[moe_index, expert] = experts.num_escapes(moe_index, expert)
                assert 0 <= layout.capacity - counts[moe_index, expert] < 128
                words = experts.get(moe_index, expert)
                assert words.dtype == experts.dtype == np.int32
                assert words.nbytes == experts.expert_bytes == checkpoint.expert_bytes
    assert len({-(-count // 128) for count in counts.values()}) > 1
    assert checkpoint.manifest.escape_capacity == -(-max(counts.values()) // 128) * 128


def test_the_default_is_nested_for_bfloat16_only(tmp_path: Path) -> None:
    formats = {}
    for dtype in ("bfloat16", "float16", "float32"):
        source = small_source(tmp_path / f"{dtype}-source")
        result = convert_checkpoint(source, tmp_path / dtype, dtype=dtype)
        formats[dtype] = (result.manifest.expert_format, result.manifest.escape_capacity > 0)
    assert formats == {
        "bfloat16": ("nested", True),
        "float16": ("plain", False),
        "float32": ("plain", False),
    }


def test_nested_is_refused_for_other_types(tmp_path: Path) -> None:
    source = small_source(tmp_path / "source")
    with pytest.raises(InvalidRequestError, match=r"nested: the experts are float16, .*bfloat16"):
        convert_checkpoint(source, tmp_path / "out", dtype="float16", expert_format="nested")
    with pytest.raises(InvalidRequestError, match="'zip'; expected one of nested, plain"):
        convert_checkpoint(source, tmp_path / "out", expert_format="zip")
    assert not (tmp_path / "out").exists()


def test_the_command_line_chooses_the_format(tmp_path: Path) -> None:
    source = small_source(tmp_path / "source")
    arguments = [str(source), str(tmp_path / "out"), "--quiet", "--expert-format"]
    for expert_format in ("plain", "nested"):
        assert main([*arguments, expert_format, "--force"]) == 0
        assert open_checkpoint(tmp_path / "out").manifest.expert_format == expert_format


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_named(tmp_path: Path, bad: float) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensor = TENSORS[name].copy()
    tensor[5, 7] = bad
    source = write_checkpoint(tmp_path / "source", HF_CONFIG, TENSORS | {name: tensor})
    with pytest.raises(ConversionError, match=rf"tensor {name} holds NaN or infinity"):
        convert_checkpoint(source, tmp_path / "out")


def test_a_manifest_with_less_room_than_the_experts_need_is_refused(converted: Path) -> None:
    edit_json(converted / "manifest.json", escape_capacity=128)
    with pytest.raises(ChecksumError, match="tensors of nested experts of at most"):
        open_checkpoint(converted).open_experts()


def test_a_manifest_of_another_format_is_refused(converted: Path) -> None:
    edit_json(converted / "manifest.json", expert_format="plain", escape_capacity=0)
    with pytest.raises(ChecksumError, match=r"expected 8 tensors of 6144 elements \(bfloat16\)"):
        open_checkpoint(converted).open_experts()


def test_words_that_contradict_themselves_are_refused(converted: Path) -> None:
    path = converted / EXPERT_FILE
    checkpoint = open_checkpoint(converted)
    layout = checkpoint.manifest.nested_layout
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    count = start + 4 * (layout.row_starts + layout.num_rows)
    content[count : count + 4] = (10**6).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(ChecksumError, match=r"expert \(1, 0\): an expert with 1000000 escapes"):
        checkpoint.open_experts().get(1, 0)
