"""The device programs of one model: the pure model functions, jitted, small results in host memory.

A small result that the host reads is written by the program itself into pinned host memory
(`np.asarray` of a device array costs two to five times as much). KV and slots are donated.
Layers of the same kind share one compiled program: their parameters are arguments.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from specter_jax import models
from specter_jax.acceptance import Accepted, accept_greedy, accept_sampled
from specter_jax.config import ModelConfig
from specter_jax.engine.store import device_sharding, host_sharding
from specter_jax.sampling import DRAFT_STREAM, filtered_probs, greedy, sample, stream_keys

KV = Any
Params = Any


@flax.struct.dataclass
class Draws:
    """Sampling arguments that are traced, so that changing them compiles nothing.

    keys: typed PRNG keys [B], one per row; temperature, top_p: float32; top_k: int32 scalars.
    """

    keys: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array


@flax.struct.dataclass
class DraftStep:
    """What one draft step gives.

    tokens: int32 [B], host; experts: int32 [M, B, k], host;
    last: `tokens` again, on the device, the input of the next step;
    probs: float32 [B, V], device, what each token was drawn from (None when greedy).
    """

    tokens: jax.Array
    experts: jax.Array
    last: jax.Array
    probs: jax.Array | None


@flax.struct.dataclass
class Verified:
    """What a verification of T positions gives; all but `hidden` in host memory.

    tokens: int32 [B, T], of which num_accepted + 1 count; num_accepted: int32 [B];
    experts: int32 [M, B, T, k]; misses: int32 [M]; hidden: [M, B, T, H] entering each MoE layer.
    """

    tokens: jax.Array
    num_accepted: jax.Array
    experts: jax.Array
    misses: jax.Array
    hidden: jax.Array


@dataclasses.dataclass(frozen=True)
class Programs:
    """Jitted functions of one model on one device; each compiles once per shape bucket.

    draft_step(params, kv, tokens [B], lengths [B], active [B], draws) -> (DraftStep, kv)
    verify(params, kv, slots, slot_table, tokens [B, T], lengths, num_drafted [B], active, probs,
        draws) -> (Verified, kv)
    embed(shared, tokens) -> hidden
    dense(layer, prompt, params, kv_layer, hidden, lengths, mask) -> (hidden, kv_layer)
    route(layer, prompt, params, kv_layer, hidden, lengths, mask, next_router)
        -> (Routed, host copies (experts, next_experts), kv_layer)
    place(array) -> the array on the device (not jitted)
    zeros(routed) -> total, float32 [B, T, H]
    accumulate(routed, slots, slot_row, group, total, draft) -> total
    close(params, routed, total) -> hidden
    experts(params, routed, slots, slot_row, draft) -> hidden
    accept(shared, hidden, tokens, lengths, num_drafted, probs, draws) -> (tokens, num_accepted)
    first_token(shared, hidden, last [B], lengths, draws) -> tokens [B]
    hidden_at(hidden [M, B, T, H], m) -> [B, T, H]
    """

    draft_step: Any
    verify: Any
    embed: Any
    dense: Any
    route: Any
    place: Any
    zeros: Any
    accumulate: Any
    close: Any
    experts: Any
    accept: Any
    first_token: Any
    hidden_at: Any


def token_mask(num_tokens: int, num_drafted: jax.Array, active: jax.Array) -> jax.Array:
    """bool [B, T]: the positions of a verification that count."""
    return active[:, None] & (jnp.arange(num_tokens) <= num_drafted[:, None])


def judge(
    logits: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    num_drafted: jax.Array,
    probs: tuple[jax.Array, ...],
    draws: Draws | None,
) -> Accepted:
    """Greedy acceptance without `draws`, speculative rejection sampling with them.

    logits: float32 [B, T, V]; tokens: int32 [B, T], the last committed one, then the drafted;
    probs: the draft steps' `probs`, T - 1 of [B, V], or () where nothing was drafted.
    """
    drafted = tokens[:, 1:]
    if draws is None:
        return accept_greedy(logits, drafted, num_drafted)
    draft_probs = jnp.stack(probs, 1) if probs else jnp.zeros_like(logits[:, :-1])
    return accept_sampled(
        logits,
        drafted,
        draft_probs,
        num_drafted,
        draws.keys,
        lengths + 1,
        draws.temperature,
        draws.top_k,
        draws.top_p,
    )


def _draft_step(config, params, kv, tokens, lengths, active, draws):
    logits, experts, kv = models.draft_step(config, params, kv, tokens, lengths, active)
    if draws is None:
        tokens, probs = greedy(logits), None
    else:
        probs = filtered_probs(logits, draws.temperature, draws.top_k, draws.top_p)
        tokens = sample(probs, stream_keys(draws.keys, lengths + 1, DRAFT_STREAM))
    return DraftStep(tokens=tokens, experts=experts, last=tokens, probs=probs), kv


def _verify(
    config,
    params,
    kv,
    slots,
    slot_table,
    tokens,
    lengths,
    num_drafted,
    active,
    probs,
    draws,
):
    mask = token_mask(tokens.shape[1], num_drafted, active)
    out, kv = models.verify(config, params, kv, slots, slot_table, tokens, lengths, mask)
    accepted = judge(out.logits, tokens, lengths, num_drafted, probs, draws)
    verified = Verified(
        tokens=accepted.tokens,
        num_accepted=accepted.num_accepted,
        experts=out.experts,
        misses=out.misses,
        hidden=out.hidden,
    )
    return verified, kv


def _route(config, layer, prompt, params, kv_layer, hidden, lengths, mask, next_router):
    routed, kv_layer = models.route_layer(
        config, layer, params, kv_layer, hidden, lengths, mask, next_router, prompt=prompt
    )
    return routed, (routed.experts, routed.next_experts), kv_layer


def _zeros(config, routed):
    return jnp.zeros(routed.moe_input.shape, jnp.float32)


def _dense(config, layer, prompt, params, kv_layer, hidden, lengths, mask):
    return models.dense_layer(config, layer, params, kv_layer, hidden, lengths, mask, prompt=prompt)


def _accept(config, shared, hidden, tokens, lengths, num_drafted, probs, draws):
    logits = models.head(config, shared, hidden)
    accepted = judge(logits, tokens, lengths, num_drafted, probs, draws)
    return accepted.tokens, accepted.num_accepted


def _first_token(config, shared, hidden, last, lengths, draws):
    logits = models.last_logits(config, shared, hidden, last)[:, None]
    no_draft = jnp.zeros((logits.shape[0], 1), jnp.int32)
    return judge(logits, no_draft, lengths - 1, jnp.zeros_like(lengths), (), draws).tokens[:, 0]


_GPU_OPTIONS = {"xla_gpu_autotune_level": 0}
"""XLA's autotuner times each product alone, with its weights in the L2 cache; in the whole step its
choices are slower (draft step 4.0 ms against 2.8 on an H200), and it chooses by row count."""


@functools.lru_cache(maxsize=16)
def build_programs(config: ModelConfig, compute_dtype: str, device: jax.Device) -> Programs:
    """Programs for `config` on `device`, computing in `compute_dtype` ("float32", "bfloat16")."""
    dtype = jnp.dtype(compute_dtype)
    host, dev = host_sharding(device), device_sharding(device)
    options = _GPU_OPTIONS if device.platform == "gpu" else None

    def jitted(function, donate=(), static=(), out=dev):
        # A function of its own per model, so that two models never share a cache entry.
        bound = functools.partial(function, config)
        return jax.jit(
            bound,
            donate_argnums=donate,
            static_argnums=static,
            out_shardings=out,
            compiler_options=options,
        )

    step_out = DraftStep(tokens=host, experts=host, last=dev, probs=dev)
    verified_out = Verified(tokens=host, num_accepted=host, experts=host, misses=host, hidden=dev)

    def embed(config, shared, tokens):
        return models.embed(config, shared, tokens, dtype)

    return Programs(
        draft_step=jitted(_draft_step, donate=(1,), out=(step_out, dev)),
        verify=jitted(_verify, donate=(1,), out=(verified_out, dev)),
        embed=jitted(embed),
        dense=jitted(_dense, donate=(3,), static=(0, 1)),
        route=jitted(_route, donate=(3,), static=(0, 1), out=(dev, host, dev)),
        place=functools.partial(jax.device_put, device=dev),
        zeros=jitted(_zeros),
        accumulate=jitted(models.accumulate_experts, donate=(4,)),
        close=jitted(models.close_layer),
        experts=jitted(models.finish_layer),
        accept=jitted(_accept, out=host),
        first_token=jitted(_first_token, out=host),
        hidden_at=jax.jit(lambda hidden, m: hidden[m]),
    )
