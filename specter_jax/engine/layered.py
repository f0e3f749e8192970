"""Layer by layer through the target, the host supplying each layer's experts as routing names them.

Where what the next layers need is foreseen and at hand, they run together (`stretches.py`). Else
the device runs attention and router of a layer, the host reads the choices, brings what is absent
(demanded experts first, then guesses for later layers), and enqueues the experts' computation
behind the slot writes. Used by verification when not everything predicted can be resident at once
or something was missed, and by prefill, where each layer's experts stream through the slots.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import numpy as np

from specter_jax.engine.context import Context, distinct_experts
from specter_jax.engine.slots import Key
from specter_jax.engine.stretches import Foreseen, book_uses, run_stretch, stretch_length
from specter_jax.offload import plan_loads


@dataclasses.dataclass
class Pass:
    """One pass of T positions through the target.

    lengths: int32 [B], KV entries before it; mask: bool [B, T], positions that count;
    predicted: bool [M, E] or None, what the draft's routing predicts; counts: how often, or None;
    resident_before: bool [M, E], residents when the iteration began; None in a prefill, whose uses
        are neither booked nor shown to the eviction policy (nearly every expert is used);
    group_size: most experts computed together;
    foreseen: what layers are expected to need, which lets several run together; None: each alone;
    late: experts already waited for in this sweep, added to here.
    """

    lengths: np.ndarray
    mask: np.ndarray
    group_size: int
    predicted: np.ndarray | None = None
    counts: np.ndarray | None = None
    resident_before: np.ndarray | None = None
    foreseen: Foreseen | None = None
    late: set[Key] = dataclasses.field(default_factory=set)


def run_layers(
    ctx: Context, kv: tuple[Any, ...], hidden: jax.Array, start_layer: int, run: Pass
) -> tuple[jax.Array, tuple[Any, ...], dict[int, np.ndarray]]:
    """Runs decoder layers `start_layer`.. on `hidden` [B, T, H].

    Returns the last hidden state, the KV, and per MoE layer run the choices, int32 [B, T, k].
    """
    kv = list(kv)
    chosen: dict[int, np.ndarray] = {}
    waiting = False
    prompt = run.resident_before is None
    layer = start_layer
    while layer < ctx.config.num_layers:
        kind = ctx.representatives[layer]
        params = ctx.layer_params(layer)
        if not ctx.config.is_moe(layer):
            hidden, kv[layer] = ctx.programs.dense(
                kind, prompt, params, kv[layer], hidden, run.lengths, run.mask
            )
            layer += 1
            continue
        m = ctx.config.moe_index(layer)
        length = 1 if run.foreseen is None else stretch_length(ctx, m, run.foreseen)
        if length > 1:
            ahead = _LookAhead(ctx, run, m + length - 1, None)
            passes = (run.foreseen, run.lengths, run.mask, prompt)
            stretch = run_stretch(ctx, kv, hidden, m, length, *passes, ahead.top_up)
            hidden, done = stretch.hidden, len(stretch.chosen)
            run.late.update(stretch.late)
            chosen |= stretch.chosen
            if not prompt:
                book_uses(ctx, stretch.chosen, run.resident_before, run.late)
            if done:
                _discard_passed(ctx, m + done - 1)
            layer += done
            waiting = False
            continue
        with ctx.trace.span("verification", "route", layer=layer):
            routed, on_host, kv[layer] = ctx.programs.route(
                kind,
                prompt,
                params,
                kv[layer],
                hidden,
                run.lengths,
                run.mask,
                next_router(ctx, m),
            )
        # If the layer before lacked an expert, this is mostly the wait for its transfer.
        timed = ctx.recorder.timed("wait_ms") if waiting else contextlib.nullcontext()
        with timed, ctx.trace.span("waits", "routing", layer=layer):
            experts, next_experts = (None if x is None else np.asarray(x) for x in on_host)
        chosen[m] = experts
        used = distinct_experts(experts, ctx.config.num_experts)
        ahead = _LookAhead(ctx, run, m, next_experts)
        misses_before = ctx.recorder.demand_misses
        hidden = _apply_experts(ctx, params, m, routed, used, run, ahead)
        # Slot writes have freed staging buffers by now.
        ahead.top_up()
        waiting = ctx.recorder.demand_misses > misses_before
        if run.resident_before is not None:
            ctx.eviction.observe_layer(m, used)
        layer += 1
    return hidden, tuple(kv), chosen


def next_router(ctx: Context, m: int) -> Any:
    """Parameters that predict the next MoE layer's routing from this layer's state (`sp-e`)."""
    if ctx.policy.prefetch != "next_layer" or m + 1 >= len(ctx.config.moe_layers):
        return None
    return ctx.layer_params(ctx.config.moe_layers[m + 1])


class _LookAhead:
    """Keeps the link busy with guesses for later layers while layer m is computed."""

    def __init__(self, ctx: Context, run: Pass, m: int, next_experts: np.ndarray | None) -> None:
        self._ctx = ctx
        self._start = m + 1
        self._predicted = run.predicted
        self._counts = run.counts
        if next_experts is not None:
            self._predicted = np.zeros(ctx.pool.cache.slot_table.shape, bool)
            self._predicted[m + 1, distinct_experts(next_experts, ctx.config.num_experts)] = True
            self._counts = None

    def top_up(self) -> None:
        """Issues guesses as far as staging buffers are free."""
        pool = self._ctx.pool
        if self._predicted is None or not pool.free_buffers():
            return
        keys = plan_loads(
            self._predicted,
            pool.cache.resident,
            pool.staged_mask(),
            start_layer=self._start,
            counts=self._counts,
        )
        pool.issue(keys)


def _apply_experts(
    ctx: Context,
    params: Any,
    m: int,
    routed: Any,
    used: np.ndarray,
    run: Pass,
    ahead: _LookAhead,
) -> jax.Array:
    """The routed experts of MoE layer m, together if they fit, else in groups by expert id."""
    pool = ctx.pool
    draft = ctx.decoding_draft(m)
    needed = used
    if run.resident_before is not None:
        missing = pool.cache.absent(m, used)
        _count_uses(ctx, m, used, missing, run)
        if ctx.policy.whole_layers:
            needed = np.arange(ctx.config.num_experts)
    missing = pool.cache.absent(m, needed)
    prompt = run.resident_before is None
    # All that is missing may be on its way together, and the next layer's experts find room too.
    fits = len(missing) <= pool.max_in_flight and 2 * len(needed) <= pool.num_slots
    at_once = not missing or fits or len(needed) <= min(run.group_size, pool.num_slots)
    if at_once and not prompt:
        with ctx.trace.span("verification", "experts", layer=m, experts=len(needed)):
            _bring(ctx, m, needed, missing, ahead)
            hidden = ctx.programs.experts(params, routed, pool.slots, pool.table()[m], draft)
        pool.cache.unpin(m, needed)
        _discard_passed(ctx, m)
        return hidden
    # A prompt takes this way even in one group: one program less to compile for its size.
    total = ctx.programs.zeros(routed)
    size = len(needed) if at_once else max(1, min(run.group_size, pool.num_slots))
    for start in range(0, len(needed), size):
        group = needed[start : start + size]
        absent = pool.cache.absent(m, group)
        # Guess at this layer's next group before anything of a later layer.
        following = needed[start + size : start + 2 * size].tolist()
        with ctx.trace.span("verification", "experts", layer=m, experts=len(group)):
            _bring(ctx, m, group, absent, ahead, [(m, e) for e in following])
            in_group = np.zeros(ctx.config.num_experts, bool)
            in_group[group] = True
            total = ctx.programs.accumulate(
                routed, pool.slots, pool.table()[m], in_group, total, draft
            )
        pool.cache.unpin(m, group)
    _discard_passed(ctx, m)
    return ctx.programs.close(prompt, params, routed, total)


def _bring(
    ctx: Context,
    m: int,
    needed: np.ndarray,
    missing: list[int],
    ahead: _LookAhead,
    following: list[Key] | None = None,
) -> None:
    """Makes `needed` resident and pinned; `missing` are those that are not.

    Transfers of guesses are issued here too, before the computation they overlap is enqueued.
    """
    pool = ctx.pool
    pool.cache.pin(m, needed)
    keys = [(m, e) for e in missing]
    first = keys[: pool.max_in_flight]
    pool.issue(first, urgent=True)
    if len(first) == len(keys):
        if following:
            pool.issue([key for key in following if pool.cache.slot_table[key] < 0])
        ahead.top_up()
    pool.commit(first, next_layer=m)
    pool.load(keys[len(first) :], next_layer=m)


def _discard_passed(ctx: Context, m: int) -> None:
    """Gives up arrivals for layers already computed: guesses that routing did not confirm."""
    ctx.pool.drop([key for key in ctx.pool.staged_keys() if key[0] <= m])


def _count_uses(ctx: Context, m: int, used: np.ndarray, missing: list[int], run: Pass) -> None:
    """Books each use as resident before, prefetched in time, or waited for."""
    keys = {(m, expert) for expert in missing}
    run.late.update(keys.difference(ctx.pool.arrived() if keys else ()))
    assert run.resident_before is not None
    late = sum((m, expert) in run.late for expert in used.tolist()) if run.late else 0
    here = used[run.resident_before[m, used]].tolist()
    resident = sum((m, e) not in keys and (m, e) not in run.late for e in here)
    recorder = ctx.recorder
    recorder.resident_hits += resident
    recorder.demand_misses += late
    recorder.prefetch_hits += len(used) - resident - late
