"""The decoding loop: draft, verify, commit, for a batch of sequences until each has ended."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np

from specter_jax.controller import DepthController, IterationTiming
from specter_jax.engine.batch import Batch
from specter_jax.engine.context import Context
from specter_jax.engine.drafting import begin_draft, draft
from specter_jax.engine.prefill import prefill
from specter_jax.engine.program_types import DraftStart
from specter_jax.engine.state import DecodeState
from specter_jax.engine.verification import begin_verification, verify

OnTokens = Callable[[int, list[int]], bool]
"""`(row, new tokens) -> whether the sequence ends here`, called in order of generation."""


def decode(ctx: Context, batch: Batch, controller: DepthController, on_tokens: OnTokens) -> None:
    """Generates until `on_tokens` ends every row or its tokens are used up.

    The recorder of `ctx` receives all counts and times.
    """
    bytes_before = ctx.pool.bytes_moved
    with ctx.recorder.timed("prefill_ms"):
        state, first = prefill(ctx, batch)
    ctx.recorder.first_token()
    ctx.recorder.prefill_bytes_host_to_device += ctx.pool.bytes_moved - bytes_before
    remaining = np.array(batch.limits)
    _hand_out(ctx, state, remaining, first[:, None], np.ones(state.batch, int), on_tokens)
    while state.active.any():
        iterate(ctx, state, remaining, controller, on_tokens)
    ctx.recorder.finish()
    ctx.recorder.bytes_host_to_device += ctx.pool.bytes_moved - bytes_before


def iterate(
    ctx: Context,
    state: DecodeState,
    remaining: np.ndarray,
    controller: DepthController,
    on_tokens: OnTokens,
) -> None:
    """One iteration: draft to the controller's depth, verify, commit. Updates `state` in place.

    remaining: int [B], tokens each row may still gain; counted down here.
    """
    clock = ctx.recorder.clock
    depth = controller.next_depth() if ctx.policy.speculative else 0
    following = controller.likely_depth() if ctx.policy.speculative else 0
    if depth == 0 and state.begun is not None:
        # Not wanted after all; what it takes is not to count as plain decoding's time.
        jax.block_until_ready(state.begun.chunk.last)
        state.begun = None
    bytes_before = ctx.pool.bytes_moved
    waited_before = ctx.recorder.wait_ms
    resident_before = ctx.pool.cache.resident
    begin = clock()
    ctx.eviction.begin_iteration()
    drafted = draft(ctx, state, depth, most=int(remaining[state.active].max()) - 1)
    drafted_at = clock()
    active = state.active
    # At least one token more than this iteration can give: the next draft will be wanted; and with
    # as many as that can give, all of it.
    left = int(remaining[active].max()) - (depth + 1)
    whole = left >= following + 1
    goes_on = following > 0 and left > 0
    begin_next = functools.partial(_begin_next, ctx, state, following, whole) if goes_on else None
    (tokens, num_accepted), chosen = verify(ctx, state, drafted, resident_before, begin_next)
    num_new = np.where(active, num_accepted + 1, 0)
    # What the draft routed stands in for the target's choices; plain decoding has only these.
    routing = None if depth else np.stack([chosen[m] for m in sorted(chosen)])[:, :, :1]
    ctx.eviction.end_iteration(num_new, routing=routing)
    end = clock()

    ctx.recorder.record_iteration(depth, drafted.num_drafted[active], num_accepted[active])
    draft_ms, verify_ms = (drafted_at - begin) * 1e3, (end - drafted_at) * 1e3
    wait_ms = ctx.recorder.wait_ms - waited_before
    ctx.recorder.draft_ms += draft_ms
    ctx.recorder.verify_ms += verify_ms
    controller.observe(
        IterationTiming(
            depth=depth,
            new_tokens=int(num_new[active].sum()),
            drafted=int(drafted.num_drafted.sum()),
            accepted=int(num_accepted[active].sum()),
            judged=int(np.minimum(num_new, drafted.num_drafted)[active].sum()),
            draft_ms=draft_ms,
            wait_ms=wait_ms,
            verify_ms=verify_ms - wait_ms,
            total_ms=(end - begin) * 1e3,
            bytes_loaded=ctx.pool.bytes_moved - bytes_before,
        )
    )
    state.commit(tokens, num_new)
    _hand_out(ctx, state, remaining, tokens, num_new, on_tokens)


def _begin_next(
    ctx: Context, state: DecodeState, depth: int, whole: bool, start: DraftStart
) -> None:
    """Dispatches what will be wanted next: the draft and, where all of that is wanted and no expert
    can be missing, its verification."""
    begin_draft(ctx, state, depth, start)
    if whole:
        begin_verification(ctx, state, depth)


def _hand_out(ctx, state, remaining, tokens, num_new, on_tokens) -> None:
    """Gives each active row's new tokens to the caller and retires rows that have ended."""
    active = state.active.copy()
    for row in np.flatnonzero(active).tolist():
        count = min(int(num_new[row]), int(remaining[row]))
        ended = on_tokens(row, tokens[row, :count].tolist())
        remaining[row] -= count
        active[row] = not ended and remaining[row] > 0
    state.active = active
