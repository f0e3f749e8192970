"""Conversion of good sources: whatever the source's layout, the result is the same."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convert import ArraySource, LazyTensor, convert_checkpoint
from convert.cli import main
from specter_jax.checkpoint import GroupSizes, open_checkpoint
from specter_jax.config import ModelConfig
from specter_jax.errors import InvalidRequestError
from tests.checkpoints import (
    FAMILY_FIELDS,
    bfloat16,
    packed_expert,
    random_tensors,
    read_checkpoint,
    tiny_config,
    write_checkpoint,
)
from tests.convert_cases import (
    EMBEDDED_MODEL,
    digests,
    fused,
    small_source,
    stored_expert,
    write_canonical,
)


def weights(directory: Path) -> dict[str, str]:
    """Digests of the files that hold weights."""
    return {name: digest for name, digest in digests(directory).items() if "/" in name}


def test_embedded_model_converts_with_its_tokenizer(tmp_path: Path) -> None:
    result = convert_checkpoint(EMBEDDED_MODEL, tmp_path / "model")
    checkpoint = open_checkpoint(result.path, verify="checksums")
    assert checkpoint.manifest.family == "deepseek_v2"
    assert checkpoint.manifest.group_sizes == GroupSizes(gate_up=128, down=64)
    assert checkpoint.manifest.moe_layers == (1, 2, 3, 4, 5)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (result.path / name).read_bytes() == (EMBEDDED_MODEL / name).read_bytes()
    tensors = read_checkpoint(EMBEDDED_MODEL)
    np.testing.assert_array_equal(
        stored_expert(checkpoint, 4, 31), packed_expert(checkpoint.config, tensors, 5, 31)
    )


def test_conversion_is_reproducible_to_the_byte(tmp_path: Path) -> None:
    source = small_source(tmp_path / "source")
    first, second = (convert_checkpoint(source, tmp_path / name).path for name in ("a", "b"))
    assert digests(first) == digests(second)


@pytest.mark.parametrize("family", ["deepseek_v2", "mixtral"])
def test_fused_and_single_file_sources_give_the_same_weights(tmp_path: Path, family: str) -> None:
    config = tiny_config(family)
    tensors = bfloat16(random_tensors(config))
    sources = [
        write_checkpoint(tmp_path / "sharded", config, tensors, num_shards=3),
        write_checkpoint(tmp_path / "single", config, tensors, num_shards=1),
        write_canonical(tmp_path / "fused", config, fused(config, tensors)),
    ]
    results = [
        weights(convert_checkpoint(source, tmp_path / f"{source.name}-out").path)
        for source in sources
    ]
    assert results[0] == results[1] == results[2]
    assert len(results[0]) > 20


@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILY_FIELDS)
def test_both_layouts_that_transformers_saves_are_read(tmp_path: Path, family: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    hf_config = transformers.AutoConfig.for_model(**tiny_config(family))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(hf_config).to(torch.bfloat16)
    results = []
    for original in (True, False):
        source = tmp_path / f"source-{original}"
        model.save_pretrained(source, save_original_format=original)
        results.append(convert_checkpoint(source, tmp_path / f"out-{original}").path)
    assert weights(results[0]) == weights(results[1])
    checkpoint = open_checkpoint(results[0])
    layer = checkpoint.config.moe_layers[-1]
    block = model.model.layers[layer].mlp.experts
    expected = torch.cat([block.gate_up_proj[7].flatten(), block.down_proj[7].flatten()])
    packed = stored_expert(checkpoint, len(checkpoint.config.moe_layers) - 1, 7)
    np.testing.assert_array_equal(packed.astype(np.float32), expected.float().detach().numpy())


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_source_type_is_kept(tmp_path: Path, dtype: type) -> None:
    config = tiny_config("qwen2_moe")
    tensors = random_tensors(config, dtype=dtype)
    source = write_checkpoint(tmp_path / "source", config, tensors)
    checkpoint = open_checkpoint(convert_checkpoint(source, tmp_path / "out").path)
    expert = stored_expert(checkpoint, 0, 3)
    assert expert.dtype == dtype
    np.testing.assert_array_equal(expert, packed_expert(ModelConfig.from_hf(config), tensors, 0, 3))
    embedding = checkpoint.load_shared(dtype)["outer"]["embed"]["weight"]
    np.testing.assert_array_equal(embedding, tensors["model.embed_tokens.weight"])


def test_type_can_be_chosen(tmp_path: Path) -> None:
    config = tiny_config("olmoe")
    tensors = random_tensors(config)
    source = write_checkpoint(tmp_path / "source", config, tensors)
    result = convert_checkpoint(source, tmp_path / "out", dtype="bfloat16")
    checkpoint = open_checkpoint(result.path)
    assert checkpoint.manifest.dtype == "bfloat16"
    np.testing.assert_array_equal(
        stored_expert(checkpoint, 1, 2),
        packed_expert(checkpoint.config, bfloat16(tensors), 1, 2),
    )


@pytest.mark.parametrize(
    ("requested", "sizes"),
    [
        (None, (64, 32)),
        (16, (16, 16)),
        (np.int64(16), (16, 16)),
        ((64, 8), (64, 8)),
        ([64, 8], (64, 8)),
        ((np.int32(32), 32), (32, 32)),
    ],
)
def test_group_sizes_are_as_requested(
    tmp_path: Path, requested: int | Sequence[int] | None, sizes: tuple[int, int]
) -> None:
    source = small_source(tmp_path / "source")  # hidden size 64, expert size 32
    result = convert_checkpoint(source, tmp_path / "out", group_size=requested)
    assert result.manifest.group_sizes == GroupSizes(gate_up=sizes[0], down=sizes[1])
    layer = open_checkpoint(result.path).load_draft()["layers_01"]
    assert layer["gate_up_scales"].shape == (8, 64, 64 // sizes[0])
    assert layer["down_scales"].shape == (8, 64, 32 // sizes[1])


@pytest.mark.parametrize("requested", [0, -8, 4, 12, 48, 128, (64, 64), (8, 8, 8)])
def test_group_size_out_of_range_is_refused(
    tmp_path: Path, requested: int | tuple[int, ...]
) -> None:
    source = small_source(tmp_path / "source")
    with pytest.raises(InvalidRequestError, match="group size"):
        convert_checkpoint(source, tmp_path / "out", group_size=requested)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("group_size", value)
            for value in (
                *("64", b"64", 16.0, True, np.float32(16), np.array([64, 32]), {64: 32}),
                *([16.0, 16], (64, None), (64, "32"), (True, 8), [], [64], [[64, 32]], [64, 8, 8]),
            )
        ),
        *(("dtype", value) for value in (5, ["float32"], np.float32)),
        *(("expert_format", value) for value in (5, ["plain"], np.array(["plain"] * 2))),
        ("progress", 5),
    ],
    ids=str,
)
def test_argument_of_the_wrong_type_is_refused_before_anything_is_written(
    tmp_path: Path, name: str, value: Any
) -> None:
    source = small_source(tmp_path / "source")
    with pytest.raises(InvalidRequestError, match=name.replace("_", ".")) as caught:
        convert_checkpoint(source, tmp_path / "out", **{name: value})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


def test_progress_counts_up_to_the_total(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    source = small_source(tmp_path / "source")
    convert_checkpoint(source, tmp_path / "out", progress=lambda *call: calls.append(call))
    assert [done for _, done, _ in calls] == list(range(1, len(calls) + 1))
    assert {total for _, _, total in calls} == {len(calls)}
    assert calls[-1][0] == "experts/layers_02"


def test_tensors_may_come_from_python(tmp_path: Path) -> None:
    config = tiny_config("mixtral")
    tensors = fused(config, bfloat16(random_tensors(config)))
    lazy = {
        name: LazyTensor(
            shape=tensor.shape,
            dtype=tensor.dtype,
            read=lambda tensor=tensor: tensor,
            read_slice=lambda index, tensor=tensor: tensor[index],
        )
        for name, tensor in tensors.items()
    }
    on_disk = write_canonical(tmp_path / "source", config, tensors)
    expected = weights(convert_checkpoint(on_disk, tmp_path / "a").path)
    for number, given in enumerate((tensors, lazy)):
        source = ArraySource(
            config, given, identity="random mixtral", files={"tokenizer.json": b"{}"}
        )
        result = convert_checkpoint(source, tmp_path / f"b{number}")
        assert weights(result.path) == expected
        assert (result.path / "tokenizer.json").read_bytes() == b"{}"


def test_command_converts_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = small_source(tmp_path / "source")
    arguments = [str(source), str(tmp_path / "out")]
    assert main([*arguments, "--quiet", "--group-size", "32,16"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main([*arguments, "--group-size", "32,16"]) == 0
    assert "already converted" in capsys.readouterr().out
    assert main([*arguments, "--group-size", "16"]) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*arguments, "--group-size", "16", "--force"]) == 0
    assert "MB in" in capsys.readouterr().out
    assert open_checkpoint(tmp_path / "out").manifest.group_sizes.down == 16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
