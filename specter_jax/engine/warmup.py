"""Runs every program that a generation may need once, so that none compiles while it is timed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specter_jax.engine.batch import Batch
from specter_jax.engine.context import Context
from specter_jax.engine.drafting import Drafted
from specter_jax.engine.prefill import prefill
from specter_jax.engine.slots import COMMIT_SIZES
from specter_jax.engine.state import DecodeState
from specter_jax.engine.verification import by_layers, one_program, resume, verify_tokens


def warm_up(ctx: Context, batch: Batch, depths: Sequence[int]) -> None:
    """Compiles, or fetches from JAX's compilation cache, what decoding `batch` may run.

    It loads experts and books uses: give it a recorder of its own and reset the cache after it.
    """
    _warm_commits(ctx)
    state, _ = prefill(ctx, batch)
    if any(depths):
        for steps in sorted({1, ctx.runtime.chunk_tokens}):
            # From a token of the host's, then from the chunk before.
            last, _ = _draft(ctx, state, state.last, steps)
            _draft(ctx, state, last, steps)
    for depth in depths:
        _warm_verification(ctx, state, depth)


def _warm_commits(ctx: Context) -> None:
    """Writes experts into slots in groups of every size that there is a program for."""
    pool = ctx.pool
    ctx.eviction.begin_iteration()
    for size in COMMIT_SIZES:
        absent = np.flatnonzero(~pool.cache.resident[0])[:size]
        if len(absent) == size <= min(pool.num_slots, pool.max_in_flight):
            pool.load([(0, int(expert)) for expert in absent], next_layer=0)


def _draft(ctx: Context, state: DecodeState, last, steps: int):
    chunk, state.kv = ctx.programs.draft_chunk(
        ctx.params, state.kv, last, state.lengths, state.active, state.draws, steps
    )
    return chunk.last, chunk.probs


def _warm_verification(ctx: Context, state: DecodeState, depth: int) -> None:
    """Both ways of verifying at `depth`, and resuming the one by the other."""
    probs, done = [], 0
    while state.draws is not None and done < depth:
        steps = min(ctx.runtime.chunk_tokens, depth - done)
        probs.append(_draft(ctx, state, state.last, steps)[1])
        done += steps
    drafted = Drafted(
        tokens=np.zeros((state.batch, depth), np.int32),
        experts=None,
        probs=tuple(probs),
        predicted=None,
        num_drafted=np.full(state.batch, depth, np.int32),
    )
    tokens = verify_tokens(state, drafted)
    resident = ctx.pool.cache.resident
    out = one_program(ctx, state, drafted, tokens)
    resume(ctx, state, drafted, tokens, out, 0, resident)
    if ctx.pool.num_slots < ctx.config.num_experts:
        by_layers(ctx, state, drafted, tokens, resident, group_size=1)
    else:
        by_layers(ctx, state, drafted, tokens, resident)
