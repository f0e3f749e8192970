"""Runs every program that a generation may need once, so that none compiles while it is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from specter_jax.engine.batch import Batch
from specter_jax.engine.context import Context
from specter_jax.engine.drafting import Drafted
from specter_jax.engine.layered import next_router
from specter_jax.engine.prefill import prefill
from specter_jax.engine.slots import COMMIT_SIZES
from specter_jax.engine.state import DecodeState
from specter_jax.engine.store import device_sharding
from specter_jax.engine.verification import by_layers, one_program, resume, verify_tokens


def warm_up(
    ctx: Context, batch: Batch, depths: Sequence[int], on_depth: Callable[[int], None]
) -> None:
    """Compiles, or fetches from JAX's compilation cache, what decoding `batch` may run.

    on_depth: called with the number of depths done, from 0.
    It loads experts and books uses: give it a recorder of its own and reset the cache after it.
    """
    on_depth(0)
    _warm_commits(ctx)
    state, _ = prefill(ctx, batch)
    if not ctx.pool.cache.resident.all():
        for width in sorted(set(batch.widths(ctx.runtime))):
            _warm_experts(ctx, state, width, prompt=True)
    if any(depths):
        # From a token of the host's, then from the step before.
        last, _ = _draft(ctx, state, state.last)
        _draft(ctx, state, last)
    for done, depth in enumerate(depths, start=1):
        _warm_verification(ctx, state, depth)
        on_depth(done)


def _warm_commits(ctx: Context) -> None:
    """Writes into a slot with every program there is."""
    if ctx.pool.cache.resident.all():
        return
    # What the slot held is lost, so that nothing may count as resident from here on.
    ctx.pool.reset(ctx.eviction)
    expert = jax.device_put(ctx.pool.store.get(0, 0), device_sharding(ctx.device))
    for size in COMMIT_SIZES:
        ctx.pool.write([0] * size, [expert] * size)


def _warm_experts(ctx: Context, state: DecodeState, num_tokens: int, *, prompt: bool) -> None:
    """Both ways of computing routed experts: all together, and in groups that add up.

    Which of them a request needs depends on its routing, which the warm-up cannot know.
    """
    shape = (state.batch, num_tokens)
    in_group = np.ones(ctx.config.num_experts, bool)
    kv = list(state.kv)
    # The last layer's routing predicts no next layer, and so has another structure.
    for m in sorted({0, ctx.config.num_moe_layers - 1}):
        layer = ctx.config.moe_layers[m]
        params, row = ctx.layer_params(layer), ctx.pool.table()[m]
        draft = ctx.decoding_draft(m)
        hidden = ctx.programs.embed(ctx.shared, np.zeros(shape, np.int32))
        routed, _, kv[layer] = ctx.programs.route(
            ctx.representatives[layer],
            prompt,
            params,
            kv[layer],
            hidden,
            np.zeros(state.batch, np.int32),
            np.ones(shape, bool),
            next_router(ctx, m),
        )
        ctx.programs.experts(params, routed, ctx.pool.slots, row, draft)
        total = None
        for _ in range(2):
            total = ctx.programs.accumulate(routed, ctx.pool.slots, row, in_group, total, draft)
        ctx.programs.close(params, routed, total)
    state.kv = tuple(kv)


def _draft(ctx: Context, state: DecodeState, last):
    step, state.kv = ctx.programs.draft_step(
        ctx.params, state.kv, last, state.lengths, state.active, state.draws
    )
    return step.last, step.probs


def _warm_verification(ctx: Context, state: DecodeState, depth: int) -> None:
    """Both ways of verifying at `depth`, and resuming the one by the other."""
    sampled = state.draws is not None and depth > 0
    probs = (_draft(ctx, state, state.last)[1],) * depth if sampled else ()
    drafted = Drafted(
        tokens=np.zeros((state.batch, depth), np.int32),
        experts=None,
        probs=probs,
        predicted=None,
        num_drafted=np.full(state.batch, depth, np.int32),
    )
    tokens = verify_tokens(state, drafted)
    resident = ctx.pool.cache.resident
    out = one_program(ctx, state, drafted, tokens)
    resume(ctx, state, drafted, tokens, out, 0, resident)
    by_layers(ctx, state, drafted, tokens, resident)
    if ctx.pool.num_slots < ctx.config.num_experts:
        _warm_experts(ctx, state, tokens.shape[1], prompt=False)
