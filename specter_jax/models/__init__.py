"""The model as pure functions over parameter and cache trees."""

from specter_jax.models.decoder import (
    Routed,
    accumulate_experts,
    close_layer,
    dense_layer,
    finish_layer,
    route_layer,
)
from specter_jax.models.draft import draft_chunk, draft_step
from specter_jax.models.kv import KV, init_kv
from specter_jax.models.outer import embed, head
from specter_jax.models.target import (
    VerifyOutputs,
    count_misses,
    last_logits,
    layer_name,
    prefill,
    target_layers,
    verify,
)

__all__ = [
    "KV",
    "Routed",
    "VerifyOutputs",
    "accumulate_experts",
    "close_layer",
    "count_misses",
    "dense_layer",
    "draft_chunk",
    "draft_step",
    "embed",
    "finish_layer",
    "head",
    "init_kv",
    "last_logits",
    "layer_name",
    "prefill",
    "route_layer",
    "target_layers",
    "verify",
]
