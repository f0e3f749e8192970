"""Runs every program that a generation may need once, so that none compiles while it is timed.

The large programs are compiled side by side first: XLA compiles one program mostly on one core. A
program compiled from the arguments of a call is the one that the call then finds.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from specter_jax.engine.batch import Batch
from specter_jax.engine.context import Context
from specter_jax.engine.drafting import Drafted
from specter_jax.engine.layered import next_router
from specter_jax.engine.prefill import empty_kv, foreseen_of_prompt, prefill
from specter_jax.engine.program_types import MAX_STEPS
from specter_jax.engine.slots import COMMIT_SIZES
from specter_jax.engine.state import DecodeState
from specter_jax.engine.store import device_sharding
from specter_jax.engine.stretches import (
    STRETCHES,
    runs_stretches,
    stretch_arguments,
    stretch_kinds,
)
from specter_jax.engine.verification import (
    by_layers,
    one_program,
    resume,
    verify_arguments,
    verify_tokens,
)

_MAX_WORKERS = 8
Job = tuple[Any, tuple[Any, ...]]
"""A jitted function and the arguments to compile it for."""


def warm_up(
    ctx: Context, batch: Batch, depths: Sequence[int], on_depth: Callable[[int], None]
) -> None:
    """Compiles, or fetches from JAX's compilation cache, what decoding `batch` may run.

    on_depth: called with the number of depths done, from 0.
    It loads experts and books uses: give it a recorder of its own and reset the cache after it.
    """
    on_depth(0)
    _warm_commits(ctx)
    _compile_side_by_side(ctx, batch, depths)
    state, _ = prefill(ctx, batch)
    for width in sorted(set(batch.widths(ctx.runtime))):
        if not ctx.pool.cache.resident.all():
            _run_experts(ctx, state, width, prompt=True)
        _run_stretches(ctx, state, width, prompt=True)
    if any(depths):
        _draft(ctx, state)
    for done, depth in enumerate(depths, start=1):
        _run_verification(ctx, state, depth)
        on_depth(done)


def _warm_commits(ctx: Context) -> None:
    """Writes into a slot with every program there is."""
    if ctx.pool.cache.resident.all():
        return
    # What the slot held is lost, so that nothing may count as resident from here on.
    ctx.pool.reset(ctx.eviction)
    expert = jax.device_put(ctx.pool.store.get(0, 0), device_sharding(ctx.device))
    for smaller, size in itertools.pairwise((0, *COMMIT_SIZES)):
        if smaller < ctx.pool.max_in_flight:
            ctx.pool.write([0] * size, [expert] * size)


def _compile_side_by_side(ctx: Context, batch: Batch, depths: Sequence[int]) -> None:
    """Compiles what takes long, in threads; small programs are left to the run that follows."""
    state = DecodeState(
        kv=empty_kv(ctx, batch),
        lengths=np.array(batch.lengths, np.int32),
        last=np.zeros(len(batch.prompts), np.int32),
        active=np.ones(len(batch.prompts), bool),
        draws=batch.draws,
    )
    jobs: list[Job] = []
    if any(depths):
        jobs.append((ctx.programs.draft, _draft_arguments(ctx, state)))
    widths = [(width, True) for width in sorted(set(batch.widths(ctx.runtime)))]
    for depth in depths:
        drafted = _nothing_drafted(ctx, state, depth)
        tokens = verify_tokens(state, drafted)
        jobs.append((ctx.programs.verify, verify_arguments(ctx, state, drafted, tokens)))
        widths.append((tokens.shape[1], False))
    routes = [
        (ctx.programs.route, _route_arguments(ctx, state, width, m, prompt))
        for width, prompt in widths
        for m in _structures(ctx)
    ]
    with ThreadPoolExecutor(min(_MAX_WORKERS, os.cpu_count() or 1)) as pool:
        compiling = [pool.submit(_compile, job) for job in [*jobs, *routes]]
        for future in compiling[len(jobs) :]:
            future.result()
        experts = []
        for width, prompt in widths:
            for m in _structures(ctx):
                experts += _expert_jobs(ctx, state, width, m, prompt)
        for width, prompt in widths:
            experts += _stretch_jobs(ctx, state, width, prompt)
        compiling += [pool.submit(_compile, job) for job in experts]
        for future in compiling:
            future.result()


def _compile(job: Job) -> None:
    function, arguments = job
    function.lower(*arguments).compile()


def _structures(ctx: Context) -> list[int]:
    """MoE layers whose programs differ: the last one's routing predicts no next layer."""
    if ctx.policy.prefetch != "next_layer":
        return [0]
    return sorted({0, ctx.config.num_moe_layers - 1})


def _route_arguments(
    ctx: Context, state: DecodeState, num_tokens: int, m: int, prompt: bool
) -> tuple[Any, ...]:
    """Arguments of `programs.route` for MoE layer m."""
    layer = ctx.config.moe_layers[m]
    shape = (state.batch, num_tokens)
    return (
        ctx.representatives[layer],
        prompt,
        ctx.layer_params(layer),
        state.kv[layer],
        ctx.programs.embed(ctx.shared, np.zeros(shape, np.int32)),
        np.zeros(state.batch, np.int32),
        np.ones(shape, bool),
        next_router(ctx, m),
    )


def _routed(ctx: Context, state: DecodeState, num_tokens: int, m: int, prompt: bool) -> Any:
    """Runs `programs.route` for MoE layer m."""
    arguments = _route_arguments(ctx, state, num_tokens, m, prompt)
    kv = list(state.kv)
    routed, _, kv[ctx.config.moe_layers[m]] = ctx.programs.route(*arguments)
    state.kv = tuple(kv)
    return routed


def _expert_jobs(
    ctx: Context, state: DecodeState, num_tokens: int, m: int, prompt: bool
) -> list[Job]:
    """The programs of MoE layer m's routed experts that `num_tokens` tokens may need."""
    routed = _routed(ctx, state, num_tokens, m, prompt)
    jobs: list[Job] = []
    if not prompt:
        jobs.append((ctx.programs.experts, _experts_arguments(ctx, routed, m)))
    if _in_groups(ctx, prompt):
        total = ctx.programs.zeros(routed)
        jobs.append((ctx.programs.accumulate, _accumulate_arguments(ctx, routed, m, total)))
    return jobs


def _stretches(ctx: Context, num_tokens: int, prompt: bool) -> list[tuple[int, int]]:
    """(first MoE layer, length) of one stretch for each program that stretches may need."""
    if prompt:
        if foreseen_of_prompt(ctx, num_tokens) is None:
            return []
    elif ctx.pool.cache.resident.all() or not runs_stretches(ctx):
        return []
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    for length in STRETCHES:
        for m in range(ctx.config.num_moe_layers):
            kinds = stretch_kinds(ctx, m, length)
            if kinds is not None:
                found.setdefault(kinds, (m, length))
    return list(found.values())


def _stretch_jobs(ctx: Context, state: DecodeState, num_tokens: int, prompt: bool) -> list[Job]:
    """The programs of several layers at once."""
    return [
        (ctx.programs.stretch, _stretch_arguments(ctx, state, num_tokens, m, length, prompt))
        for m, length in _stretches(ctx, num_tokens, prompt)
    ]


def _stretch_arguments(
    ctx: Context, state: DecodeState, num_tokens: int, m: int, length: int, prompt: bool
) -> tuple[Any, ...]:
    shape = (state.batch, num_tokens)
    hidden = ctx.programs.embed(ctx.shared, np.zeros(shape, np.int32))
    lengths, mask = np.zeros(state.batch, np.int32), np.ones(shape, bool)
    return stretch_arguments(ctx, state.kv, hidden, m, length, lengths, mask, prompt)


def _run_stretches(ctx: Context, state: DecodeState, num_tokens: int, prompt: bool) -> None:
    """Every stretch program once, and picking a layer's state out of its outcome."""
    for m, length in _stretches(ctx, num_tokens, prompt):
        arguments = _stretch_arguments(ctx, state, num_tokens, m, length, prompt)
        out, new_kv = ctx.programs.stretch(*arguments)
        first = ctx.config.moe_layers[m]
        state.kv = (*state.kv[:first], *new_kv, *state.kv[first + length :])
        if not prompt:
            ctx.programs.hidden_at(out.entering, np.int32(0))


def _in_groups(ctx: Context, prompt: bool) -> bool:
    """Whether routed experts may have to be computed in several groups that add up."""
    return prompt or ctx.pool.num_slots < ctx.config.num_experts


def _experts_arguments(ctx: Context, routed: Any, m: int) -> tuple[Any, ...]:
    params = ctx.layer_params(ctx.config.moe_layers[m])
    return params, routed, ctx.pool.slots, ctx.pool.table()[m], ctx.decoding_draft(m)


def _accumulate_arguments(ctx: Context, routed: Any, m: int, total: Any) -> tuple[Any, ...]:
    in_group = np.ones(ctx.config.num_experts, bool)
    return routed, ctx.pool.slots, ctx.pool.table()[m], in_group, total, ctx.decoding_draft(m)


def _run_experts(ctx: Context, state: DecodeState, num_tokens: int, *, prompt: bool) -> None:
    """Every way of computing routed experts that a request may need.

    Which of them it does need depends on its routing, which the warm-up cannot know.
    """
    for m in _structures(ctx):
        routed = _routed(ctx, state, num_tokens, m, prompt)
        if not prompt:
            ctx.programs.experts(*_experts_arguments(ctx, routed, m))
        if _in_groups(ctx, prompt):
            total = ctx.programs.zeros(routed)
            total = ctx.programs.accumulate(*_accumulate_arguments(ctx, routed, m, total))
            layer = ctx.config.moe_layers[m]
            ctx.programs.close(prompt, ctx.layer_params(layer), routed, total)


def _draft_arguments(ctx: Context, state: DecodeState) -> tuple[Any, ...]:
    start = ctx.programs.start(state.last, state.lengths)
    draw = (state.active, np.int32(0), np.int32(1), state.draws)
    return ctx.params, state.kv, _probs(ctx, state), start, *draw


def _probs(ctx: Context, state: DecodeState) -> Any:
    """What sampled drafting carries along; None when greedy."""
    return None if state.draws is None else ctx.programs.empty_probs(state.batch)


def _draft(ctx: Context, state: DecodeState) -> None:
    """One draft step."""
    _, state.kv, _ = ctx.programs.draft(*_draft_arguments(ctx, state))


def _nothing_drafted(ctx: Context, state: DecodeState, depth: int) -> Drafted:
    """As if `depth` tokens had been drafted."""
    return Drafted(
        tokens=np.zeros((state.batch, depth), np.int32),
        experts=None,
        probs=_probs(ctx, state) if depth else None,
        predicted=None,
        num_drafted=np.full(state.batch, depth, np.int32),
    )


def _run_verification(ctx: Context, state: DecodeState, depth: int) -> None:
    """Both ways of verifying at `depth`, and resuming the one by the other."""
    drafted = _nothing_drafted(ctx, state, depth)
    tokens = verify_tokens(state, drafted)
    resident = ctx.pool.cache.resident
    if ctx.pool.cache.resident.all():
        nothing = ctx.programs.place(np.zeros((MAX_STEPS, state.batch), np.int32))
        start = ctx.programs.start(state.last, state.lengths)
        ctx.programs.drafted_tokens(depth, start, nothing)
    out = one_program(ctx, state, drafted, tokens)
    resume(ctx, state, drafted, tokens, out, 0, resident, np.asarray(out.experts))
    by_layers(ctx, state, drafted, tokens, resident)
    _run_stretches(ctx, state, tokens.shape[1], prompt=False)
    if _in_groups(ctx, prompt=False):
        _run_experts(ctx, state, tokens.shape[1], prompt=False)
