"""Verification (phase 4): one optimistic program, or layer by layer behind the transfers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from specter_jax.engine.context import Context, needed_experts
from specter_jax.engine.drafting import Drafted
from specter_jax.engine.layered import Pass, run_layers
from specter_jax.engine.program_types import DraftStart, Verified
from specter_jax.engine.slots import Key
from specter_jax.engine.state import DecodeState
from specter_jax.engine.stretches import Foreseen, book_uses, first_missing, runs_stretches
from specter_jax.offload import plan_loads
from specter_jax.runtime_config import MIN_VERIFY_TOKENS

Accepted = tuple[np.ndarray, np.ndarray]
"""tokens int32 [B, T], num_accepted int32 [B]: num_accepted + 1 tokens of a row count."""

BeginNext = Callable[[DraftStart], None]

Choices = dict[int, np.ndarray]
"""MoE layer -> the target's choices, int32 [B, T, k]."""

_MAX_RERUNS = 2
_RERUN_BEFORE = 0.3
"""Share of the layers before which a miss makes the whole program run again: what is left goes in
stretches of layers, which take a third longer than the same layers inside the program."""


def verify(
    ctx: Context,
    state: DecodeState,
    drafted: Drafted,
    resident_before: np.ndarray,
    begin_next: BeginNext | None = None,
) -> tuple[Accepted, Choices]:
    """Runs the target over the last token and the drafted ones and decides what is accepted.

    resident_before: bool [M, E], residents when the iteration began, for the statistics.
    begin_next: dispatches what is to run behind the verification; called again after a miss.
    """
    tokens = verify_tokens(state, drafted)
    late = _make_present(ctx, drafted)
    if late is not None:
        accepted, chosen = _one_program_or_resume(
            ctx, state, drafted, tokens, resident_before, begin_next, late
        )
    else:
        accepted, chosen = by_layers(ctx, state, drafted, tokens, resident_before, begin_next)
    _count_matches(ctx, state, drafted, chosen)
    return accepted, chosen


def verify_tokens(state: DecodeState, drafted: Drafted) -> np.ndarray:
    """int32 [B, T]: last token, drafted tokens, padding up to the smallest verification."""
    tokens = np.concatenate([state.last[:, None], drafted.tokens], 1).astype(np.int32)
    pad = max(0, MIN_VERIFY_TOKENS - tokens.shape[1])
    return np.pad(tokens, ((0, 0), (0, pad)))


def _make_present(ctx: Context, drafted: Drafted) -> set[Key] | None:
    """Brings in the last few experts, if one program is then likely to find every one in a slot.

    Returns those of them whose transfers will be waited for, None if one program is not likely to.
    """
    pool = ctx.pool
    if pool.cache.resident.all():
        return set()
    if drafted.predicted is None:
        return set() if ctx.optimism.expects_none else None
    predicted = drafted.predicted.predicted
    pending = plan_loads(predicted, pool.cache.resident)
    if not pending:
        return set()
    may_bring = ctx.policy.prefetch == "draft" and not ctx.policy.use_cutoff
    few = len(pending) <= ctx.runtime.one_dispatch_pending
    return _bring_all(ctx, pending, predicted) if may_bring and few else None


def _bring_all(ctx: Context, missing: list[Key], needed: np.ndarray) -> set[Key] | None:
    """Loads `missing` and keeps what is `needed`, bool [M, E]; None if they do not all fit.

    Returns those that had not arrived.
    """
    pool = ctx.pool
    if pool.cache.evictable(needed) < len(missing):
        return None
    for layer in np.flatnonzero(needed.any(1)).tolist():
        pool.cache.pin(layer, np.flatnonzero(needed[layer]))
    late = set(missing).difference(pool.arrived())
    pool.load(missing, next_layer=0)
    pool.cache.unpin_all()
    return late


def one_program(
    ctx: Context,
    state: DecodeState,
    drafted: Drafted,
    tokens: np.ndarray,
    begin_next: BeginNext | None = None,
) -> Verified:
    """The whole target in one dispatch; right up to the first layer with misses."""
    out, drafted.verified = drafted.verified, None
    if out is None:
        out, state.kv = ctx.programs.verify(*verify_arguments(ctx, state, drafted, tokens))
    if begin_next is not None:
        begin_next(out.start)
    return out


def begin_verification(ctx: Context, state: DecodeState, depth: int) -> None:
    """Dispatches the verification of the draft that was just begun, where it can miss nothing.

    The device then goes through draft and verification without a word from the host.
    """
    begun = state.begun
    if begun is None or state.draws is not None or not ctx.pool.cache.resident.all():
        return
    tokens = ctx.programs.drafted_tokens(depth, begun.start, begun.chunk.drafted)
    begun.depth = depth
    num_drafted = np.where(state.active, depth, 0).astype(np.int32)
    arguments = _arguments(ctx, state, tokens, begun.start.lengths, num_drafted, begun.probs)
    begun.verified, state.kv = ctx.programs.verify(*arguments)


def verify_arguments(
    ctx: Context, state: DecodeState, drafted: Drafted, tokens: np.ndarray
) -> tuple[Any, ...]:
    """What `programs.verify` takes."""
    # On the device as behind a draft: another kind of argument would be another program.
    tokens, lengths = ctx.programs.place(tokens), ctx.programs.place(state.lengths)
    return _arguments(ctx, state, tokens, lengths, drafted.num_drafted, drafted.probs)


def _arguments(ctx, state, tokens, lengths, num_drafted, probs) -> tuple[Any, ...]:
    return (
        ctx.params,
        state.kv,
        ctx.pool.slots,
        ctx.pool.table(),
        tokens,
        lengths,
        num_drafted,
        state.active,
        probs,
        state.draws,
    )


def _one_program_or_resume(
    ctx: Context,
    state: DecodeState,
    drafted: Drafted,
    tokens: np.ndarray,
    resident_before: np.ndarray,
    begin_next: BeginNext | None,
    late: set[Key],
) -> tuple[Accepted, Choices]:
    """Verifies in one program and makes up for what it missed; `late` experts are waited for.

    After a miss it fetches what was missed and runs the program again, which overwrites what the
    first run wrote; or goes on layer by layer from the first layer that missed, if few are left or
    slots are too few.
    """
    out = one_program(ctx, state, drafted, tokens, begin_next)
    misses, experts = _read(ctx, out, tokens)
    ctx.optimism.observe(bool(misses.any()))
    resumed = False
    for _ in range(_MAX_RERUNS):
        first_miss = first_missing(misses)
        if first_miss >= len(misses) * _RERUN_BEFORE:
            break
        # Routing behind the first miss is not right, but nearly so.
        needed = needed_experts(experts, ctx.config.num_experts)
        missing = plan_loads(needed, ctx.pool.cache.resident, start_layer=first_miss)
        brought = _bring_all(ctx, missing, needed)
        if brought is None:
            break
        ctx.recorder.resumes += not resumed
        resumed = True
        late |= brought
        out = one_program(ctx, state, drafted, tokens, begin_next)
        misses, experts = _read(ctx, out, tokens)
    first_miss = first_missing(misses)
    chosen = {m: experts[m] for m in range(first_miss)}
    book_uses(ctx, chosen, resident_before, late)
    if first_miss == len(misses):
        return (np.asarray(out.tokens), np.asarray(out.num_accepted)), chosen
    ctx.recorder.resumes += not resumed
    accepted, rest = resume(
        ctx, state, drafted, tokens, out, first_miss, resident_before, experts, begin_next, late
    )
    return accepted, chosen | rest


def _read(ctx: Context, out: Verified, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """misses int32 [M] and experts int32 [M, B, T, k], waiting for the program."""
    with ctx.trace.span("verification", "verify", tokens=tokens.shape[1]):
        return np.asarray(out.misses), np.asarray(out.experts)


def resume(
    ctx: Context,
    state: DecodeState,
    drafted: Drafted,
    tokens: np.ndarray,
    out: Verified,
    first_miss: int,
    resident_before: np.ndarray,
    experts: np.ndarray,
    begin_next: BeginNext | None = None,
    late: set[Key] | None = None,
) -> tuple[Accepted, Choices]:
    """Layer by layer from MoE layer `first_miss` on, from the state that `out` saved there.

    experts: int32 [M, B, T, k], what `out` chose: right in that layer, nearly so behind it; late:
    experts already waited for.
    """
    hidden = ctx.programs.hidden_at(out.hidden, np.int32(first_miss))
    start = ctx.config.moe_layers[first_miss]
    named = needed_experts(experts, ctx.config.num_experts)
    return _layers_and_head(
        ctx, state, drafted, tokens, hidden, start, resident_before, begin_next, named, late
    )


def by_layers(
    ctx: Context,
    state: DecodeState,
    drafted: Drafted,
    tokens: np.ndarray,
    resident_before: np.ndarray,
    begin_next: BeginNext | None = None,
) -> tuple[Accepted, Choices]:
    """Layer by layer from the start."""
    hidden = ctx.programs.embed(ctx.shared, tokens)
    misses_before = ctx.recorder.demand_misses
    result = _layers_and_head(ctx, state, drafted, tokens, hidden, 0, resident_before, begin_next)
    ctx.optimism.observe(ctx.recorder.demand_misses > misses_before)
    return result


def _layers_and_head(
    ctx: Context,
    state: DecodeState,
    drafted: Drafted,
    tokens: np.ndarray,
    hidden: jax.Array,
    start_layer: int,
    resident_before: np.ndarray,
    begin_next: BeginNext | None,
    named: np.ndarray | None = None,
    late: set[Key] | None = None,
) -> tuple[Accepted, Choices]:
    """Decoder layers from `start_layer` on, then head and acceptance.

    named: bool [M, E], what the layers are known to need, besides what the draft predicts.
    """
    # Past its cut-off layer, `sp-l` loads on demand.
    guesses = ctx.policy.prefetch == "draft" and not ctx.policy.use_cutoff
    guess = drafted.predicted if guesses else None
    predicted = None if guess is None else guess.predicted
    if ctx.policy.whole_layers:
        predicted = np.ones(ctx.pool.cache.slot_table.shape, bool)
    run = Pass(
        lengths=state.lengths,
        mask=state.active[:, None] & (np.arange(tokens.shape[1]) <= drafted.num_drafted[:, None]),
        group_size=ctx.pool.num_slots,
        predicted=predicted,
        counts=None if guess is None else guess.counts,
        resident_before=resident_before,
        foreseen=_foreseen(ctx, drafted, named, may_bring=guesses),
        late=set() if late is None else late,
    )
    hidden, state.kv, chosen = run_layers(ctx, state.kv, hidden, start_layer, run)
    (tokens_out, num_accepted), start = ctx.programs.accept(
        ctx.shared,
        hidden,
        tokens,
        state.lengths,
        drafted.num_drafted,
        state.active,
        drafted.probs,
        state.draws,
    )
    if begin_next is not None:
        begin_next(start)
    return (np.asarray(tokens_out), np.asarray(num_accepted)), chosen


def _foreseen(
    ctx: Context, drafted: Drafted, named: np.ndarray | None, *, may_bring: bool
) -> Foreseen | None:
    """What lets layers run together; None where nothing does."""
    if not runs_stretches(ctx):
        return None
    parts = [] if drafted.predicted is None else [drafted.predicted.predicted]
    parts += [] if named is None else [named]
    return Foreseen(np.logical_or.reduce(parts), may_bring) if parts else None


def _count_matches(ctx: Context, state: DecodeState, drafted: Drafted, chosen: Choices) -> None:
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
