"""The draft's whole-model functions: the target's layers with INT4 experts, on the same cache.

Pure and jit-able, `config` is static. Unlike the target's, a token's bits may depend on what is
computed with it: what the draft says is checked.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.draft_experts import draft_experts, draft_routed, routes
from specter_jax.config import ModelConfig, layer_name
from specter_jax.models.decoder import close_layer, dense_layer, route_layer
from specter_jax.models.kv import KV, compute_dtype
from specter_jax.models.outer import embed, head
from specter_jax.models.router import routing_rule
from specter_jax.models.target import Params

# Layers of one kind are traced and lowered once: each is a call of the same inner function.
_layer = functools.partial(jax.jit, static_argnames=("config", "kind"))


@_layer
def _draft_dense(config, kind, weights, kv_layer, hidden, lengths, mask):
    """A layer without routed experts: hidden state and KV."""
    return dense_layer(config, kind, weights, kv_layer, hidden, lengths, mask)


@_layer
def _draft_moe(config, kind, weights, draft, kv_layer, hidden, lengths, mask):
    """An MoE layer with INT4 experts: hidden state, KV, choices [batch, k]."""
    rule = routing_rule(config)
    inside = routes(hidden[:, 0], draft, rule)
    args = (config, kind, weights, kv_layer, hidden, lengths, mask)
    routed, kv_layer = route_layer(*args, choose=not inside)
    rows = routed.moe_input[:, 0]
    if inside:
        total, experts = draft_routed(rows, routed.logits[:, 0], mask[:, 0], draft, rule)
        routed = routed.replace(experts=experts[:, None], logits=None)
    else:
        experts = routed.experts[:, 0]
        total = draft_experts(rows, experts, routed.weights[:, 0], draft)
    return close_layer(config, weights, routed, total[:, None]), kv_layer, experts


def draft_step(
    config: ModelConfig,
    params: Params,
    kv: KV,
    tokens: jax.Array,
    lengths: jax.Array,
    active: jax.Array,
) -> tuple[jax.Array, jax.Array, KV]:
    """One token of each sequence through the draft: the same model with INT4 routed experts.

    tokens: int32 [batch], at positions lengths: int32 [batch]. active: bool [batch]; rows that
    are not route nowhere and their outputs mean nothing. Returns logits float32 [batch, vocab],
    experts int32 [moe_layers, batch, k] and the cache with provisional entries.
    """
    shared = params["shared"]
    mask = active[:, None]
    hidden = embed(config, shared, tokens[:, None], compute_dtype(kv))
    layers, experts = list(kv), []
    for layer, kind in enumerate(config.representatives):
        weights = shared[layer_name(layer)]
        state = (kv[layer], hidden, lengths, mask)
        if not config.is_moe(layer):
            hidden, layers[layer] = _draft_dense(config, kind, weights, *state)
            continue
        draft = params["draft"][layer_name(layer)]
        hidden, layers[layer], chosen = _draft_moe(config, kind, weights, draft, *state)
        experts.append(chosen)
    return head(config, shared, hidden)[:, 0], jnp.stack(experts), tuple(layers)


def draft_chunk(
    config: ModelConfig,
    params: Params,
    kv: KV,
    tokens: jax.Array,
    lengths: jax.Array,
    active: jax.Array,
    num_steps: int,
) -> tuple[jax.Array, jax.Array, KV]:
    """Several greedy draft steps, each fed with the token before: `draft_step` in a row.

    Arguments as in `draft_step`; num_steps is static. Returns the drafted tokens int32 [batch,
    num_steps], experts int32 [moe_layers, batch, num_steps, k] and the cache.
    """
    drafted, chosen = [], []
    # Unrolled, for a few steps known in advance; the engine loops over any number in one program.
    for step in range(num_steps):
        logits, experts, kv = draft_step(config, params, kv, tokens, lengths + step, active)
        tokens = jnp.argmax(logits, -1).astype(jnp.int32)
        drafted.append(tokens)
        chosen.append(experts)
    return jnp.stack(drafted, 1), jnp.stack(chosen, 2), kv
