"""Logits equal those of transformers: a prompt and 32 cached decode steps, float32."""

from pathlib import Path

import numpy as np
import pytest

from specter_jax.config import ModelConfig
from tests.checkpoints import (
    all_resident,
    random_tensors,
    read_checkpoint,
    shared_tree,
    tiny_config,
    write_checkpoint,
)
from tests.decoding import decode_logits, relative_error, transformers_logits

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

PROMPT, STEPS = 24, 32
# What the project promises; measured errors are near 1e-6, the rounding of two float32 programs.
TOLERANCE = 1e-4

YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
# Between short and long factors a token changes by a lot; 40 lies within the decoded range.
LONGROPE = {
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
    "original_max_position_embeddings": 40,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES = {
    "deepseek_v2": {
        "yarn_new_style": {
            "num_hidden_layers": 2,
            "rope_parameters": {
                **YARN,
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "beta_fast": 16,
                "beta_slow": 2,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        },
        "q_lora_groups_yarn_old_style": {
            "num_hidden_layers": 2,
            "first_k_dense_replace": 0,
            "q_lora_rank": 24,
            "attention_bias": True,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5000.0,
            "rope_scaling": {**YARN, "type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5},
        },
        "mlp_bias_linear_tied": {
            "num_hidden_layers": 2,
            "mlp_bias": True,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
            "rope_scaling": {"type": "linear", "factor": 2.0},
        },
    },
    "qwen2_moe": {
        "plain": {"num_hidden_layers": 2},
        "sparse_step_mlp_only_normalized_yarn": {
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "rope_scaling": {**YARN, "rope_type": "yarn"},
        },
        "sliding_window_dynamic": {
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 2,
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        },
    },
    "phimoe": {
        "plain": {"num_hidden_layers": 2},
        "longrope": {
            "num_hidden_layers": 2,
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 40,
            "rope_scaling": {
                **LONGROPE,
                "type": "longrope",
                "short_mscale": 1.1,
                "long_mscale": 1.3,
            },
        },
        "no_biases_sliding_window": {
            "num_hidden_layers": 2,
            "attention_bias": False,
            "lm_head_bias": False,
            "router_jitter_noise": 0.1,
            "sliding_window": 8,
        },
    },
    "qwen3_moe": {
        "plain": {"num_hidden_layers": 2},
        "mlp_only_bias_llama3": {
            "num_hidden_layers": 2,
            "mlp_only_layers": [0],
            "attention_bias": True,
            "norm_topk_prob": False,
            "rope_parameters": LLAMA3,
        },
        "sliding_window_longrope": {
            "num_hidden_layers": 2,
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 30,
            "rope_parameters": {**LONGROPE, "rope_type": "longrope", "rope_theta": 10000.0},
        },
    },
    "mixtral": {
        "plain": {"num_hidden_layers": 2},
        "sliding_window_top3_head_dim": {
            "num_hidden_layers": 2,
            "head_dim": 32,
            "num_experts_per_tok": 3,
            "sliding_window": 8,
            "rope_theta": 10000.0,
        },
        "prompt_beyond_original_longrope": {
            "num_hidden_layers": 2,
            "head_dim": 16,
            "rope_parameters": {
                **LONGROPE,
                "original_max_position_embeddings": 16,
                "rope_type": "longrope",
                "rope_theta": 10000.0,
            },
        },
    },
    "olmoe": {
        "clip_qkv": {"num_hidden_layers": 2, "clip_qkv": 0.8},
        "grouped_bias_normalized": {
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "norm_topk_prob": True,
        },
    },
}
NAMED = [(family, name) for family, cases in CASES.items() for name in cases]


def load_reference(directory: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@pytest.mark.parametrize(("family", "name"), NAMED, ids=["-".join(case) for case in NAMED])
def test_random_checkpoint_matches_transformers(family, name, tmp_path):
    hf_config = tiny_config(family, **CASES[family][name])
    tensors = random_tensors(hf_config, seed=len(name))
    model = load_reference(write_checkpoint(tmp_path, hf_config, tensors))
    tokens = np.random.default_rng(5).integers(0, hf_config["vocab_size"], PROMPT + STEPS)

    config = ModelConfig.from_hf(hf_config)
    slots, table = all_resident(config, tensors)
    logits = decode_logits(config, shared_tree(config, tensors), slots, table, tokens, PROMPT)

    assert relative_error(logits, transformers_logits(model, tokens, PROMPT)) <= TOLERANCE


def test_trained_checkpoint_matches_transformers():
    directory = Path(__file__).parent / "data" / "tiny-deepseek_v2"
    if not directory.exists():
        pytest.skip("tests/data/tiny-deepseek_v2 is absent")
    import json

    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    tensors = {k: v.astype(np.float32) for k, v in read_checkpoint(directory).items()}
    tokens = np.random.default_rng(6).integers(4, config.vocab_size, PROMPT + STEPS)
    slots, table = all_resident(config, tensors)
    logits = decode_logits(config, shared_tree(config, tensors), slots, table, tokens, PROMPT)

    reference = transformers_logits(load_reference(directory), tokens, PROMPT)
    assert relative_error(logits, reference) <= TOLERANCE
