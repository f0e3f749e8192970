"""config.json of each supported family -> `ModelConfig`.

Defaults are those of the family's configuration class in transformers 5.24, because published
config.json files leave out fields that equal them.
"""

from __future__ import annotations

from typing import Any

from specter_jax.config.checks import shown
from specter_jax.config.deepseek import deepseek_v2
from specter_jax.config.fields import HfFields
from specter_jax.config.model import FAMILIES, FULL_ATTENTION, ModelConfig
from specter_jax.config.rope import RopeConfig, rope_from_hf
from specter_jax.config.sizes import model_sizes
from specter_jax.errors import UnsupportedModelError


def config_from_hf(config: dict[str, Any], generation_config: dict[str, Any]) -> ModelConfig:
    """See `ModelConfig.from_hf`."""
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"config.json holds a {type(config).__name__}, not an object")
    if not isinstance(generation_config, dict):
        raise UnsupportedModelError(
            f"generation_config.json holds a {type(generation_config).__name__}, not an object"
        )
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"config field model_type={shown(family)} is not supported; expected one of "
            + ", ".join(FAMILIES)
        )
    fields = HfFields(family, config)
    if fields.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.reject("hidden_act", "silu")
    if fields.get("quantization_config") is not None:
        raise fields.reject("quantization_config", "an unquantized checkpoint")
    values = _BUILDERS[family](fields)
    overrides = {
        name: generation_config[name]
        for name in ("bos_token_id", "eos_token_id")
        if generation_config.get(name) is not None
    }
    tokens = HfFields(family, {**config, **overrides})
    eos_default, bos_default = _TOKEN_DEFAULTS[family]
    bos = tokens.token_ids("bos_token_id", bos_default)
    built = ModelConfig(
        family=family,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=tokens.token_ids("eos_token_id", eos_default),
        bos_token_id=bos[0] if bos else None,
        **values,
    )
    _check(built)
    built.check()
    return built


_TOKEN_DEFAULTS: dict[str, tuple[int | None, int | None]] = {
    "deepseek_v2": (2, 1),
    "qwen2_moe": (None, None),
    "phimoe": (2, 1),
    "qwen3_moe": (None, None),
    "mixtral": (2, 1),
    "olmoe": (50279, None),
}


def _check(config: ModelConfig) -> None:
    """Relations between fields that every family must satisfy."""

    def fail(field: str, value: object, expected: str) -> None:
        raise UnsupportedModelError(
            f"{config.family}: config field {field}={value} is not supported; expected {expected}"
        )

    if not config.moe_layers:
        fail("num_hidden_layers", config.num_layers, "at least one layer with routed experts")
    if config.top_k > config.num_experts:
        fail("num_experts_per_tok", config.top_k, f"at most {config.num_experts} (experts)")
    if config.num_heads % config.num_kv_heads:
        fail("num_key_value_heads", config.num_kv_heads, f"a divisor of {config.num_heads}")


def _gqa(
    fields: HfFields,
    sizes: dict[str, Any],
    *,
    heads: int,
    kv_heads: int | None,
    theta: float = 10000.0,
) -> dict[str, Any]:
    """Grouped-query attention; kv_heads None means as many as query heads."""
    num_heads = fields.integer("num_attention_heads", heads)
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        if sizes["hidden_size"] % num_heads:
            raise fields.reject(
                "num_attention_heads", f"a divisor of hidden_size ({sizes['hidden_size']})"
            )
        head_dim = sizes["hidden_size"] // num_heads
    rope: RopeConfig = rope_from_hf(
        fields,
        dim=head_dim,
        max_context=sizes["max_context"],
        default_theta=theta,
        interleaved=False,
    )
    return {
        "attention": "gqa",
        "num_heads": num_heads,
        "num_kv_heads": fields.integer("num_key_value_heads", kv_heads or num_heads),
        "head_dim": head_dim,
        "v_head_dim": head_dim,
        "rope": rope,
        "softmax_scale": head_dim**-0.5,
        "windows": (FULL_ATTENTION,) * sizes["num_layers"],
    }


def _sparse_layers(fields: HfFields, num_layers: int) -> tuple[int, ...]:
    """Layers with experts by `decoder_sparse_step` and `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.layer_list("mlp_only_layers", num_layers)
    return tuple(
        layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0
    )


def _window(fields: HfFields, num_layers: int, default: int | None) -> tuple[int, ...]:
    """One sliding window for all layers, or none."""
    window = fields.optional_integer("sliding_window", default)
    return (FULL_ATTENTION if window is None else window,) * num_layers


def _qwen2_moe(fields: HfFields) -> dict[str, Any]:
    sizes = model_sizes(fields, vocab=151936, hidden=2048, layers=24, context=32768)
    gqa = _gqa(fields, sizes, heads=16, kv_heads=16)
    return {
        **sizes,
        **gqa,
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "qkv_bias": fields.flag("qkv_bias", True),
        "windows": _qwen2_windows(fields, sizes["num_layers"]),
        "num_experts": fields.first_integer(("num_experts", "num_local_experts"), 60),
        "top_k": fields.integer("num_experts_per_tok", 4),
        "expert_intermediate_size": fields.integer("moe_intermediate_size", 1408),
        "moe_layers": _sparse_layers(fields, sizes["num_layers"]),
        "normalize_weights": fields.flag("norm_topk_prob", False),
        "dense_intermediate_size": fields.integer("intermediate_size", 5632),
        "shared_intermediate_size": fields.integer("shared_expert_intermediate_size", 5632),
        "shared_expert_gate": True,
    }


def _qwen2_windows(fields: HfFields, num_layers: int) -> tuple[int, ...]:
    """`layer_types` if given, else every other layer below `max_window_layers` slides."""
    sliding = fields.flag("use_sliding_window", False)
    below = fields.integer("max_window_layers", 28, minimum=0)
    kinds = fields.get("layer_types")
    if kinds is None:
        slides = [sliding and i < below and bool((i + 1) % 2) for i in range(num_layers)]
    else:
        valid = ("full_attention", "sliding_attention")
        if (
            not isinstance(kinds, list)
            or len(kinds) != num_layers
            or any(k not in valid for k in kinds)
        ):
            raise fields.reject("layer_types", f"{num_layers} entries, each one of {valid}")
        slides = [kind == "sliding_attention" for kind in kinds]
    if not any(slides):
        return (FULL_ATTENTION,) * num_layers
    if not sliding:
        raise fields.reject("use_sliding_window", "true where layer_types has sliding_attention")
    window = fields.integer("sliding_window", 4096)
    return tuple(window if slide else FULL_ATTENTION for slide in slides)


def _phimoe(fields: HfFields) -> dict[str, Any]:
    sizes = model_sizes(fields, vocab=32064, hidden=4096, layers=32, context=4096 * 32)
    if fields.integer("num_experts_per_tok", 2) != 2:
        raise fields.reject("num_experts_per_tok", "2 (sparse-mixer routing picks two)")
    bias = fields.flag("attention_bias", False)
    return {
        **sizes,
        **_gqa(fields, sizes, heads=32, kv_heads=8, theta=1e6),
        "norm": "layer",
        "norm_eps": fields.number("rms_norm_eps", 1e-5),
        "qkv_bias": bias,
        "output_bias": bias,
        "lm_head_bias": fields.flag("lm_head_bias", False),
        "windows": _window(fields, sizes["num_layers"], None),
        "num_experts": fields.first_integer(("num_local_experts", "num_experts"), 16),
        "top_k": 2,
        "expert_intermediate_size": fields.integer("intermediate_size", 6400),
        "moe_layers": tuple(range(sizes["num_layers"])),
        "routing": "sparse_mixer",
        "router_jitter": fields.number("router_jitter_noise", 0.01, positive=False),
    }


def _qwen3_moe(fields: HfFields) -> dict[str, Any]:
    sizes = model_sizes(fields, vocab=151936, hidden=2048, layers=24, context=32768)
    bias = fields.flag("attention_bias", False)
    if fields.flag("use_sliding_window", False):
        windows = _window(fields, sizes["num_layers"], 4096)
    else:
        windows = (FULL_ATTENTION,) * sizes["num_layers"]
    return {
        **sizes,
        **_gqa(fields, sizes, heads=32, kv_heads=4),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "qkv_bias": bias,
        "output_bias": bias,
        "qk_norm": "head",
        "windows": windows,
        "num_experts": fields.first_integer(("num_experts", "num_local_experts"), 128),
        "top_k": fields.integer("num_experts_per_tok", 8),
        "expert_intermediate_size": fields.integer("moe_intermediate_size", 768),
        "moe_layers": _sparse_layers(fields, sizes["num_layers"]),
        "normalize_weights": fields.flag("norm_topk_prob", False),
        "dense_intermediate_size": fields.integer("intermediate_size", 6144),
    }


def _mixtral(fields: HfFields) -> dict[str, Any]:
    sizes = model_sizes(fields, vocab=32000, hidden=4096, layers=32, context=4096 * 32)
    return {
        **sizes,
        **_gqa(fields, sizes, heads=32, kv_heads=8, theta=1e6),
        "norm_eps": fields.number("rms_norm_eps", 1e-5),
        "windows": _window(fields, sizes["num_layers"], None),
        "num_experts": fields.first_integer(("num_local_experts", "num_experts"), 8),
        "top_k": fields.integer("num_experts_per_tok", 2),
        "expert_intermediate_size": fields.integer("intermediate_size", 14336),
        "moe_layers": tuple(range(sizes["num_layers"])),
        "normalize_weights": True,
    }


def _olmoe(fields: HfFields) -> dict[str, Any]:
    sizes = model_sizes(fields, vocab=50304, hidden=2048, layers=16, context=4096)
    bias = fields.flag("attention_bias", False)
    gqa = _gqa(fields, sizes, heads=16, kv_heads=None)
    if gqa["head_dim"] * gqa["num_heads"] != sizes["hidden_size"]:
        raise fields.reject("head_dim", "hidden_size divided by num_attention_heads")
    clip = fields.get("clip_qkv")
    return {
        **sizes,
        **gqa,
        "norm_eps": fields.number("rms_norm_eps", 1e-5),
        "qkv_bias": bias,
        "output_bias": bias,
        "qk_norm": "full",
        "qkv_clip": None if clip is None else fields.number("clip_qkv", 1.0),
        "num_experts": fields.first_integer(("num_experts", "num_local_experts"), 64),
        "top_k": fields.integer("num_experts_per_tok", 8),
        "expert_intermediate_size": fields.integer("intermediate_size", 2048),
        "moe_layers": tuple(range(sizes["num_layers"])),
        "normalize_weights": fields.flag("norm_topk_prob", False),
    }


_BUILDERS = {
    "deepseek_v2": deepseek_v2,
    "qwen2_moe": _qwen2_moe,
    "phimoe": _phimoe,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
}
