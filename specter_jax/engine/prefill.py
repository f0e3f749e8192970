"""Prefill: the prompts through the target, each layer's experts streamed through the slots."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specter_jax import models
from specter_jax.engine import stretches
from specter_jax.engine.batch import Batch
from specter_jax.engine.context import Context, distinct_experts
from specter_jax.engine.layered import Pass, run_layers
from specter_jax.engine.state import DecodeState
from specter_jax.engine.store import device_sharding
from specter_jax.engine.stretches import Foreseen

SEED_TOKENS = 64
"""Prompt tokens whose routing seeds the eviction statistics."""

SEED_WINDOW = 8
"""Tokens taken as one sweep when seeding, a usual verification's worth."""


def prefill(ctx: Context, batch: Batch) -> tuple[DecodeState, np.ndarray]:
    """Runs the prompts and draws each one's first token.

    Returns the decoding state and the first tokens, int32 [B].
    """
    prompts, draws = batch.prompts, batch.draws
    lengths = np.array(batch.lengths, np.int32)
    kv = empty_kv(ctx, batch)
    first = np.zeros(len(prompts), np.int32)
    done = 0
    for width in batch.widths(ctx.runtime):
        counts = np.clip(lengths - done, 0, width)
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : counts[row]] = prompt[done : done + counts[row]]
        with ctx.trace.span("verification", "prefill", tokens=int(counts.max())):
            kv, ended = _prefill_chunk(ctx, kv, tokens, counts, done, lengths, draws)
        ends_here = (counts > 0) & (lengths <= done + width)
        first = np.where(ends_here, ended, first)
        done += width
    state = DecodeState(
        kv=kv, lengths=lengths, last=first, active=np.ones(len(prompts), bool), draws=draws
    )
    return state, first


def empty_kv(ctx: Context, batch: Batch) -> tuple[Any, ...]:
    """An empty KV for the batch, placed as programs return it, which is what they compile for."""
    dtype = jnp.dtype(batch.kv_dtype)
    return _empty_kv(ctx.device)(ctx.config, len(batch.prompts), batch.capacity(ctx.runtime), dtype)


@functools.lru_cache(maxsize=8)
def _empty_kv(device: jax.Device) -> Any:
    """`models.init_kv` as one program: a dispatch for each of its arrays costs 20 ms on a GPU."""
    static = (0, 1, 2, 3)
    return jax.jit(models.init_kv, static_argnums=static, out_shardings=device_sharding(device))


def _prefill_chunk(ctx, kv, tokens, counts, done, lengths, draws):
    """One chunk of all prompts; returns the KV and the token after each row's last position."""
    mask = np.arange(tokens.shape[1]) < counts[:, None]
    # Groups as large as half of what can be on its way: each costs the host a dispatch.
    group = max(ctx.runtime.prefill_group, ctx.pool.max_in_flight // 2)
    num_tokens = int(mask.sum())
    # Half the slots compute while the other half is filled.
    run = Pass(
        lengths=np.where(counts > 0, done, lengths).astype(np.int32),
        mask=mask,
        group_size=max(1, min(group, ctx.pool.num_slots // 2)),
        predicted=_expected(ctx, num_tokens),
        foreseen=foreseen_of_prompt(ctx, num_tokens),
    )
    ctx.eviction.begin_iteration()
    hidden = ctx.programs.embed(ctx.shared, tokens)
    hidden, kv, chosen = run_layers(ctx, kv, hidden, 0, run)
    _seed_statistics(ctx, chosen, counts)
    last = np.maximum(counts - 1, 0).astype(np.int32)
    return kv, np.asarray(ctx.programs.first_token(ctx.shared, hidden, last, lengths, draws))


def foreseen_of_prompt(ctx: Context, num_tokens: int) -> Foreseen | None:
    """What lets a prompt's layers run together: that it needs every expert, and where that pays."""
    needed = _expected(ctx, num_tokens)
    if needed is None or ctx.device.platform not in stretches.PROMPT_PLATFORMS:
        return None
    return Foreseen(needed, may_bring=True)


def _expected(ctx: Context, num_tokens: int) -> np.ndarray | None:
    """bool [M, E]: a prompt of many choices per expert uses about all of them; else unknown."""
    if num_tokens * ctx.config.top_k < 2 * ctx.config.num_experts:
        return None
    return np.ones(ctx.pool.cache.slot_table.shape, bool)


def _seed_statistics(ctx: Context, chosen: dict[int, np.ndarray], counts: np.ndarray) -> None:
    """Shows the eviction policy the end of the prompts as if it had been decoded."""
    for start in range(-SEED_TOKENS, 0, SEED_WINDOW):
        begin = np.maximum(counts + start, 0)
        end = np.maximum(counts + start + SEED_WINDOW, 0)
        if not (end > begin).any():
            continue
        ctx.eviction.begin_iteration()
        for m, experts in chosen.items():
            window = [experts[b, begin[b] : end[b]] for b in range(len(counts))]
            used = np.concatenate([part.ravel() for part in window])
            ctx.eviction.observe_layer(m, distinct_experts(used, ctx.config.num_experts))
        ctx.eviction.end_iteration()
