"""Drafting in chunks, with the experts it predicts fetched between them (phases 1 to 3)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from specter_jax.engine.context import Context
from specter_jax.engine.program_types import DraftChunk, DraftStart, Verified
from specter_jax.engine.slots import Key
from specter_jax.engine.state import Begun, DecodeState
from specter_jax.offload import (
    ExpertLookaheadBuffer,
    Snapshot,
    cutoff_layer,
    plan_loads,
)
from specter_jax.runtime_config import MAX_DEPTH


@dataclasses.dataclass
class Drafted:
    """What drafting leaves for verification.

    tokens: int32 [B, K], of which num_drafted count; experts: int32 [M, B, S, k], routing of the S
    positions the draft ran; probs: float32 [MAX_STEPS, B, V] on the device, None when greedy;
    predicted: the ELB at the end, None if nothing was drafted; num_drafted: int32 [B];
    verified: the verification, if it was dispatched behind the draft.
    """

    tokens: np.ndarray
    experts: np.ndarray | None
    probs: jax.Array | None
    predicted: Snapshot | None
    num_drafted: np.ndarray
    verified: Verified | None = None


def no_draft(batch: int) -> Drafted:
    """Plain decoding: nothing drafted."""
    return Drafted(np.zeros((batch, 0), np.int32), None, None, None, np.zeros(batch, np.int32))


def begin_draft(ctx: Context, state: DecodeState, depth: int, start: DraftStart) -> None:
    """Dispatches the first chunk of a draft of `depth` tokens, which `draft` then goes on with.

    Behind a verification's dispatch, with the start that it computes, the device goes from one to
    the other while the host reads what was accepted. Where an expert was missing nothing runs.
    """
    if depth:
        state.begun = _begin(ctx, state, start, depth + _covers_last(ctx))


def draft(ctx: Context, state: DecodeState, depth: int, most: int = MAX_DEPTH) -> Drafted:
    """Drafts `depth` tokens per active sequence and starts the transfers they call for.

    Where prefetch follows the draft and some expert is absent, one step more is run for its
    routing alone, so that the position after the last drafted token is predicted as well.

    most: tokens worth drafting, fewer than `depth` towards the end of the output; what is missing
        is padded, as verification at `depth` has fixed shapes. Sampling always drafts them all,
        since verification takes as many probabilities; so does what is being verified already.
    """
    begun, state.begun = state.begun, None
    if depth == 0:
        return no_draft(state.batch)
    verified = begun.verified if begun is not None and begun.depth == depth else None
    all_useful = state.draws is not None or verified is not None
    useful = depth if all_useful else max(1, min(depth, most))
    all_resident = bool(ctx.pool.cache.resident.all())
    num_steps = useful + _covers_last(ctx)
    elb = ExpertLookaheadBuffer(ctx.config.num_moe_layers, ctx.config.num_experts)
    begin, pauses = ctx.recorder.clock(), ctx.recorder.boundary_ms
    prefetcher = _Prefetcher(ctx, num_steps)
    tokens: list[np.ndarray] = []
    experts: list[np.ndarray] = []

    def take_in(chunk: DraftChunk, count: int) -> Snapshot:
        """Reads a chunk's results and acts on them."""
        tokens.extend(np.asarray(chunk.tokens)[:count])
        experts.extend(np.asarray(chunk.experts)[:count])
        elb.add(np.stack(experts[-count:], 2))
        snapshot = elb.snapshot()
        if not all_resident:
            prefetcher.boundary(snapshot, np.stack(experts, 2), len(tokens))
        return snapshot

    if begun is None:
        begun = _begin(ctx, state, ctx.programs.start(state.last, state.lengths), num_steps)
    start, chunk, probs = begun.start, begun.chunk, begun.probs
    # What was begun may have been begun for more.
    done = min(begun.count, num_steps)
    size = _chunk_tokens(ctx, num_steps)
    # A chunk is taken in while the next one is dispatched.
    with ctx.side_work() as side:
        side.start(take_in, chunk, done)
        while done < num_steps:
            count = min(size, num_steps - done)
            start = start.replace(last=chunk.last)
            chunk, probs = _dispatch(ctx, state, start, probs, done, count)
            done += count
            with ctx.recorder.timed("boundary_ms"):
                side.wait()
            side.start(take_in, chunk, count)
        with ctx.trace.span("draft", "wait", steps=num_steps):
            jax.block_until_ready(chunk.last)
        with ctx.recorder.timed("boundary_ms"):
            snapshot = side.wait()
    pauses = ctx.recorder.boundary_ms - pauses
    ctx.pace.observe(
        loads=prefetcher.worthwhile,
        steps=num_steps,
        draft_ms=(ctx.recorder.clock() - begin) * 1e3 - pauses,
    )
    return Drafted(
        tokens=np.pad(np.stack(tokens[:useful], 1), ((0, 0), (0, depth - useful))),
        experts=np.stack(experts, 2),
        probs=probs,
        predicted=snapshot,
        num_drafted=np.where(state.active, useful, 0).astype(np.int32),
        verified=verified,
    )


def _covers_last(ctx: Context) -> bool:
    """Whether a step more is run for the routing of the last drafted token."""
    return ctx.policy.prefetch == "draft" and not ctx.pool.cache.resident.all()


def _begin(ctx: Context, state: DecodeState, start: DraftStart, num_steps: int) -> Begun:
    """Dispatches the first chunk of `num_steps` steps."""
    probs = None if state.draws is None else ctx.programs.empty_probs(state.batch)
    count = _chunk_tokens(ctx, num_steps)
    chunk, probs = _dispatch(ctx, state, start, probs, 0, count)
    return Begun(start=start, chunk=chunk, count=count, probs=probs)


def _dispatch(ctx, state, start, probs, first, count) -> tuple[DraftChunk, Any]:
    """Dispatches steps first .. first + count - 1; returns the chunk and the drawn-from `probs`."""
    with ctx.trace.span("draft", "chunk", first=first):
        chunk, state.kv, probs = ctx.programs.draft(
            ctx.params,
            state.kv,
            probs,
            start,
            state.active,
            np.int32(first),
            np.int32(count),
            state.draws,
        )
    return chunk, probs


def _chunk_tokens(ctx: Context, num_steps: int) -> int:
    """Draft steps between two meetings with the host."""
    if not _covers_last(ctx):
        # Where nothing is fetched on the way, one meeting at the end is enough.
        return num_steps
    return ctx.pace.chunk(
        num_steps,
        ctx.runtime.chunk_tokens,
        in_flight=ctx.pool.max_in_flight,
        load_ms=ctx.pool.load_ms,
    )


def reachable_layers(distinct: np.ndarray, steps_ratio: float, num_slots: int) -> int:
    """How many layers, from the first, will find all their experts in slots at the same time.

    What is loaded for a layer beyond would be pushed out again by nearer layers' experts that the
    rest of the draft will name.

    distinct: int [M], experts predicted so far; steps_ratio: all draft steps over those done.
    """
    # Distinct experts grow about like tokens ** 0.6 (measured at 2 to 8 tokens on three models).
    expected = distinct * steps_ratio**0.6
    return int(np.searchsorted(np.cumsum(expected), num_slots, side="right"))


class _Prefetcher:
    """Acts at chunk boundaries: slots for what has arrived, transfers for what is predicted.

    Attributes:
        worthwhile: transfers that were started, or that the last boundary would have started had
            there been buffers.
    """

    def __init__(self, ctx: Context, num_steps: int) -> None:
        self._ctx = ctx
        self._num_steps = num_steps
        self._begin = ctx.recorder.clock()
        self._bytes_before = ctx.pool.bytes_moved
        self.worthwhile = 0

    def boundary(self, snapshot: Snapshot, routing: np.ndarray, done: int) -> None:
        """A chunk ended; the draft's `done` steps so far chose `routing`, int [M, B, done, k]."""
        ctx = self._ctx
        ctx.eviction.update_prediction(
            snapshot.predicted, coverage=done / self._num_steps, routing=routing
        )
        if ctx.policy.prefetch != "draft":
            return
        with ctx.trace.span("host", "boundary", done=done):
            pool = ctx.pool
            if done == self._num_steps and self._left_to_verification(snapshot.predicted):
                return
            arrived = pool.arrived()
            reach = reachable_layers(
                snapshot.predicted.sum(1), self._num_steps / done, pool.num_slots
            )
            admitted = self._admitted(arrived, reach, snapshot.predicted)
            pool.commit(admitted, next_layer=0)
            resident, staged = pool.cache.resident, pool.staged_mask()
            loads = plan_loads(
                snapshot.predicted,
                resident,
                staged,
                cutoff=self._cutoff(snapshot, resident | staged, done),
                counts=snapshot.counts,
            )
            # What no slot will take before verification occupies a staging buffer until then.
            # Later tokens will name more experts of the first layers, which are needed sooner.
            lasting = pool.max_in_flight * done // self._num_steps - len(arrived) + len(admitted)
            count = len(self._admitted(loads, reach, snapshot.predicted)) + max(0, lasting)
            self.worthwhile = self._started() + min(count, len(loads))
            pool.issue(loads[:count])

    def _left_to_verification(self, predicted: np.ndarray) -> bool:
        """Whether the draft is over and what is absent so little that verification, which brings
        it in before its one program, needs no help."""
        absent = plan_loads(predicted, self._ctx.pool.cache.resident)
        self.worthwhile = self._started() + len(absent)
        few = len(absent) <= self._ctx.runtime.one_dispatch_pending
        return few and not self._ctx.policy.use_cutoff

    def _started(self) -> int:
        """Transfers since the draft began."""
        pool = self._ctx.pool
        return (pool.bytes_moved - self._bytes_before) // pool.store.expert_bytes

    def _admitted(self, loads: list[Key], reach: int, predicted: np.ndarray) -> list[Key]:
        """Those of `loads` that are worth a slot already now."""
        near = [key for key in loads if key[0] < reach]
        return self._ctx.pool.cache.admit(near, next_layer=0, protect=predicted)

    def _cutoff(self, snapshot: Snapshot, present: np.ndarray, done: int) -> int | None:
        """The first layer not to prefetch, by the latency model; None without a cut-off."""
        ctx = self._ctx
        if not ctx.policy.use_cutoff:
            return None
        elapsed_ms = (ctx.recorder.clock() - self._begin) * 1e3
        return cutoff_layer(
            (snapshot.predicted & ~present).sum(1),
            load_ms=ctx.pool.load_ms,
            draft_ms=elapsed_ms / done * (self._num_steps - done),
            num_slots=ctx.pool.num_slots,
        )
