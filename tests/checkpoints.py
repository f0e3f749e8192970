"""Random tiny Hugging Face checkpoints of every family, made with NumPy alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from convert.mapping import canonical_name, expert_names, shared_targets
from pallas_kernels.int4.layout import encode
from specter_jax.config import ModelConfig, layer_name

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "hidden_act": "silu",
}

FAMILY_FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "intermediate_size": 96,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
    },
    "qwen2_moe": {
        "intermediate_size": 96,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "phimoe": {
        "intermediate_size": 64,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "qwen3_moe": {
        "intermediate_size": 96,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mixtral": {"intermediate_size": 64, "num_key_value_heads": 2, "num_local_experts": 8},
    "olmoe": {"intermediate_size": 64, "num_key_value_heads": 4, "num_experts": 8},
}


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """A config.json of the family: hidden 64, 3 layers, 8 experts, vocabulary 96."""
    return {"model_type": family, **SMALL, **FAMILY_FIELDS[family], **overrides}


def random_tensors(
    hf_config: dict[str, Any], seed: int = 0, dtype: np.typing.DTypeLike = np.float32
) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint under its canonical name.

    Router logits have a standard deviation of about 2, so experts' scores are far apart.
    """
    config = ModelConfig.from_hf(hf_config)
    rng = np.random.default_rng(seed)
    shapes = {name: target.shape for name, target in shared_targets(config).items()}
    inner, hidden = config.expert_intermediate_size, config.hidden_size
    for layer in config.moe_layers:
        for expert in range(config.num_experts):
            gate, up, down = expert_names(config, layer, expert)
            shapes |= {gate: (inner, hidden), up: (inner, hidden), down: (hidden, inner)}
    tensors = {}
    for name, shape in shapes.items():
        value = rng.standard_normal(shape)
        if "norm" in name and name.endswith("weight"):
            value = 1 + 0.2 * value
        elif name.endswith("bias"):
            value = 0.2 * value
        elif name.endswith("mlp.gate.weight"):
            value = value * 2 / shape[-1] ** 0.5
        elif name != "model.embed_tokens.weight":
            value = value / shape[-1] ** 0.5
        tensors[name] = value.astype(dtype)
    return tensors


def published_name(family: str, name: str) -> str:
    """The spelling that the family's published checkpoints use for a canonical name."""
    if family not in ("mixtral", "phimoe"):
        return name
    name = name.replace(".mlp.", ".block_sparse_moe.")
    for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        name = name.replace(ours, theirs)
    return name


def write_checkpoint(
    directory: Path,
    hf_config: dict[str, Any],
    tensors: dict[str, np.ndarray] | None = None,
    num_shards: int = 2,
) -> Path:
    """Writes config.json and safetensors shards with published names; returns the directory."""
    tensors = random_tensors(hf_config) if tensors is None else tensors
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config, indent=1))
    names = {published_name(hf_config["model_type"], name): name for name in tensors}
    if num_shards == 1:
        save_file({theirs: tensors[ours] for theirs, ours in names.items()},
                  directory / "model.safetensors", {"format": "pt"})  # fmt: skip
        return directory
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = list(names)[shard::num_shards]
        save_file({name: tensors[names[name]] for name in part}, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def read_checkpoint(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a Hugging Face directory under canonical names."""
    from safetensors import safe_open

    tensors = {}
    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(file, "numpy") as shard:
            tensors |= {canonical_name(name): shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return tensors


def shared_tree(
    config: ModelConfig, tensors: dict[str, np.ndarray], dtype: np.typing.DTypeLike = np.float32
) -> dict[str, Any]:
    """`params["shared"]` from tensors under canonical names."""
    tree: dict[str, Any] = {}
    for name, target in shared_targets(config).items():
        assert tensors[name].shape == target.shape, name
        node = tree
        for key in target.path[:-1]:
            node = node.setdefault(key, {})
        node[target.path[-1]] = tensors[name].astype(dtype)
    return tree


def packed_expert(
    config: ModelConfig, tensors: dict[str, np.ndarray], layer: int, expert: int
) -> np.ndarray:
    """One routed expert as the 1-D array that a slot holds."""
    return np.concatenate([tensors[n].reshape(-1) for n in expert_names(config, layer, expert)])


def all_resident(
    config: ModelConfig, tensors: dict[str, np.ndarray], order: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Slots with every expert, and the slot table [moe_layers, num_experts].

    order: a permutation of the slots, or None for (layer, expert) order.
    """
    total = config.num_moe_layers * config.num_experts
    order = np.arange(total) if order is None else order
    experts = [(layer, e) for layer in config.moe_layers for e in range(config.num_experts)]
    packed = [packed_expert(config, tensors, layer, expert) for layer, expert in experts]
    slots = np.empty((total, config.expert_elements), packed[0].dtype)
    slots[order] = np.stack(packed)
    return slots, order.reshape(config.num_moe_layers, config.num_experts).astype(np.int32)


def draft_tree(
    config: ModelConfig, tensors: dict[str, np.ndarray], groups: tuple[int, int] | None = None
) -> dict[str, dict[str, np.ndarray]]:
    """`params["draft"]`: every routed expert in INT4, with groups of (hidden, inner) elements."""
    groups = groups or (_group(config.hidden_size), _group(config.expert_intermediate_size))
    tree = {}
    for layer in config.moe_layers:
        encoded = []
        for expert in range(config.num_experts):
            weights = [tensors[name] for name in expert_names(config, layer, expert)]
            encoded.append(
                [encode(w, g) for w, g in zip(weights, (groups[0], *groups), strict=True)]
            )
        tree[layer_name(layer)] = {
            "gate_up_codes": np.stack([np.concatenate((g[0], u[0])) for g, u, _ in encoded]),
            "gate_up_scales": np.stack([np.concatenate((g[1], u[1])) for g, u, _ in encoded]),
            "down_codes": np.stack([d[0] for _, _, d in encoded]),
            "down_scales": np.stack([d[1] for _, _, d in encoded]),
            "tables": np.stack([np.stack([part[2] for part in parts]) for parts in encoded]),
        }
    return tree


def _group(size: int) -> int:
    return next(group for group in (128, 64, 32, 16, 8) if size % group == 0)


def bfloat16(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same tensors rounded to bfloat16."""
    return {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
