"""The key/value cache: allocation, appending, and which entries a query may read."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specter_jax.config import ModelConfig
from specter_jax.config.model import FULL_ATTENTION

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


def token_positions(lengths: jax.Array, num_tokens: int) -> jax.Array:
    """Token t of row b stands at lengths[b] + t: int32 [batch, tokens]."""
    return lengths[:, None].astype(jnp.int32) + jnp.arange(num_tokens, dtype=jnp.int32)


def append(entries: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """Writes new entries at their positions; positions beyond the capacity are dropped.

    entries: [batch, capacity, ...]. new: [batch, tokens, ...]. positions: int32 [batch, tokens].
    """
    rows = jnp.arange(entries.shape[0])[:, None]
    return entries.at[rows, positions].set(
        new.astype(entries.dtype), mode="drop", unique_indices=True, indices_are_sorted=True
    )


def readable(positions: jax.Array, capacity: int, window: int) -> jax.Array:
    """Which entries each token attends to: its own and earlier ones, within the window.

    positions: int32 [batch, tokens]. window: tokens, or `FULL_ATTENTION`.
    Returns bool [batch, tokens, capacity].
    """
    entry = jnp.arange(capacity, dtype=jnp.int32)
    query = positions[..., None]
    mask = entry <= query
    if window != FULL_ATTENTION:
        mask &= entry > query - window
    return mask
