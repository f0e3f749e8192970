"""The manifest's values: types, ranges, and agreement with the model and the files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specter_jax.checkpoint import FORMAT_NAME, FORMAT_VERSION, Manifest
from specter_jax.config import ModelConfig
from specter_jax.errors import CheckpointError
from tests.checkpoints import tiny_config

PATH = Path("model/manifest.json")
RECORD = {"bytes": 1, "sha256": "0" * 64}


def document() -> dict[str, Any]:
    """A good manifest of a model with two MoE layers of 8 experts."""
    config = ModelConfig.from_hf(tiny_config("deepseek_v2"))
    files = ["config.json", "shared/outer/x", "experts/layers_01.safetensors"]
    files += ["experts/layers_02.safetensors", "draft/layers_01/x", "draft/layers_02/x"]
    files += [f"shared/layers_0{layer}/x" for layer in range(3)]
    return {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "family": "deepseek_v2",
        "model": json.loads(json.dumps(config.to_dict())),
        "dtype": "bfloat16",
        "expert_format": "nested",
        "escape_capacity": 256,
        "group_sizes": {"gate_up": 64, "down": 32},
        "expert_elements": config.expert_elements,
        "num_experts": 8,
        "moe_layers": [1, 2],
        "shared_parts": ["layers_00", "layers_01", "layers_02", "outer"],
        "source_fingerprint": "abc",
        "files": dict.fromkeys(files, RECORD),
    }


def parse(value: dict[str, Any]) -> Manifest:
    return Manifest.from_json(json.dumps(value).encode(), PATH)


def test_a_good_manifest_is_read_and_written_again() -> None:
    manifest = parse(document())
    assert Manifest.from_json(manifest.to_json().encode(), PATH) == manifest
    assert manifest.config == ModelConfig.from_hf(tiny_config("deepseek_v2"))


def test_plain_experts_have_no_escapes() -> None:
    plain = parse(document() | {"expert_format": "plain", "escape_capacity": 0})
    assert plain.nested_layout is None
    assert plain.expert_bytes == 2 * plain.expert_elements
    nested = parse(document())
    assert nested.nested_layout.capacity == 256
    assert nested.expert_bytes == 4 * nested.nested_layout.num_words


def setting(*keys: str, value: Any) -> Callable[[dict], None]:
    def change(document: dict[str, Any]) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


def without_files(prefix: str) -> Callable[[dict], None]:
    def change(document: dict[str, Any]) -> None:
        for name in [name for name in document["files"] if name.startswith(prefix)]:
            del document["files"][name]

    return change


NO_OBJECTS = ("x", 5, None, [1], True)
BAD = [
    *((("family",), value, "family") for value in ("mixtral", "", None, 5)),
    *((("dtype",), value, "dtype") for value in ("int8", "", None, 16, ["bfloat16"])),
    *((("dtype",), value, "expert_format") for value in ("float16", "float32")),
    *((("expert_format",), value, "expert_format") for value in ("int8", "", None, 5)),
    *((("expert_format",), value, "escape_capacity") for value in ("plain",)),
    *((("escape_capacity",), value, "escape_capacity") for value in (-128, 100, "128", None)),
    *((("group_sizes",), value, "group_sizes") for value in ({}, {"gate_up": 64}, *NO_OBJECTS)),
    *((("group_sizes", "gate_up"), value, "gate_up") for value in ("64", 0, -8, 12, 128, 8.0)),
    *((("expert_elements",), value, "expert_elements") for value in ("6144", 0, -1, 6143, None)),
    *((("num_experts",), value, "num_experts") for value in ("8", 0, 7, 8.0, True, 10**30)),
    *(
        (("moe_layers",), value, "moe_layers")
        for value in ([1, 2, 3], [], [2, 1], [1], [1, 1], ["1", "2"], "12", 5, None, {"1": 2})
    ),
    *(
        (("shared_parts",), value, "shared_parts")
        for value in ([5], [], ["outer"], "outer", None, [["outer"]], ["outer"] * 4)
    ),
    *((("source_fingerprint",), value, "source_fingerprint") for value in (5, None, "")),
    *((("files",), value, "files") for value in ({}, *NO_OBJECTS)),
    *((("files", "config.json"), value, "config.json") for value in ({}, *NO_OBJECTS)),
    *(
        (("files", "config.json", "bytes"), value, "config.json")
        for value in ("1", -1, 1.5, None, 10**30)
    ),
    *((("files", "config.json", "sha256"), value, "config.json") for value in ("", "0" * 63, 5)),
    *((("files", name), RECORD, "outside") for name in ("", "/etc/passwd", "../x", "a/../../x")),
    *((("model",), value, "model") for value in ({}, *NO_OBJECTS)),
    *((("model", "rope"), value, "rope") for value in ({}, *NO_OBJECTS)),
    *(
        (("model", "hidden_size"), value, "hidden_size")
        for value in ("64", -1, 3.5, None, 0, True, 10**30)
    ),
    *((("model", "num_layers"), value, "num_layers|moe_layers") for value in (-1, 0, 2, 10**9)),
    *((("model", "top_k"), value, "top_k") for value in (0, 9, "2")),
    *((("model", "moe_layers"), value, "moe_layers") for value in ([], [1, 5], [2, 1], "12", None)),
    *((("model", "windows"), value, "windows") for value in ([], [0, 0, -1], [0, 0, "a"], 5)),
    *((("model", "eos_token_ids"), value, "eos_token_ids") for value in ([-1], ["a"], 5)),
    *((("model", "norm_eps"), value, "norm_eps") for value in ("x", 0, -1.0, None, 1e400)),
    *((("model", "tie_word_embeddings"), value, "tie_word") for value in (0, "false", None)),
    *((("model", "routing"), value, "routing") for value in ("", "topk", 5, ["softmax"])),
    *((("model", "num_kv_heads"), value, "num_kv_heads") for value in (0, 3, 8)),
    *((("model", "rope", "dim"), value, r"rope\.dim") for value in (0, 7, 64, "8", None)),
    *((("model", "rope", "theta"), value, r"rope\.theta") for value in (0, "1", None)),
    *((("model", "rope", "kind"), value, r"rope\.kind") for value in ("magic", None, 1)),
    *((("model", "rope", "long_factor"), value, "long_factor") for value in ([1.0], "x", [None])),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "value", "named"), BAD)
def test_a_bad_value_is_one_line_that_names_it(
    keys: tuple[str, ...], value: Any, named: str
) -> None:
    damaged = document()
    damaged["files"] = dict(damaged["files"])
    if keys[:2] == ("files", "config.json"):
        damaged["files"]["config.json"] = dict(RECORD)
    setting(*keys, value=value)(damaged)
    with pytest.raises(CheckpointError, match=named) as caught:
        parse(damaged)
    message = str(caught.value)
    assert message.startswith(f"{PATH}: ")
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize(
    "part",
    ["shared/outer", "shared/layers_02", "draft/layers_01", "experts/layers_02.safetensors"],
)
def test_a_part_without_files_is_named(part: str) -> None:
    damaged = document()
    without_files(part)(damaged)
    with pytest.raises(CheckpointError, match=f"files lists nothing of {part}"):
        parse(damaged)


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a":' * 100_000, b'{"format": "\xff"}', b"\xff\xfe{", b"[]"]
)
def test_what_is_no_json_object_is_one_line(content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^model/manifest\.json: ") as caught:
        Manifest.from_json(content, PATH)
    assert "\n" not in str(caught.value)
