"""The device programs of one model: the pure model functions, jitted, small results in host memory.

A small result that the host reads is written by the program itself into pinned host memory
(`np.asarray` of a device array costs two to five times as much). KV and slots are donated.
Layers of the same kind share one compiled program: their parameters are arguments.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specter_jax import models
from specter_jax.acceptance import Accepted, accept_greedy, accept_sampled
from specter_jax.config import ModelConfig
from specter_jax.engine import compile_options
from specter_jax.engine.program_types import (
    MAX_STEPS,
    DraftChunk,
    DraftStart,
    Draws,
    Stretch,
    Verified,
)
from specter_jax.engine.store import device_sharding, host_sharding
from specter_jax.runtime_config import MIN_VERIFY_TOKENS
from specter_jax.sampling import DRAFT_STREAM, filtered_probs, greedy, sample, stream_keys

KV = Any
Params = Any


class _ByPurpose:
    """One function, compiled in one way for prompts and in another for decoding.

    at: place of the argument that says which: true for prompts.
    """

    def __init__(self, decoding: Any, prompt: Any, at: int) -> None:
        self._programs = (decoding, prompt)
        self._at = at

    def __call__(self, *arguments: Any) -> Any:
        return self._programs[arguments[self._at]](*arguments)

    def lower(self, *arguments: Any) -> Any:
        return self._programs[arguments[self._at]].lower(*arguments)


@dataclasses.dataclass(frozen=True)
class Programs:
    """Jitted functions of one model on one device; each compiles once per shape bucket.

    start(last [B], lengths [B]) -> DraftStart of NumPy arrays (not jitted)
    draft(params, kv, probs, start, active [B], first, count, draws)
        -> (DraftChunk, kv, probs), steps first .. first + count - 1, the first of them fed with
        start.last; probs float32 [MAX_STEPS, B, V], what each step's token was drawn from, None
        when greedy
    empty_probs(batch) -> probs for an iteration's first chunk (static batch)
    place(array) -> the array on the device (not jitted)
    drafted_tokens(depth, start, drafted) -> int32 [B, T], what `verify` takes of a draft's first
        `depth` tokens (static)
    verify(params, kv, slots, slot_table, tokens [B, T], lengths, num_drafted [B], active, probs,
        draws) -> (Verified, kv)
    embed(shared, tokens) -> hidden
    dense(layer, prompt, params, kv_layer, hidden, lengths, mask) -> (hidden, kv_layer)
    route(layer, prompt, params, kv_layer, hidden, lengths, mask, next_router)
        -> (Routed, host copies (experts, next_experts), kv_layer)
    zeros(routed) -> total, float32 [B, T, H]
    accumulate(routed, slots, slot_row, group, total, draft) -> total
    close(prompt, params, routed, total) -> hidden
    experts(params, routed, slots, slot_row, draft) -> hidden
    stretch(layers, prompt, params, drafts, kv_layers, hidden, slots, slot_table, lengths, mask)
        -> (Stretch, kv_layers), consecutive MoE layers, one entry each in the tuples
    accept(shared, hidden, tokens, lengths, num_drafted, active, probs, draws)
        -> ((tokens, num_accepted), DraftStart)
    first_token(shared, hidden, last [B], lengths, draws) -> tokens [B]
    hidden_at(hidden [M or n, B, T, H], m) -> [B, T, H]
    """

    start: Any
    draft: Any
    empty_probs: Any
    place: Any
    drafted_tokens: Any
    verify: Any
    embed: Any
    dense: Any
    route: Any
    zeros: Any
    accumulate: Any
    close: Any
    experts: Any
    stretch: Any
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
    probs: jax.Array | None,
    draws: Draws | None,
) -> Accepted:
    """Greedy acceptance without `draws`, speculative rejection sampling with them.

    logits: float32 [B, T, V]; tokens: int32 [B, T], the last committed one, then the drafted;
    probs: float32 [at least T - 1, B, V], the draft steps', or None where nothing was drafted.
    """
    drafted = tokens[:, 1:]
    if draws is None:
        return accept_greedy(logits, drafted, num_drafted)
    if probs is None:
        draft_probs = jnp.zeros_like(logits[:, :-1])
    else:
        draft_probs = jnp.swapaxes(probs[: drafted.shape[1]], 0, 1)
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


def _next_start(accepted: Accepted, lengths: jax.Array, active: jax.Array, go: jax.Array):
    """Where the next draft begins if all of `accepted` is committed; `go`: bool scalar."""
    last = jnp.take_along_axis(accepted.tokens, accepted.num_accepted[:, None], axis=1)[:, 0]
    gained = jnp.where(active, accepted.num_accepted + 1, 0)
    return DraftStart(last=last, lengths=lengths + gained, go=go.astype(jnp.int32))


def _draft(config, params, kv, probs, start, active, first, count, draws):
    # A loop: one program for any number of steps, and one dispatch, which costs the host about as
    # much as a step takes the device, because it grows with the number of arrays.
    batch = start.last.shape[0]
    tokens = jnp.zeros((MAX_STEPS, batch), jnp.int32)
    experts = jnp.zeros((MAX_STEPS, config.num_moe_layers, batch, config.top_k), jnp.int32)

    def step(i, carry):
        kv, probs, last, tokens, experts = carry
        at = start.lengths + first + i
        logits, chosen, kv = models.draft_step(config, params, kv, last, at, active)
        if draws is None:
            last = greedy(logits)
        else:
            drawn_from = filtered_probs(logits, draws.temperature, draws.top_k, draws.top_p)
            last = sample(drawn_from, stream_keys(draws.keys, at + 1, DRAFT_STREAM))
            probs = probs.at[first + i].set(drawn_from)
        return kv, probs, last, tokens.at[i].set(last), experts.at[i].set(chosen)

    carry = (kv, probs, start.last, tokens, experts)
    kv, probs, last, tokens, experts = jax.lax.fori_loop(0, count * start.go, step, carry)
    chunk = DraftChunk(tokens=tokens, experts=experts, last=last, drafted=tokens)
    return chunk, kv, probs


def _drafted_tokens(config, depth, start, drafted):
    tokens = jnp.concatenate((start.last[:, None], drafted[:depth].T), axis=1)
    return jnp.pad(tokens, ((0, 0), (0, max(0, MIN_VERIFY_TOKENS - tokens.shape[1]))))


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
        start=_next_start(accepted, lengths, active, ~out.misses.any()),
    )
    return verified, kv


def _route(config, layer, prompt, params, kv_layer, hidden, lengths, mask, next_router):
    routed, kv_layer = models.route_layer(
        config, layer, params, kv_layer, hidden, lengths, mask, next_router, prompt=prompt
    )
    return routed, (routed.experts, routed.next_experts), kv_layer


def _stretch(config, layers, prompt, params, drafts, kv, hidden, slots, slot_table, lengths, mask):
    args = (config, layers, params, drafts, kv, hidden, slots, slot_table, lengths, mask)
    hidden, out, kv = models.target_layers(*args, prompt=prompt)
    return Stretch(hidden=hidden, entering=out.hidden, experts=out.experts, misses=out.misses), kv


def _empty_probs(config, batch):
    return jnp.zeros((MAX_STEPS, batch, config.vocab_size), jnp.float32)


def _zeros(config, routed):
    return jnp.zeros(routed.moe_input.shape, jnp.float32)


def _dense(config, layer, prompt, params, kv_layer, hidden, lengths, mask):
    return models.dense_layer(config, layer, params, kv_layer, hidden, lengths, mask, prompt=prompt)


def _close(config, prompt, params, routed, total):
    return models.close_layer(config, params, routed, total)


def _accept(config, shared, hidden, tokens, lengths, num_drafted, active, probs, draws):
    logits = models.head(config, shared, hidden)
    accepted = judge(logits, tokens, lengths, num_drafted, probs, draws)
    start = _next_start(accepted, lengths, active, jnp.bool_(True))
    return (accepted.tokens, accepted.num_accepted), start


def _first_token(config, shared, hidden, last, lengths, draws):
    logits = models.last_logits(config, shared, hidden, last)[:, None]
    no_draft = jnp.zeros((logits.shape[0], 1), jnp.int32)
    return judge(logits, no_draft, lengths - 1, jnp.zeros_like(lengths), None, draws).tokens[:, 0]


@functools.lru_cache(maxsize=16)
def build_programs(config: ModelConfig, compute_dtype: str, device: jax.Device) -> Programs:
    """Programs for `config` on `device`, computing in `compute_dtype` ("float32", "bfloat16")."""
    dtype = jnp.dtype(compute_dtype)
    host, dev = host_sharding(device), device_sharding(device)
    on_gpu = device.platform == "gpu"

    def jitted(function, donate=(), static=(), out=dev, gpu_options=compile_options.PROGRAM):
        # A function of its own per model, so that two models never share a cache entry.
        bound = functools.partial(function, config)
        return jax.jit(
            bound,
            donate_argnums=donate,
            static_argnums=static,
            out_shardings=out,
            compiler_options=gpu_options if on_gpu else None,
        )

    def by_purpose(function, at, **options):
        ways = (compile_options.PROGRAM, compile_options.PROMPT)
        return _ByPurpose(*(jitted(function, gpu_options=way, **options) for way in ways), at)

    chunk_out = DraftChunk(tokens=host, experts=host, last=dev, drafted=dev)
    verified_out = Verified(
        tokens=host, num_accepted=host, experts=host, misses=host, hidden=dev, start=dev
    )
    stretch_out = Stretch(hidden=dev, entering=dev, experts=host, misses=host)

    def embed(config, shared, tokens):
        return models.embed(config, shared, tokens, dtype)

    def start(last, lengths):
        return jax.device_put(DraftStart(last, lengths, np.int32(1)), dev)

    return Programs(
        start=start,
        draft=jitted(
            _draft, donate=(1, 2), out=(chunk_out, dev, dev), gpu_options=compile_options.DRAFT
        ),
        empty_probs=jitted(_empty_probs, static=(0,)),
        place=functools.partial(jax.device_put, device=dev),
        drafted_tokens=jitted(_drafted_tokens, static=(0,)),
        verify=jitted(_verify, donate=(1,), out=(verified_out, dev)),
        embed=jitted(embed),
        dense=by_purpose(_dense, 1, donate=(3,), static=(0, 1)),
        route=by_purpose(_route, 1, donate=(3,), static=(0, 1), out=(dev, host, dev)),
        zeros=jitted(_zeros),
        accumulate=jitted(models.accumulate_experts, donate=(4,)),
        close=by_purpose(_close, 0, static=(0,)),
        experts=jitted(models.finish_layer),
        stretch=by_purpose(_stretch, 1, donate=(4,), static=(0, 1), out=(stretch_out, dev)),
        accept=jitted(_accept, out=(host, dev)),
        first_token=jitted(_first_token, out=host),
        hidden_at=jax.jit(lambda hidden, m: hidden[m]),
    )
