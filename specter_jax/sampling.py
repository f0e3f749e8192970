"""From logits to a token: the filters, the random keys and the draw. Pure functions on arrays.

Every function takes temperature, top_k and top_p as traced scalars (`SamplingConfig.scalars`).
"""

import jax
import jax.numpy as jnp

from specter_jax.sampling_config import TOP_K_OFF, TOP_P_OFF, SamplingConfig

__all__ = [
    "ACCEPT_STREAM",
    "COMMIT_STREAM",
    "DRAFT_STREAM",
    "SamplingConfig",
    "filtered_probs",
    "greedy",
    "row_keys",
    "sample",
    "stream_keys",
]

# Each position of a sequence owns three independent random numbers. A position's numbers decide
# only the token committed there: a token drafted behind a rejection is dropped whatever it was, so
# using the position's numbers again in the next iteration leaves the distribution exact.
DRAFT_STREAM = 0  # draws the draft's token
ACCEPT_STREAM = 1  # decides whether the target accepts it
COMMIT_STREAM = 2  # draws the target's own token: plain decoding, residual, or the one after all


def row_keys(seed: jax.Array | int, request_index: jax.Array) -> jax.Array:
    """One random key per request, independent of which requests share its batch.

    Args:
        seed: uint32 scalar.
        request_index: int32 [batch], the request's number within the call.

    Returns:
        Typed keys [batch].
    """
    base = jax.random.key(jnp.asarray(seed, jnp.uint32))
    return jax.vmap(lambda index: jax.random.fold_in(base, index))(request_index)


def stream_keys(keys: jax.Array, positions: jax.Array, stream: int) -> jax.Array:
    """The keys of one stream at given positions of each row.

    Args:
        keys: typed keys [batch] from `row_keys`.
        positions: int32 [batch] or [batch, tokens], the position in the sequence (prompt counted)
            of the token that is to be drawn or judged.
        stream: DRAFT_STREAM, ACCEPT_STREAM or COMMIT_STREAM.

    Returns:
        Typed keys of the shape of `positions`.
    """

    def fold(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(key, position), stream)

    if positions.ndim == 1:
        return jax.vmap(fold)(keys, positions)
    return jax.vmap(jax.vmap(fold, in_axes=(None, 0)))(keys, positions)


def greedy(logits: jax.Array) -> jax.Array:
    """The most probable token, the lowest id among equals: [..., vocab] -> int32 [...]."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def filtered_probs(
    logits: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array
) -> jax.Array:
    """Probabilities after temperature, then top-k, then top-p: the order of transformers' warpers.

    Top-k keeps every token whose logit equals the k-th largest. Top-p keeps a token while the
    probability of those before it is below p, so the token that crosses p stays and at least one
    always does; among equal logits at the edge the lowest ids stay.

    Args:
        logits: float32 [..., vocab].
        temperature: float32 scalar > 0.
        top_k: int32 scalar; 0 keeps every token.
        top_p: float32 scalar in (0, 1]; 1 keeps every token.

    Returns:
        float32 [..., vocab]; each row sums to 1.
    """
    num_tokens = logits.shape[-1]
    logits = logits.astype(jnp.float32)
    # Relative to the largest: dividing by a tiny temperature then gives 0 and -inf, never NaN.
    scaled = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    descending = jnp.sort(scaled, axis=-1, descending=True)

    num_kept = jnp.where(top_k == TOP_K_OFF, num_tokens, jnp.minimum(top_k, num_tokens))
    kth = jnp.take(descending, num_kept - 1, axis=-1)[..., None]
    descending = jnp.where(descending >= kth, descending, -jnp.inf)
    sorted_probs = jax.nn.softmax(descending, axis=-1)

    before = jnp.cumsum(sorted_probs, axis=-1) - sorted_probs
    # The first token has nothing before it; said outright, because the difference above rounds.
    first = jnp.arange(num_tokens) == 0
    in_nucleus = (before < top_p) | first | (top_p >= TOP_P_OFF)
    in_nucleus &= descending > -jnp.inf
    edge = jnp.min(jnp.where(in_nucleus, descending, jnp.inf), axis=-1, keepdims=True)
    num_at_edge = jnp.sum(in_nucleus & (descending == edge), axis=-1, keepdims=True)

    at_edge = scaled == edge
    rank_at_edge = jnp.cumsum(at_edge.astype(jnp.int32), axis=-1)
    keep = (scaled > edge) | (at_edge & (rank_at_edge <= num_at_edge))
    return jax.nn.softmax(jnp.where(keep, scaled, -jnp.inf), axis=-1)


def sample(probs: jax.Array, keys: jax.Array) -> jax.Array:
    """Draw one token per row; a token of probability 0 is never drawn.

    Args:
        probs: float32 [batch, vocab]; rows need not be normalised.
        keys: typed keys [batch], one stream and position each (`stream_keys`).

    Returns:
        int32 [batch].
    """
    draw = jax.vmap(jax.random.categorical)
    return draw(keys, jnp.log(probs)).astype(jnp.int32)
