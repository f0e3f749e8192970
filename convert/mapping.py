"""Names of a Hugging Face checkpoint's tensors -> places in our parameter tree. Pure.

Checkpoints of one family come in several spellings (`block_sparse_moe` with w1, w2, w3; `mlp`
with gate_proj, up_proj, down_proj; fused experts). `canonical_name` brings a name into the one
that everything else here uses; it may be applied twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from specter_jax.config import ModelConfig, layer_name


@dataclass(frozen=True, kw_only=True)
class SharedTarget:
    """Where one tensor goes: a path in the shared tree, and the shape it must have."""

    path: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def part(self) -> str:
        """The separately stored part of the tree: `outer` or `layers_XX`."""
        return self.path[0]


_RENAMES = (
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"\.mlp\.router\.weight$"), ".mlp.gate.weight"),
    (re.compile(r"(\.experts\.\d+)\.w1\."), r"\1.gate_proj."),
    (re.compile(r"(\.experts\.\d+)\.w3\."), r"\1.up_proj."),
    (re.compile(r"(\.experts\.\d+)\.w2\."), r"\1.down_proj."),
)


def canonical_name(name: str) -> str:
    """The spelling that `shared_targets` and `expert_names` use for a source tensor's name."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def ignorable(name: str, config: ModelConfig | None = None) -> bool:
    """Whether a source tensor may be left out: buffers, and a head stored though it is tied."""
    if name.endswith((".rotary_emb.inv_freq", ".masked_bias")):
        return True
    return bool(config and config.tie_word_embeddings and name == "lm_head.weight")


def expert_names(config: ModelConfig, layer: int, expert: int) -> tuple[str, str, str]:
    """Canonical names of a routed expert's gate [F, H], up [F, H] and down [H, F].

    layer: decoder layer, which must have routed experts (`ValueError` otherwise).
    """
    config.moe_index(layer)
    prefix = f"model.layers.{layer}.mlp.experts.{expert}."
    return prefix + "gate_proj.weight", prefix + "up_proj.weight", prefix + "down_proj.weight"


def fused_expert_names(config: ModelConfig, layer: int) -> tuple[str, str]:
    """Names of a layer's experts stored as gate_up [E, 2F, H] and down [E, H, F]."""
    config.moe_index(layer)
    prefix = f"model.layers.{layer}.mlp.experts."
    return prefix + "gate_up_proj", prefix + "down_proj"


def shared_targets(config: ModelConfig) -> dict[str, SharedTarget]:
    """Canonical name -> target, for every tensor that is not part of a routed expert."""
    targets: dict[str, SharedTarget] = {}

    def add(name: str, path: tuple[str, ...], *shape: int) -> None:
        targets[name] = SharedTarget(path=path, shape=shape)

    def add_linear(name: str, path: tuple[str, ...], outputs: int, inputs: int, bias: bool) -> None:
        add(name + ".weight", (*path, "weight"), outputs, inputs)
        if bias:
            add(name + ".bias", (*path, "bias"), outputs)

    def add_norm(name: str, path: tuple[str, ...], size: int, kind: str = "rms") -> None:
        add(name + ".weight", (*path, "weight"), size)
        if kind == "layer":
            add(name + ".bias", (*path, "bias"), size)

    hidden, vocab = config.hidden_size, config.vocab_size
    add("model.embed_tokens.weight", ("outer", "embed", "weight"), vocab, hidden)
    add_norm("model.norm", ("outer", "norm"), hidden, config.norm)
    if not config.tie_word_embeddings:
        add("lm_head.weight", ("outer", "lm_head", "weight"), vocab, hidden)
    if config.lm_head_bias:
        add("lm_head.bias", ("outer", "lm_head", "bias"), vocab)
    for layer in range(config.num_layers):
        source, part = f"model.layers.{layer}.", layer_name(layer)
        add_norm(source + "input_layernorm", (part, "input_norm"), hidden, config.norm)
        add_norm(source + "post_attention_layernorm", (part, "post_norm"), hidden, config.norm)
        for name, key, outputs, inputs, bias in _attention_linears(config):
            add_linear(f"{source}self_attn.{name}", (part, "attention", key), outputs, inputs, bias)
        for name, key, size in _attention_norms(config):
            add_norm(f"{source}self_attn.{name}", (part, "attention", key), size)
        for name, path, outputs, inputs, bias in _mlp_linears(config, layer):
            add_linear(f"{source}mlp.{name}", (part, *path), outputs, inputs, bias)
    return targets


def _attention_linears(config: ModelConfig) -> list[tuple[str, str, int, int, bool]]:
    """Source name, our name, outputs, inputs, bias."""
    c, hidden = config, config.hidden_size
    output = ("o_proj", "o_proj", hidden, c.num_heads * c.v_head_dim, c.output_bias)
    query_width = c.num_heads * c.head_dim
    if c.attention == "gqa":
        return [
            ("q_proj", "q_proj", query_width, hidden, c.qkv_bias),
            ("k_proj", "k_proj", c.num_kv_heads * c.head_dim, hidden, c.qkv_bias),
            ("v_proj", "v_proj", c.num_kv_heads * c.v_head_dim, hidden, c.qkv_bias),
            output,
        ]
    latent, rank = c.kv_lora_rank, c.q_lora_rank
    queries = [("q_proj", "q_proj", query_width, hidden, False)]
    if rank:
        queries = [
            ("q_a_proj", "q_a_proj", rank, hidden, c.qkv_bias),
            ("q_b_proj", "q_b_proj", query_width, rank, False),
        ]
    up = c.num_heads * (c.qk_nope_head_dim + c.v_head_dim)
    return [
        *queries,
        ("kv_a_proj_with_mqa", "kv_a_proj", latent + c.rope.dim, hidden, c.qkv_bias),
        ("kv_b_proj", "kv_b_proj", up, latent, False),
        output,
    ]


def _attention_norms(config: ModelConfig) -> list[tuple[str, str, int]]:
    """Source name, our name, size."""
    c = config
    if c.attention == "mla":
        norms = [("kv_a_layernorm", "kv_a_norm", c.kv_lora_rank)]
        return norms + [("q_a_layernorm", "q_a_norm", c.q_lora_rank)] * bool(c.q_lora_rank)
    if c.qk_norm == "none":
        return []
    heads = (1, 1) if c.qk_norm == "head" else (c.num_heads, c.num_kv_heads)
    return [
        ("q_norm", "q_norm", heads[0] * c.head_dim),
        ("k_norm", "k_norm", heads[1] * c.head_dim),
    ]


def _mlp_linears(
    config: ModelConfig, layer: int
) -> list[tuple[str, tuple[str, ...], int, int, bool]]:
    """Source name, our path, outputs, inputs, bias: a dense MLP, or router and shared expert."""
    c, hidden = config, config.hidden_size

    def gated(
        source: str, key: str, inner: int
    ) -> list[tuple[str, tuple[str, ...], int, int, bool]]:
        return [
            (source + "gate_proj", (key, "gate_proj"), inner, hidden, c.mlp_bias),
            (source + "up_proj", (key, "up_proj"), inner, hidden, c.mlp_bias),
            (source + "down_proj", (key, "down_proj"), hidden, inner, c.mlp_bias),
        ]

    if not c.is_moe(layer):
        return gated("", "mlp", c.dense_intermediate_size)
    linears = [("gate", ("router",), c.num_experts, hidden, False)]
    if c.shared_intermediate_size:
        source = "shared_experts." if c.family == "deepseek_v2" else "shared_expert."
        linears += gated(source, "shared_expert", c.shared_intermediate_size)
    if c.shared_expert_gate:
        linears.append(("shared_expert_gate", ("shared_expert_gate",), 1, hidden, False))
    return linears
