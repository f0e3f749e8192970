"""What stands before the first layer and after the last one: embedding, final norm, head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from specter_jax.config import ModelConfig
from specter_jax.models.blocks import run_over_tokens
from specter_jax.models.linear import Embedding, Linear
from specter_jax.models.norms import make_norm


class HeadBias(nn.Module):
    """The head's bias [vocab] where its weight is the embedding's."""

    size: int

    @nn.compact
    def __call__(self) -> jax.Array:
        """float32 [vocab]."""
        return self.param("bias", nn.initializers.zeros, (self.size,)).astype(jnp.float32)


class Outer(nn.Module):
    """Embedding, final norm and head."""

    config: ModelConfig

    def setup(self) -> None:
        c = self.config
        self.embed = Embedding(c.vocab_size, c.hidden_size)
        self.norm = make_norm(c.norm, c.hidden_size, c.norm_eps)
        if not c.tie_word_embeddings:
            self.lm_head = Linear(c.hidden_size, c.vocab_size, c.lm_head_bias)
        elif c.lm_head_bias:
            self.lm_head = HeadBias(c.vocab_size)

    def head(self, hidden: jax.Array) -> jax.Array:
        """hidden: [..., hidden] -> float32 logits [..., vocab]."""
        hidden = self.norm.deferred(hidden)
        if not self.config.tie_word_embeddings:
            return self.lm_head(hidden)
        return self.embed.attend(hidden, self.lm_head() if self.config.lm_head_bias else None)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Both ends without the layers; touches every parameter (for shapes)."""
        return self.head(self.embed(tokens))

    def embed_tokens(self, tokens: jax.Array) -> jax.Array:
        """tokens: int32 [...] -> [..., hidden] in the weight's dtype."""
        return self.embed(tokens)


def embed(
    config: ModelConfig,
    shared: Mapping[str, Any],
    tokens: jax.Array,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> jax.Array:
    """tokens: int32 [batch, tokens] -> hidden state [batch, tokens, hidden] in `dtype`.

    shared: the whole shared tree; its "outer" part is used.
    """
    outer = Outer(config)
    variables = {"params": shared["outer"]}
    return outer.apply(variables, tokens, method="embed_tokens").astype(dtype)


def head(
    config: ModelConfig,
    shared: Mapping[str, Any],
    hidden: jax.Array,
    token_mask: jax.Array | None = None,
) -> jax.Array:
    """Final norm and head: hidden [batch, tokens, hidden] -> float32 [batch, tokens, vocab].

    token_mask: bool [batch, tokens] or None for all. Logits of masked tokens mean nothing.
    """
    if token_mask is None:
        # Behind a barrier, since a loop of known length would be compiled otherwise.
        token_mask = jax.lax.optimization_barrier(jnp.ones(hidden.shape[:2], bool))

    def body(_: jax.Array, state: None, block: jax.Array) -> tuple[None, jax.Array]:
        return state, Outer(config).apply({"params": shared["outer"]}, block, method="head")

    lengths = jnp.zeros(hidden.shape[0], jnp.int32)
    return run_over_tokens(body, None, hidden, lengths, token_mask)[1]
