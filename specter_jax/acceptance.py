"""Which drafted tokens the target accepts, and its own token after them. Pure functions on arrays.

Greedy: the longest prefix that equals the target's choices. Sampled: speculative rejection
sampling (Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318),
whose committed tokens are distributed exactly as the target's own samples.
"""

import jax
import jax.numpy as jnp
from flax import struct

from specter_jax.sampling import (
    ACCEPT_STREAM,
    COMMIT_STREAM,
    filtered_probs,
    greedy,
    sample,
    stream_keys,
)

# Fills `Accepted.tokens` behind the valid entries. A real id, because masked positions of a batch
# are still looked up in the embedding.
UNUSED_TOKEN = 0


@struct.dataclass
class Accepted:
    """What one verification commits.

    tokens: int32 [batch, K + 1]; the first `num_accepted + 1` entries of a row are valid, the rest
        are UNUSED_TOKEN.
    num_accepted: int32 [batch], drafted tokens accepted, 0..num_drafted.
    """

    tokens: jax.Array
    num_accepted: jax.Array


def accept_greedy(
    target_logits: jax.Array, draft_tokens: jax.Array, num_drafted: jax.Array
) -> Accepted:
    """Accept drafted tokens while each equals the target's most probable token.

    Args:
        target_logits: float32 [batch, T, vocab], T >= K + 1; entry t judges drafted token t.
        draft_tokens: int32 [batch, K]; K may be 0.
        num_drafted: int32 [batch], 0..K; a row with 0 decodes plainly.
    """
    depth = draft_tokens.shape[1]
    target_tokens = greedy(target_logits[:, : depth + 1])
    agrees = draft_tokens == target_tokens[:, :depth]
    num_accepted = _leading(agrees, num_drafted)
    next_token = jnp.take_along_axis(target_tokens, num_accepted[:, None], axis=1)[:, 0]
    return _commit(draft_tokens, num_accepted, next_token)


def accept_sampled(
    target_logits: jax.Array,
    draft_tokens: jax.Array,
    draft_probs: jax.Array,
    num_drafted: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
) -> Accepted:
    """Accept drafted token x with probability min(1, p(x) / q(x)); at the first refusal draw from
    max(p - q, 0), after a full acceptance from p.

    Args:
        target_logits: float32 [batch, T, vocab], T >= K + 1.
        draft_tokens: int32 [batch, K]; K may be 0. Token j was drawn from `draft_probs[:, j]` with
            DRAFT_STREAM keys.
        draft_probs: float32 [batch, K, vocab], the draft's filtered probabilities q.
        num_drafted: int32 [batch], 0..K; a row with 0 samples plainly from the target.
        keys: typed keys [batch] from `row_keys`.
        positions: int32 [batch], the sequence position of drafted token 0, which is also that of
            the token a plain decoding step would draw.
        temperature, top_k, top_p: scalars as in `filtered_probs`; they make the target's p.
    """
    batch, depth = draft_tokens.shape
    target_probs = filtered_probs(target_logits[:, : depth + 1], temperature, top_k, top_p)
    offsets = jnp.arange(depth, dtype=positions.dtype)
    accept_keys = stream_keys(keys, positions[:, None] + offsets, ACCEPT_STREAM)
    uniforms = (
        jax.vmap(jax.vmap(jax.random.uniform))(accept_keys) if depth else jnp.ones((batch, 0))
    )
    num_accepted = _leading(
        _passes(target_probs[:, :depth], draft_probs, draft_tokens, uniforms), num_drafted
    )

    at = num_accepted[:, None, None]
    p = jnp.take_along_axis(target_probs, at, axis=1)[:, 0]
    # Position K has no draft: q = 0 there makes the residual p itself.
    padded = jnp.concatenate([draft_probs, jnp.zeros_like(target_probs[:, :1])], axis=1)
    q = jnp.take_along_axis(padded, at, axis=1)[:, 0]
    q = jnp.where((num_accepted < num_drafted)[:, None], q, 0.0)
    commit_keys = stream_keys(keys, positions + num_accepted, COMMIT_STREAM)
    next_token = sample(residual_probs(p, q), commit_keys)
    return _commit(draft_tokens, num_accepted, next_token)


def residual_probs(p: jax.Array, q: jax.Array) -> jax.Array:
    """max(p - q, 0), normalised: float32 [batch, vocab]. Where nothing is left (p equals q within
    rounding, so a refusal has probability about 0) it is p."""
    residual = jnp.maximum(p - q, 0.0)
    total = jnp.sum(residual, axis=-1, keepdims=True)
    return jnp.where(total > 0.0, residual / jnp.where(total > 0.0, total, 1.0), p)


def _passes(p: jax.Array, q: jax.Array, tokens: jax.Array, uniforms: jax.Array) -> jax.Array:
    """u < p(x) / q(x) without the division: p(x) >= q(x) always passes, p(x) = 0 never does."""
    p_token = jnp.take_along_axis(p, tokens[..., None], axis=-1)[..., 0]
    q_token = jnp.take_along_axis(q, tokens[..., None], axis=-1)[..., 0]
    return uniforms * q_token < p_token


def _leading(passes: jax.Array, num_drafted: jax.Array) -> jax.Array:
    """Number of leading True of a row among its first num_drafted: bool [batch, K] -> [batch]."""
    drafted = jnp.arange(passes.shape[1], dtype=jnp.int32) < num_drafted[:, None]
    return jnp.sum(jnp.cumprod((passes & drafted).astype(jnp.int32), axis=1), axis=1)


def _commit(draft_tokens: jax.Array, num_accepted: jax.Array, next_token: jax.Array) -> Accepted:
    index = jnp.arange(draft_tokens.shape[1] + 1, dtype=jnp.int32)
    padded = jnp.pad(draft_tokens, ((0, 0), (0, 1)))
    tokens = jnp.where(index < num_accepted[:, None], padded, UNUSED_TOKEN)
    tokens = jnp.where(index == num_accepted[:, None], next_token[:, None], tokens)
    return Accepted(tokens=tokens.astype(jnp.int32), num_accepted=num_accepted.astype(jnp.int32))
