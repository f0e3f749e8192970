"""Small sources for the conversion's tests."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from convert.mapping import expert_names, fused_expert_names
from pallas_kernels.nested import decode_numpy
from specter_jax.checkpoint import Checkpoint
from specter_jax.config import ModelConfig
from tests.checkpoints import bfloat16, random_tensors, tiny_config, write_checkpoint

EMBEDDED_MODEL = Path(__file__).parent / "data" / "tiny-deepseek_v2"


def small_source(directory: Path, family: str = "deepseek_v2", num_shards: int = 2) -> Path:
    """A random bf16 model of 3 layers and 8 experts, published names."""
    config = tiny_config(family)
    return write_checkpoint(directory, config, bfloat16(random_tensors(config)), num_shards)


def fused(hf_config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tensors with each layer's experts as two 3-D ones."""
    config = ModelConfig.from_hf(hf_config)
    result = dict(tensors)
    for layer in config.moe_layers:
        names = [expert_names(config, layer, expert) for expert in range(config.num_experts)]
        gate_up, down = fused_expert_names(config, layer)
        result[gate_up] = np.stack(
            [np.concatenate([result[gate], result[up]]) for gate, up, _ in names]
        )
        result[down] = np.stack([result[name] for _, _, name in names])
        for name in (name for expert in names for name in expert):
            del result[name]
    return result


def write_canonical(
    directory: Path, hf_config: dict[str, Any], tensors: dict[str, np.ndarray]
) -> Path:
    """Writes a single-file model under the names that the tensors have here."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf_config, indent=1))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def stored_expert(checkpoint: Checkpoint, moe_index: int, expert: int) -> np.ndarray:
    """A converted expert as packed weights, in whatever format it is stored."""
    array = checkpoint.open_experts().get(moe_index, expert)
    if checkpoint.manifest.expert_format == "plain":
        return array
    draft = checkpoint.load_draft_layer(moe_index)
    names = ("gate_up_codes", "gate_up_scales", "down_codes", "down_scales")
    return decode_numpy(array, *(np.asarray(draft[name][expert]) for name in names))


def digests(directory: Path) -> dict[str, str]:
    """SHA-256 of every file below a directory."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def edit_json(path: Path, **changes: Any) -> None:
    """Sets keys of a JSON object; None deletes."""
    document = json.loads(path.read_text())
    for key, value in changes.items():
        document[key] = value
        if value is None:
            del document[key]
    path.write_text(json.dumps(document))
