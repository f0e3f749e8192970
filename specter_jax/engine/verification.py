"""Verification (phase 4): one optimistic program, or layer by layer behind the transfers."""

from __future__ import annotations

import numpy as np

from specter_jax.engine.context import Context, distinct_experts
from specter_jax.engine.drafting import Drafted
from specter_jax.engine.layered import Pass, run_layers
from specter_jax.engine.state import DecodeState
from specter_jax.offload import plan_loads
from specter_jax.runtime_config import MIN_VERIFY_TOKENS


def verify(
    ctx: Context, state: DecodeState, drafted: Drafted, resident_before: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Runs the target over the last token and the drafted ones and decides what is accepted.

    resident_before: bool [M, E], residents when the iteration began, for the statistics.
    Returns tokens int32 [B, T] and num_accepted int32 [B]; num_accepted + 1 tokens of a row count.
    """
    tokens = _verify_tokens(state, drafted)
    if _all_present(ctx, drafted):
        accepted, chosen = _one_program(ctx, state, drafted, tokens, resident_before)
    else:
        accepted, chosen = _by_layers(ctx, state, drafted, tokens, resident_before)
    _count_matches(ctx, state, drafted, chosen)
    return accepted


def _verify_tokens(state: DecodeState, drafted: Drafted) -> np.ndarray:
    """int32 [B, T]: last token, drafted tokens, padding up to the smallest verification."""
    tokens = np.concatenate([state.last[:, None], drafted.tokens], 1).astype(np.int32)
    pad = max(0, MIN_VERIFY_TOKENS - tokens.shape[1])
    return np.pad(tokens, ((0, 0), (0, pad)))


def _all_present(ctx: Context, drafted: Drafted) -> bool:
    """Whether one program is likely to find every expert in a slot; brings in the last few.

    True after the remaining predicted experts, if they are few, were issued and committed.
    """
    pool = ctx.pool
    if pool.cache.resident.all():
        return True
    if drafted.predicted is None:
        return ctx.optimism.expects_none
    predicted = drafted.predicted.predicted
    pending = plan_loads(predicted, pool.cache.resident)
    if not pending:
        return True
    may_bring = ctx.policy.prefetch == "draft" and not ctx.policy.use_cutoff
    few = len(pending) <= min(ctx.runtime.one_dispatch_pending, pool.max_in_flight)
    if not (may_bring and few and pool.cache.evictable(predicted) >= len(pending)):
        return False
    pool.issue(pending, urgent=True)
    for layer in np.flatnonzero(predicted.any(1)).tolist():
        pool.cache.pin(layer, np.flatnonzero(predicted[layer]))
    pool.commit(pending, next_layer=0)
    pool.cache.unpin_all()
    return True


def _one_program(ctx, state, drafted, tokens, resident_before):
    """The whole target in one dispatch; after a miss, on from the first layer that missed."""
    pool = ctx.pool
    with ctx.trace.span("verification", "verify", tokens=tokens.shape[1]):
        out, state.kv = ctx.programs.verify(
            ctx.params,
            state.kv,
            pool.slots,
            pool.cache.slot_table,
            tokens,
            state.lengths,
            drafted.num_drafted,
            state.active,
            drafted.probs,
            state.draws,
        )
        misses = np.asarray(out.misses)
        experts = np.asarray(out.experts)
    ctx.optimism.observe(bool(misses.any()))
    first_miss = int(np.argmax(misses > 0)) if misses.any() else len(misses)
    chosen = {m: experts[m] for m in range(first_miss)}
    for m, ids in chosen.items():
        used = distinct_experts(ids, ctx.config.num_experts)
        resident = int(resident_before[m, used].sum())
        ctx.recorder.resident_hits += resident
        ctx.recorder.prefetch_hits += len(used) - resident
        ctx.eviction.observe_layer(m, used)
    if first_miss == len(misses):
        return (np.asarray(out.tokens), np.asarray(out.num_accepted)), chosen
    ctx.recorder.resumes += 1
    hidden = ctx.programs.hidden_at(out.hidden, np.int32(first_miss))
    start = ctx.config.moe_layers[first_miss]
    accepted, rest = _layers_and_head(ctx, state, drafted, tokens, hidden, start, resident_before)
    return accepted, chosen | rest


def _by_layers(ctx, state, drafted, tokens, resident_before):
    hidden = ctx.programs.embed(ctx.shared, tokens)
    return _layers_and_head(ctx, state, drafted, tokens, hidden, 0, resident_before)


def _layers_and_head(ctx, state, drafted, tokens, hidden, start, resident_before):
    """Decoder layers from `start` on, then head and acceptance."""
    mask = state.active[:, None] & (np.arange(tokens.shape[1]) <= drafted.num_drafted[:, None])
    guess = drafted.predicted if ctx.policy.prefetch == "draft" else None
    if ctx.policy.use_cutoff:
        # Past its cut-off layer, `sp-l` loads on demand.
        guess = None
    misses_before = ctx.recorder.demand_misses
    run = Pass(
        lengths=state.lengths,
        mask=mask,
        group_size=ctx.pool.num_slots,
        predicted=None if guess is None else guess.predicted,
        counts=None if guess is None else guess.counts,
        resident_before=resident_before,
    )
    hidden, state.kv, chosen = run_layers(ctx, state.kv, hidden, start, run)
    if start == 0:
        ctx.optimism.observe(ctx.recorder.demand_misses > misses_before)
    out = ctx.programs.accept(
        ctx.shared,
        hidden,
        tokens,
        state.lengths,
        drafted.num_drafted,
        drafted.probs,
        state.draws,
    )
    return tuple(np.asarray(x) for x in out), chosen


def _count_matches(ctx, state, drafted, chosen) -> None:
    """Books how many of the target's choices the draft had named for the same token."""
    if drafted.experts is None:
        return
    target = np.stack([chosen[m] for m in sorted(chosen)])
    both = min(target.shape[2], drafted.experts.shape[2])
    target = target[:, state.active, :both]
    named = drafted.experts[:, state.active, :both]
    matches = (target[..., :, None] == named[..., None, :]).any(-1)
    ctx.recorder.expert_choices += target.size
    ctx.recorder.expert_matches += int(matches.sum())
