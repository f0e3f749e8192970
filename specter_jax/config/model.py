"""The architecture of one checkpoint as a frozen, hashable description."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from specter_jax.config.rope import ROPE_KINDS, RopeConfig
from specter_jax.errors import UnsupportedModelError

FAMILIES = ("deepseek_v2", "qwen2_moe", "phimoe", "qwen3_moe", "mixtral", "olmoe")

FULL_ATTENTION = 0
"""Entry of `ModelConfig.windows` for a layer without a sliding window."""


def layer_name(layer: int) -> str:
    """Key of decoder layer `layer` in the parameter trees, e.g. `layers_03`."""
    return f"layers_{layer:02d}"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model's shape and options; hashable, so it can be a static argument of `jax.jit`.

    Sizes count elements. `moe_layers[m]` is the decoder layer of MoE layer m; all other layers are
    dense. `windows[l]` is the sliding window of decoder layer l in tokens, or `FULL_ATTENTION`.
    Attention "gqa" uses num_kv_heads and head_dim; "mla" uses q_lora_rank, kv_lora_rank,
    qk_nope_head_dim, rope.dim and v_head_dim. routing: "softmax", "group_limited" or
    "sparse_mixer". Sizes of absent parts are 0.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    tie_word_embeddings: bool = False
    lm_head_bias: bool = False
    norm: str = "rms"
    norm_eps: float = 1e-6

    attention: str = "gqa"
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: str = "none"
    qkv_clip: float | None = None
    windows: tuple[int, ...]
    rope: RopeConfig
    softmax_scale: float
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0

    num_experts: int
    top_k: int
    expert_intermediate_size: int
    moe_layers: tuple[int, ...]
    routing: str = "softmax"
    normalize_weights: bool = False
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    router_jitter: float = 0.0
    dense_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    shared_expert_gate: bool = False
    mlp_bias: bool = False

    @property
    def num_moe_layers(self) -> int:
        return len(self.moe_layers)

    @property
    def expert_elements(self) -> int:
        """Elements of one routed expert: gate, up and down."""
        return 3 * self.expert_intermediate_size * self.hidden_size

    @property
    def no_expert(self) -> int:
        """The id that a masked token routes to: one past the last expert."""
        return self.num_experts

    def is_moe(self, layer: int) -> bool:
        """Whether decoder layer `layer` has routed experts."""
        return layer in self.moe_layers

    @property
    def representatives(self) -> tuple[int, ...]:
        """Per decoder layer the first one that computes the same: equal kind and window."""
        kinds = [(self.is_moe(layer), self.windows[layer]) for layer in range(self.num_layers)]
        return tuple(kinds.index(kind) for kind in kinds)

    def moe_index(self, layer: int) -> int:
        """The MoE index of decoder layer `layer`; `ValueError` if it is dense."""
        return self.moe_layers.index(layer)

    def kv_elements_per_token(self) -> int:
        """KV elements that one token takes in all layers together."""
        if self.attention == "mla":
            return self.num_layers * (self.kv_lora_rank + self.rope.dim)
        return self.num_layers * self.num_kv_heads * (self.head_dim + self.v_head_dim)

    @classmethod
    def from_hf(
        cls, config: dict[str, Any], generation_config: dict[str, Any] | None = None
    ) -> ModelConfig:
        """Reads a config.json (and generation_config.json, whose token ids win).

        Raises `UnsupportedModelError` naming the field that this package does not run.
        """
        from specter_jax.config.families import config_from_hf

        return config_from_hf(config, generation_config or {})

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; `from_dict` is its inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """Inverse of `to_dict`.

        Raises `UnsupportedModelError` for unknown or missing keys, and for values of a wrong type,
        out of range or in contradiction.
        """
        values = _checked(cls, data, "model config")
        values["rope"] = RopeConfig(**_checked(RopeConfig, values["rope"], "rope config"))
        config = cls(**values)
        config.check()
        return config

    def check(self) -> None:
        """Raises `UnsupportedModelError` naming a field of a wrong type or out of range."""
        from specter_jax.config.validation import check_config

        try:
            check_config(self, FAMILIES, ROPE_KINDS)
        except ValueError as error:
            raise UnsupportedModelError(f"model config: {error}") from None


def _checked(cls: type, data: Any, what: str) -> dict[str, Any]:
    """Lists become tuples; keys must be exactly fields of `cls`."""
    if not isinstance(data, dict):
        raise UnsupportedModelError(f"{what}: {type(data).__name__}, expected an object")
    known = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise UnsupportedModelError(
            f"{what}: unknown keys {', '.join(unknown)}; valid ones are {', '.join(known)}"
        )
    missing = [
        name
        for name, field in known.items()
        if field.default is dataclasses.MISSING and name not in data
    ]
    if missing:
        raise UnsupportedModelError(f"{what}: missing keys {', '.join(missing)}")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
