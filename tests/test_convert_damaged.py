"""Conversion of bad sources: one line that names the culprit, exit code 2, nothing left behind."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from convert import ArraySource, LazyTensor, convert_checkpoint
from convert.cli import main
from convert.mapping import canonical_name
from convert.sources import INDEX_FILE
from specter_jax.checkpoint.safetensors_file import DamagedFileError, read_header
from specter_jax.errors import ConversionError, UnsupportedModelError
from tests.checkpoints import bfloat16, random_tensors, tiny_config, write_checkpoint
from tests.convert_cases import edit_json, fused, write_canonical

HF_CONFIG = tiny_config("deepseek_v2")
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"
DOWN = "model.layers.2.mlp.experts.7.down_proj.weight"
SHARD = "model-00001-of-00002.safetensors"


def converted_tensors(**changes: np.ndarray | None) -> dict[str, np.ndarray]:
    """A good model's tensors with some replaced, or removed where None."""
    tensors = {**bfloat16(random_tensors(HF_CONFIG)), **changes}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def fails(source: Path, capsys: pytest.CaptureFixture, *expected: str, options: tuple = ()) -> None:
    """Runs the command and checks code, the one line, and that nothing stays."""
    before = set(source.parent.iterdir())
    assert main([str(source), str(source.parent / "out"), *options]) == 2
    output, message = capsys.readouterr()
    assert output == ""
    assert message.startswith("error: ")
    assert message.count("\n") == 1, message
    for part in expected:
        assert part in message
    assert set(source.parent.iterdir()) == before


def truncate(source: Path) -> None:
    path = source / SHARD
    path.write_bytes(path.read_bytes()[:-100])


def empty_shard(source: Path) -> None:
    (source / SHARD).write_bytes(b"")


def lengthen(source: Path) -> None:
    path = source / SHARD
    path.write_bytes(path.read_bytes() + b"\0")


def spoil_header(source: Path) -> None:
    path = source / SHARD
    content = bytearray(path.read_bytes())
    content[8:12] = b"????"
    path.write_bytes(content)


def remove_shard(source: Path) -> None:
    (source / SHARD).unlink()


def remove_index(source: Path) -> None:
    (source / INDEX_FILE).unlink()


def spoil_index(source: Path) -> None:
    (source / INDEX_FILE).write_text('{"weight_map": ')


def empty_index(source: Path) -> None:
    edit_json(source / INDEX_FILE, weight_map={})


def unlist_tensor(source: Path) -> None:
    weight_map = json.loads((source / INDEX_FILE).read_text())["weight_map"]
    del weight_map[GATE]
    edit_json(source / INDEX_FILE, weight_map=weight_map)


def list_in_wrong_shard(source: Path) -> None:
    weight_map = json.loads((source / INDEX_FILE).read_text())["weight_map"]
    other = {SHARD: SHARD.replace("00001-", "00002-")}
    edit_json(
        source / INDEX_FILE, weight_map={**weight_map, GATE: other.get(weight_map[GATE], SHARD)}
    )


def remove_config(source: Path) -> None:
    (source / "config.json").unlink()


def spoil_config(source: Path) -> None:
    (source / "config.json").write_text("{")


NESTED = b"[" * 100_000
LATIN = '{"model_type": "\xe9"}'.encode("latin-1")


def replacing(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda source: (source / name).write_bytes(content) and None


def header_of(content: bytes) -> Callable[[Path], None]:
    """A shard with this header and nothing else."""
    return replacing(SHARD, struct.pack("<Q", len(content)) + content)


def header_with(**tensor: object) -> Callable[[Path], None]:
    """A shard with one tensor described like this, and no data."""
    fields = {"dtype": "BF16", "shape": [0], "data_offsets": [0, 0], **tensor}
    return header_of(json.dumps({"x": fields}).encode())


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        *(
            (replacing(name, content), (name, reason))
            for name in ("config.json", "generation_config.json", INDEX_FILE)
            for content, reason in ((NESTED, "nested too deeply"), (LATIN, "not text in utf-8"))
        ),
        (header_of(NESTED), (SHARD, "header", "nested too deeply")),
        (header_of(LATIN), (SHARD, "header", "not text in utf-8")),
        (header_of(b'{"__metadata__": {"a": 1}}'), (SHARD, "header", "__metadata__")),
        (header_of(b'{"x": 1}'), (SHARD, "header", "tensor x")),
        (header_with(dtype=["BF16"]), (SHARD, "header", "tensor x")),
        (header_with(shape=["0"]), (SHARD, "header", "tensor x")),
        (header_with(shape=[-1]), (SHARD, "header", "tensor x")),
        (header_with(data_offsets=[0]), (SHARD, "header", "tensor x")),
        (header_with(data_offsets=[0.0, 0.5]), (SHARD, "header", "tensor x")),
        (truncate, (SHARD, "truncated")),
        (empty_shard, (SHARD, "not a safetensors file")),
        (lengthen, (SHARD, "damaged")),
        (spoil_header, (SHARD, "header")),
        (remove_shard, (SHARD, "no such file")),
        (remove_index, (INDEX_FILE, "no such file")),
        (spoil_index, (INDEX_FILE, "JSON")),
        (empty_index, (INDEX_FILE, "weight_map")),
        (unlist_tensor, (GATE, "no entry")),
        (list_in_wrong_shard, (GATE, "missing", INDEX_FILE)),
        (remove_config, ("config.json", "no such file")),
        (spoil_config, ("config.json", "not JSON")),
    ],
)
def test_damaged_directory_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    damage: Callable[[Path], None],
    expected: tuple[str, ...],
) -> None:
    source = write_checkpoint(tmp_path / "source", HF_CONFIG, converted_tensors())
    damage(source)
    fails(source, capsys, *expected)


BF16_DOWN = bfloat16({"": np.ones((64, 32))})[""]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({DOWN: None}, (DOWN, "missing")),
        ({"model.norm.weight": None}, ("model.norm.weight", "missing")),
        ({DOWN: BF16_DOWN.T.copy()}, (DOWN, "[32, 64]", "[64, 32]")),
        ({"lm_head.weight": BF16_DOWN}, ("lm_head.weight", "expected [96, 64]")),
        ({DOWN: BF16_DOWN.astype(np.int8)}, (DOWN, "I8", "BF16, F16, F32")),
        ({DOWN: BF16_DOWN.astype(np.float32)}, (DOWN, "float32", "--dtype")),
        ({"model.layers.2.mlp.bonus": BF16_DOWN}, ("mlp.bonus", "not part of a deepseek_v2")),
        ({DOWN: np.full_like(BF16_DOWN, np.nan)}, (DOWN, "NaN")),
        (
            {"model.norm.weight": np.full_like(BF16_DOWN[:, 0], np.inf)},
            ("model.norm.weight", "infinity"),
        ),
    ],
)
def test_wrong_tensor_is_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    changes: dict[str, np.ndarray | None],
    expected: tuple[str, ...],
) -> None:
    tensors = converted_tensors(**changes)
    source = write_checkpoint(tmp_path / "source", HF_CONFIG, tensors)
    fails(source, capsys, *expected)


def test_missing_tensor_is_named_in_the_sources_spelling(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = tiny_config("mixtral")
    tensors = bfloat16(random_tensors(config))
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
    source = write_checkpoint(tmp_path / "source", config, tensors)
    fails(source, capsys, "model.layers.0.block_sparse_moe.experts.2.w3.weight is missing")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("block_sparse_moe.gate.weight", "mlp.gate.weight"),
        ("mlp.router.weight", "mlp.gate.weight"),
        ("block_sparse_moe.experts.0.w1.weight", "block_sparse_moe.experts.0.gate_proj.weight"),
        ("block_sparse_moe.experts.5.w2.weight", "mlp.experts.5.down_proj.weight"),
    ],
)
def test_two_tensors_of_one_parameter_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, one: str, other: str
) -> None:
    config = tiny_config("mixtral")
    tensors = bfloat16(random_tensors(config))
    names = [f"model.layers.0.{name}" for name in (one, other)]
    tensor = tensors.pop(canonical_name(names[0]))
    spelled = {**tensors, names[0]: tensor, names[1]: tensor + tensor}
    source = write_canonical(tmp_path / "source", config, spelled)
    fails(source, capsys, *names, "one parameter")


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_wrong_fused_tensor_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, name: str
) -> None:
    tensors = fused(HF_CONFIG, converted_tensors())
    full_name = f"model.layers.2.mlp.experts.{name}"
    for number, changed in enumerate(
        (None, tensors[full_name][:7], np.full_like(tensors[full_name], np.nan))
    ):
        case = {**tensors, full_name: changed}
        source = tmp_path / f"{number}" / "source"
        source.parent.mkdir()
        write_canonical(source, HF_CONFIG, {k: v for k, v in case.items() if v is not None})
        fails(source, capsys, full_name)


def test_value_beyond_bfloat16_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tensors = random_tensors(HF_CONFIG)
    tensors[DOWN][0, 0] = 3.4e38
    source = write_checkpoint(tmp_path / "source", HF_CONFIG, tensors)
    fails(source, capsys, DOWN, "not finite in bfloat16")


def test_value_beyond_the_chosen_type_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    tensors = random_tensors(HF_CONFIG)
    tensors[DOWN][0, 0] = 1e6
    source = write_checkpoint(tmp_path / "source", HF_CONFIG, tensors)
    fails(source, capsys, DOWN, "float16", options=("--dtype", "float16"))


@pytest.mark.parametrize(
    ("field", "value"), [("model_type", "llama"), ("hidden_act", "gelu"), ("hidden_size", "big")]
)
def test_unsupported_config_field_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, field: str, value: str
) -> None:
    source = write_checkpoint(tmp_path / "source", HF_CONFIG, converted_tensors())
    edit_json(source / "config.json", **{field: value})
    fails(source, capsys, field)
    with pytest.raises(UnsupportedModelError, match=field):
        convert_checkpoint(source, tmp_path / "out")


@pytest.mark.parametrize("size", ["0", "12", "128", "64,64", "8,8,8", "many"])
def test_group_size_out_of_range_ends_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture, size: str
) -> None:
    source = write_checkpoint(tmp_path / "source", HF_CONFIG, converted_tensors())
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main([str(source), str(tmp_path / "out"), "--group-size", size]))
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == [source]


def test_model_that_int4_cannot_hold_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = tiny_config("deepseek_v2", moe_intermediate_size=20)
    source = write_checkpoint(tmp_path / "source", config, bfloat16(random_tensors(config)))
    fails(source, capsys, "expert size 20 is not a multiple of 8")


def test_directory_of_other_weights_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = tmp_path / "source"
    fails(source, capsys, "no such directory")
    source.mkdir()
    fails(source, capsys, "config.json")
    (source / "config.json").write_text(json.dumps(HF_CONFIG))
    (source / "pytorch_model.bin").write_bytes(b"x")
    fails(source, capsys, "only safetensors")


def test_header_that_contradicts_itself_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    source = write_checkpoint(tmp_path / "source", HF_CONFIG, converted_tensors(), num_shards=1)
    path = source / "model.safetensors"
    save_file({"x": BF16_DOWN}, path)
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header["x"]["shape"] = [64, 64]
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + content[8 + length :])
    fails(source, capsys, "model.safetensors", "tensor x", "shape")


def test_header_with_overlapping_tensors_is_refused(tmp_path: Path) -> None:
    entry = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
    raw = json.dumps({"x": entry, "y": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"\0" * 4)
    with pytest.raises(DamagedFileError, match="tensor y does not begin"):
        read_header(path)


def test_python_source_that_breaks_its_word_is_named(tmp_path: Path) -> None:
    lazy = LazyTensor(shape=(64, 32), dtype=BF16_DOWN.dtype, read=lambda: BF16_DOWN[:32])
    source = ArraySource(HF_CONFIG, converted_tensors(**{DOWN: lazy}), identity="broken")
    with pytest.raises(ConversionError, match=f"{DOWN} was made as"):
        convert_checkpoint(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
