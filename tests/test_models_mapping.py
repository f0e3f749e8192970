"""Checkpoint names lead to exactly the parameters that the modules have."""

import jax
import jax.numpy as jnp
import pytest

from convert.mapping import (
    canonical_name,
    expert_names,
    fused_expert_names,
    ignorable,
    shared_targets,
)
from specter_jax.config import FAMILIES, ModelConfig, layer_name
from specter_jax.models import init_kv
from specter_jax.models.layer_modules import DenseBlock, MoEBlock
from specter_jax.models.outer import Outer
from tests.checkpoints import published_name, random_tensors, tiny_config

VARIANTS = [
    *((family, {}) for family in FAMILIES),
    ("deepseek_v2", {"q_lora_rank": 24, "attention_bias": True, "mlp_bias": True}),
    ("deepseek_v2", {"n_shared_experts": 0, "tie_word_embeddings": True}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "qkv_bias": False}),
    ("qwen3_moe", {"mlp_only_layers": [0], "attention_bias": True}),
    ("phimoe", {"tie_word_embeddings": True}),
    ("olmoe", {"num_key_value_heads": 2, "attention_bias": True}),
]


def module_shapes(config: ModelConfig) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Paths and shapes of all parameters, as the modules would create them."""
    key = jax.random.key(0)
    tree = {"outer": jax.eval_shape(Outer(config).init, key, jnp.zeros((1, 2), jnp.int32))}
    hidden = jnp.zeros((1, 2, config.hidden_size))
    kv, lengths = init_kv(config, 1, 4), jnp.zeros(1, jnp.int32)
    seen = jnp.ones((1, 2), jnp.int32)
    for layer in range(config.num_layers):
        block = (MoEBlock if config.is_moe(layer) else DenseBlock)(config, layer)
        tree[layer_name(layer)] = jax.eval_shape(block.init, key, hidden, kv[layer], lengths, seen)
    tree = {part: variables["params"] for part, variables in tree.items()}
    return {
        tuple(entry.key for entry in path): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.mark.parametrize(("family", "fields"), VARIANTS)
def test_targets_are_the_parameters_of_the_modules(family, fields):
    config = ModelConfig.from_hf(tiny_config(family, **fields))
    targets = shared_targets(config).values()
    assert {target.path: target.shape for target in targets} == module_shapes(config)
    assert all(target.part in ("outer", *map(layer_name, range(3))) for target in targets)


@pytest.mark.parametrize("family", FAMILIES)
def test_published_names_come_back_to_canonical_ones(family):
    for name in random_tensors(tiny_config(family)):
        assert canonical_name(published_name(family, name)) == name
        assert canonical_name(name) == name


def test_names_by_hand():
    mixtral = ModelConfig.from_hf(tiny_config("mixtral"))
    gate, up, down = expert_names(mixtral, 2, 5)
    prefix = "model.layers.2.block_sparse_moe.experts.5."
    assert [canonical_name(prefix + f"{w}.weight") for w in ("w1", "w3", "w2")] == [gate, up, down]
    assert fused_expert_names(mixtral, 1)[0] == "model.layers.1.mlp.experts.gate_up_proj"
    phimoe = ModelConfig.from_hf(tiny_config("phimoe"))
    router = canonical_name("model.layers.0.mlp.router.weight")
    assert shared_targets(phimoe)[router].path == ("layers_00", "router", "weight")
    with pytest.raises(ValueError, match="not in tuple"):
        expert_names(ModelConfig.from_hf(tiny_config("deepseek_v2")), 0, 0)


def test_only_buffers_and_a_tied_head_may_be_left_out():
    tied = ModelConfig.from_hf(tiny_config("mixtral", tie_word_embeddings=True))
    untied = ModelConfig.from_hf(tiny_config("mixtral"))
    assert ignorable("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert ignorable("lm_head.weight", tied)
    assert not ignorable("lm_head.weight", untied)
    assert not ignorable("model.layers.0.self_attn.q_proj.bias", tied)
