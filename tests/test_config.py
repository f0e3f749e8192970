"""config.json -> ModelConfig: defaults, both rope styles, and errors that name the field."""

import json

import pytest

from specter_jax.config import FAMILIES, ModelConfig
from specter_jax.errors import UnsupportedModelError
from tests.checkpoints import tiny_config

YARN = {
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 16,
    "beta_slow": 2,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_manifest_form_restores_an_equal_hashable_config(family):
    config = ModelConfig.from_hf(tiny_config(family))
    restored = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert restored == config
    assert hash(restored) == hash(config)


def test_manifest_form_with_unknown_or_missing_keys_is_refused():
    data = ModelConfig.from_hf(tiny_config("mixtral")).to_dict()
    with pytest.raises(UnsupportedModelError, match="colour"):
        ModelConfig.from_dict({**data, "colour": 1})
    del data["hidden_size"]
    with pytest.raises(UnsupportedModelError, match="hidden_size"):
        ModelConfig.from_dict(data)


def test_old_and_new_rope_styles_read_the_same():
    old = tiny_config("deepseek_v2", rope_theta=5000.0, rope_scaling={**YARN, "type": "yarn"})
    parameters = {**YARN, "rope_type": "yarn", "rope_theta": 5000.0}
    new = tiny_config("deepseek_v2", rope_parameters=parameters)
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)
    rope = ModelConfig.from_hf(new).rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max) == ("yarn", 5000.0, 4.0, 64)
    assert (rope.beta_fast, rope.beta_slow) == (16, 2)
    assert (rope.mscale, rope.mscale_all_dim) == (0.7, 0.9)


@pytest.mark.parametrize(
    ("family", "theta"), [("mixtral", 1e6), ("phimoe", 1e6), ("olmoe", 1e4), ("qwen3_moe", 1e4)]
)
def test_missing_rope_theta_takes_the_family_default(family, theta):
    assert ModelConfig.from_hf(tiny_config(family)).rope.theta == theta


def test_top_level_original_context_wins_over_the_one_inside():
    factors = [1.0] * 8
    scaling = {
        "type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "short_mscale": 1.2,
        "long_mscale": 1.3,
        "original_max_position_embeddings": 64,
    }
    config = tiny_config("phimoe", rope_scaling=scaling, original_max_position_embeddings=32)
    assert ModelConfig.from_hf(config).rope.original_max == 32


def test_sparse_layers_follow_step_and_list():
    config = tiny_config(
        "qwen2_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]
    )
    assert ModelConfig.from_hf(config).moe_layers == (1, 5)
    config = tiny_config("deepseek_v2", num_hidden_layers=4, first_k_dense_replace=2)
    assert ModelConfig.from_hf(config).moe_layers == (2, 3)


def test_sliding_windows_by_family():
    sliding = {"use_sliding_window": True, "sliding_window": 6, "num_hidden_layers": 4}
    qwen2 = tiny_config("qwen2_moe", **sliding, max_window_layers=3)
    assert ModelConfig.from_hf(qwen2).windows == (6, 0, 6, 0)
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    assert ModelConfig.from_hf({**qwen2, "layer_types": kinds}).windows == (0, 6, 0, 0)
    assert ModelConfig.from_hf(tiny_config("qwen3_moe", **sliding)).windows == (6, 6, 6, 6)
    off = tiny_config("qwen3_moe", sliding_window=6, use_sliding_window=False)
    assert ModelConfig.from_hf(off).windows == (0, 0, 0)


def test_generation_config_decides_the_end_tokens():
    config = tiny_config("olmoe", eos_token_id=1)
    assert ModelConfig.from_hf(config).eos_token_ids == (1,)
    assert ModelConfig.from_hf(config, {"eos_token_id": [2, 0]}).eos_token_ids == (2, 0)


def test_absent_query_rank_is_the_default_and_null_is_none():
    config = tiny_config("deepseek_v2")
    assert ModelConfig.from_hf(config).q_lora_rank == 0
    del config["q_lora_rank"]
    assert ModelConfig.from_hf(config).q_lora_rank == 1536


BAD = [
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func"),
    ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1},
     "n_group"),
    ("deepseek_v2", {"first_k_dense_replace": 3}, "num_hidden_layers"),
    ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok"),
    ("phimoe", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "short_mscale"),
    ("mixtral", {"hidden_act": "gelu"}, "hidden_act"),
    ("mixtral", {"hidden_size": "64"}, "hidden_size"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ("mixtral", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("mixtral", {"rope_scaling": {"type": "su", "factor": 2.0}}, r"rope_scaling\.type"),
    ("mixtral", {"rope_parameters": {"rope_type": "proportional"}}, r"rope_parameters\.rope_type"),
    ("mixtral", {"rope_parameters": {"rope_type": "yarn", "factor": -1}}, r"factor"),
    ("mixtral", {"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor"),
    ("mixtral", {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
     "rope_parameters"),
    ("mixtral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("mixtral", {"quantization_config": {"bits": 4}}, "quantization_config"),
    ("qwen3_moe", {"mlp_only_layers": [7]}, "mlp_only_layers"),
    ("qwen2_moe", {"layer_types": ["full_attention"]}, "layer_types"),
    ("olmoe", {"head_dim": 32}, "head_dim"),
    ("olmoe", {"clip_qkv": -1}, "clip_qkv"),
    ("mixtral", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ("mixtral", {"hidden_size": 10**30}, "hidden_size"),
    ("mixtral", {"num_local_experts": 10**7}, "num_experts"),
    ("mixtral", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ("mixtral", {"rope_theta": float("nan")}, "rope_theta"),
    ("mixtral", {"rope_scaling": {"type": "longrope", "short_factor": [0.0] * 8,
                                  "long_factor": [1.0] * 8}}, "short_factor"),
    ("mixtral", {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 4.0,
                                  "high_freq_factor": 4.0}}, "high_freq_factor"),
    ("mixtral", {"hidden_act": "x" * 10_000}, "hidden_act"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "fields", "named"), BAD)
def test_unsupported_option_is_refused_by_name(family, fields, named):
    with pytest.raises(UnsupportedModelError, match=named) as error:
        ModelConfig.from_hf(tiny_config(family, **fields))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_generation_config_that_is_no_object_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"generation_config\.json"):
        ModelConfig.from_hf(tiny_config("mixtral"), [1])


def test_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(UnsupportedModelError, match=r"llama.*deepseek_v2"):
        ModelConfig.from_hf({"model_type": "llama"})


@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family):
    """A config.json that says nothing describes the family's default model."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(family, num_experts_per_tok=2)
    said = {"model_type": family, "num_experts_per_tok": 2}
    ours = ModelConfig.from_hf(said)
    full = ModelConfig.from_hf({**theirs.to_dict(), "model_type": family})
    assert ours == full
