"""Plain JAX: append the new entries, then attend to everything the mask leaves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.products import einsum

NO_WINDOW = 0


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

    positions: int32 [batch, tokens]. window: tokens, or `NO_WINDOW`.
    Returns bool [batch, tokens, capacity].
    """
    entry = jnp.arange(capacity, dtype=jnp.int32)
    query = positions[..., None]
    mask = entry <= query
    if window != NO_WINDOW:
        mask &= entry > query - window
    return mask


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool) -> jax.Array:
    """Rotates channel pairs.

    x: [batch, tokens, heads, dim], any float dtype. cos, sin: float32 [batch, tokens, dim / 2].
    interleaved: pairs are channels (2i, 2i+1), else (i, i + dim/2). Returns float32, x's shape.
    """
    x = x.astype(jnp.float32)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    if interleaved:
        pairs = x.reshape(*x.shape[:-1], -1, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        return jnp.stack((a * cos - b * sin, b * cos + a * sin), -1).reshape(x.shape)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


def attend_latent(
    q: jax.Array,
    compressed: jax.Array,
    norm_weight: jax.Array,
    kv_up: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    latent: jax.Array,
    rope: jax.Array,
    lengths: jax.Array,
    *,
    window: int,
    scale: float,
    interleaved: bool,
    eps: float,
    compute_dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Multi-head latent attention of new tokens, after appending their own entries.

    Queries are mapped into latent space, attention runs there, and the result is mapped to values.

    q: [batch, tokens, heads, nope + rope_dim], not rotated. compressed: [batch, tokens, rank +
    rope_dim], neither normalized nor rotated; both are rounded to compute_dtype first.
    norm_weight: [rank], of the latent's RMS norm with `eps`. kv_up: [heads, nope + value, rank],
    each head's projections of keys and values. cos, sin: float32 [batch, tokens, rope_dim / 2].
    latent: [batch, capacity, rank] and rope: [batch, capacity, rope_dim], the cache. lengths: int32
    [batch], entries before the new ones. window: entries that a token sees, or `NO_WINDOW`.
    Products take compute_dtype and accumulate in float32, scores are multiplied by `scale`.
    Returns the attended values, compute_dtype [batch, tokens, heads, value], and the cache.
    """
    rank = latent.shape[-1]
    nope = q.shape[-1] - rope.shape[-1]
    positions = token_positions(lengths, q.shape[1])
    q, compressed = q.astype(compute_dtype), compressed.astype(compute_dtype)
    q_nope, q_rope = q[..., :nope], q[..., nope:]
    q_rope = rotate(q_rope, cos, sin, interleaved=interleaved).astype(compute_dtype)
    k_latent, k_rope = compressed[..., :rank], compressed[..., rank:]
    k_latent = _rms_norm(k_latent, norm_weight, eps)
    k_rope = rotate(k_rope[:, :, None], cos, sin, interleaved=interleaved)[:, :, 0]
    latent = append(latent, k_latent, positions)
    rope = append(rope, k_rope, positions)
    mask = readable(positions, latent.shape[1], window)
    q_latent = einsum("bthd,hdr->bthr", q_nope, kv_up[:, :nope]).astype(compute_dtype)
    scores = einsum("bthr,bsr->bths", q_latent, latent) + einsum("bthe,bse->bths", q_rope, rope)
    scores = jnp.where(mask[:, :, None, :], scores * scale, -jnp.inf)
    probabilities = jax.nn.softmax(scores, -1).astype(latent.dtype)
    attended = einsum("bths,bsr->bthr", probabilities, latent).astype(compute_dtype)
    output = einsum("bthr,hvr->bthv", attended, kv_up[:, nope:])
    return output.astype(compute_dtype), latent, rope


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x / sqrt(mean(x^2) + eps) * weight` in float32, returned in x's dtype."""
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return (y * weight.astype(jnp.float32)).astype(x.dtype)


def attend_grouped(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    *,
    window: int,
    scale: float,
    interleaved: bool,
    compute_dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Grouped-query attention of new tokens, after appending their own keys and values.

    q: [batch, tokens, heads, dim] and k: [batch, tokens, kv_heads, dim], not rotated. v: [batch,
    tokens, kv_heads, value]; all three are rounded to compute_dtype first. cos, sin: float32
    [batch, tokens, dim / 2]. keys: [batch, capacity, kv_heads, dim] and values: [batch, capacity,
    kv_heads, value], the cache. The rest as in `attend_latent`. Returns the attended values,
    compute_dtype [batch, tokens, heads, value], and the cache.
    """
    batch, tokens, heads, dim = q.shape
    positions = token_positions(lengths, tokens)
    q, k, v = (part.astype(compute_dtype) for part in (q, k, v))
    q = rotate(q, cos, sin, interleaved=interleaved).astype(compute_dtype)
    k = rotate(k, cos, sin, interleaved=interleaved)
    keys, values = append(keys, k, positions), append(values, v, positions)
    mask = readable(positions, keys.shape[1], window)
    groups = heads // keys.shape[2]
    q = q.reshape(batch, tokens, keys.shape[2], groups, dim)
    scores = einsum("btngd,bsnd->bntgs", q, keys)
    scores = jnp.where(mask[:, None, :, None, :], scores * scale, -jnp.inf)
    probabilities = jax.nn.softmax(scores, -1).astype(q.dtype)
    output = einsum("bntgs,bsnd->btngd", probabilities, values)
    output = output.reshape(batch, tokens, heads, values.shape[-1])
    return output.astype(compute_dtype), keys, values
