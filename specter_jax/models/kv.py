"""The key/value cache: its allocation. Appending and reading are `pallas_kernels`' business."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention.reference import token_positions
from specter_jax.config import ModelConfig

__all__ = ["KV", "KVLayer", "compute_dtype", "init_kv", "token_positions"]

KVLayer = dict[str, jax.Array]
KV = tuple[KVLayer, ...]


def init_kv(
    config: ModelConfig, batch: int, capacity: int, dtype: jax.typing.DTypeLike = jnp.float32
) -> KV:
    """An empty cache, one dictionary per decoder layer.

    gqa: k [batch, capacity, kv_heads, head_dim] and v [batch, capacity, kv_heads, v_head_dim].
    mla: latent [batch, capacity, kv_lora_rank] and rope [batch, capacity, rope_dim].
    dtype is also the dtype that activations take in `verify`, `prefill` and `draft_step`.
    """
    if config.attention == "mla":
        shapes = {"latent": (config.kv_lora_rank,), "rope": (config.rope.dim,)}
    else:
        heads = config.num_kv_heads
        shapes = {"k": (heads, config.head_dim), "v": (heads, config.v_head_dim)}
    return tuple(
        {name: jnp.zeros((batch, capacity, *shape), dtype) for name, shape in shapes.items()}
        for _ in range(config.num_layers)
    )


def compute_dtype(kv: KV) -> jnp.dtype:
    """The dtype of activations: that of the cache."""
    return next(iter(kv[0].values())).dtype
