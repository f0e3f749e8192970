"""config.json of DeepSeek-V2: latent attention, shared experts, routing within groups."""

from __future__ import annotations

import math
from typing import Any

from specter_jax.config.fields import HfFields
from specter_jax.config.model import FULL_ATTENTION
from specter_jax.config.rope import rope_from_hf
from specter_jax.config.sizes import model_sizes


def deepseek_v2(fields: HfFields) -> dict[str, Any]:
    """Fields of `ModelConfig`; raises UnsupportedModelError."""
    sizes = model_sizes(fields, vocab=102400, hidden=4096, layers=32, context=2048)
    num_heads = fields.integer("num_attention_heads", 32)
    if fields.integer("num_key_value_heads", num_heads) != num_heads:
        raise fields.reject("num_key_value_heads", f"num_attention_heads ({num_heads})")
    if fields.get("scoring_func", "softmax") != "softmax":
        raise fields.reject("scoring_func", "softmax")
    if fields.integer("moe_layer_freq", 1) != 1:
        raise fields.reject("moe_layer_freq", "1")
    nope = fields.integer("qk_nope_head_dim", 128)
    rope = rope_from_hf(
        fields,
        dim=fields.integer("qk_rope_head_dim", 64),
        max_context=sizes["max_context"],
        default_theta=10000.0,
        interleaved=True,
    )
    scale = (nope + rope.dim) ** -0.5
    if rope.kind == "yarn" and rope.mscale_all_dim and rope.factor > 1:
        mscale = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
        scale *= mscale * mscale
    bias = fields.flag("attention_bias", False)
    expert_size = fields.integer("moe_intermediate_size", 1407)
    # `q_lora_rank: null` means no compression, whereas an absent field means the class default.
    rank = fields.integer("q_lora_rank", 1536) if fields.data.get("q_lora_rank", 1) else 0
    first = fields.integer("first_k_dense_replace", 0, minimum=0)
    return {
        **sizes,
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "attention": "mla",
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": nope + rope.dim,
        "v_head_dim": fields.integer("v_head_dim", 128),
        "q_lora_rank": rank,
        "kv_lora_rank": fields.integer("kv_lora_rank", 512),
        "qk_nope_head_dim": nope,
        "qkv_bias": bias,
        "output_bias": bias,
        "windows": (FULL_ATTENTION,) * sizes["num_layers"],
        "rope": rope,
        "softmax_scale": scale,
        "num_experts": fields.first_integer(("n_routed_experts", "num_experts"), 64),
        "top_k": fields.integer("num_experts_per_tok"),
        "expert_intermediate_size": expert_size,
        "moe_layers": tuple(range(min(first, sizes["num_layers"]), sizes["num_layers"])),
        "dense_intermediate_size": fields.integer("intermediate_size", 11008),
        "shared_intermediate_size": expert_size * _shared_experts(fields),
        "mlp_bias": fields.flag("mlp_bias", False),
        "routed_scaling_factor": fields.number("routed_scaling_factor", 1.0, positive=False),
        **_groups(fields),
    }


def _shared_experts(fields: HfFields) -> int:
    """Number of shared experts; `null` in the file means none, absence the class default."""
    if "n_shared_experts" in fields.data and fields.data["n_shared_experts"] is None:
        return 0
    return fields.integer("n_shared_experts", 2, minimum=0)


def _groups(fields: HfFields) -> dict[str, Any]:
    """Routing within groups of experts. `norm_topk_prob` has no effect, as in transformers."""
    fields.flag("norm_topk_prob", False)
    method = fields.get("topk_method", "greedy")
    if method == "greedy":
        return {"routing": "softmax"}
    if method != "group_limited_greedy":
        raise fields.reject("topk_method", "greedy or group_limited_greedy")
    groups = fields.integer("n_group")
    top_groups = fields.integer("topk_group")
    experts = fields.first_integer(("n_routed_experts", "num_experts"), 64)
    if experts % groups:
        raise fields.reject("n_group", f"a divisor of the number of experts ({experts})")
    if top_groups > groups:
        raise fields.reject("topk_group", f"at most n_group ({groups})")
    return {"routing": "group_limited", "num_groups": groups, "top_groups": top_groups}
