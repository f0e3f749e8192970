"""Several MoE layers of a verification in one program, where the host knows what they will need.

On its own a layer costs the host two programs and a meeting, about 2 ms on a GPU that computes it
in 0.3. The draft names nearly all experts of the next layers; where they are in slots, or on their
way and few, those layers run together. A layer that lacks an expert after all is found in the
outcome, its routing is right, and the next stretch begins with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from specter_jax.engine.context import Context, distinct_experts, needed_experts
from specter_jax.engine.slots import Key

STRETCHES = (8, 4, 2)
"""Lengths that programs are compiled for, in MoE layers, the longest first. A stretch repeats what
follows a missing expert, and one expert in some three layers is missing when slots are few."""

_MOST_MISSING = 28
"""Experts that a decoding stretch may lack at most. It waits for the last of them; with 56 instead,
where as many can be on their way, a token took 6 % longer on an H200."""

PROMPT_PLATFORMS = ("gpu",)
"""Where prompts run in stretches too: not where dispatching costs little beside compiling."""


@dataclasses.dataclass
class Foreseen:
    """What the layers not yet computed are expected to need: bool [M, E], changed in place.

    may_bring: whether absent experts may be fetched before routing has named them.
    """

    needed: np.ndarray
    may_bring: bool


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A stretch's valid part.

    hidden: [B, T, H], the state after it; chosen: MoE layer -> choices, int32 [B, T, k]; late:
    experts whose transfers were waited for.
    """

    hidden: jax.Array
    chosen: dict[int, np.ndarray]
    late: set[Key]


def runs_stretches(ctx: Context) -> bool:
    """Whether layers may run together: where that pays, and no policy wants to see each layer's
    routing."""
    pays = ctx.runtime.stretches
    if pays is None:
        pays = ctx.device.platform == "gpu"
    return pays and not ctx.policy.whole_layers and ctx.policy.prefetch != "next_layer"


def stretch_kinds(ctx: Context, m: int, length: int) -> tuple[int, ...] | None:
    """Representatives of MoE layers m .. m + length - 1; None if they are not consecutive."""
    moe_layers = ctx.config.moe_layers[m : m + length]
    if len(moe_layers) < length or moe_layers[-1] - moe_layers[0] != length - 1:
        return None
    return tuple(ctx.representatives[layer] for layer in moe_layers)


def stretch_length(ctx: Context, m: int, foreseen: Foreseen) -> int:
    """How many MoE layers from `m` on to run together; 1 where that does not pay."""
    pool = ctx.pool
    most = min(pool.max_in_flight, _MOST_MISSING)
    for length in STRETCHES:
        if stretch_kinds(ctx, m, length) is None:
            continue
        needed = foreseen.needed[m : m + length]
        missing = int(np.count_nonzero(needed & ~pool.cache.resident[m : m + length]))
        # All of it may be on its way together, and the next layers' experts find room too.
        fits = missing <= most and 2 * needed.sum() <= pool.num_slots
        if not missing or (fits and foreseen.may_bring):
            return length
    return 1


def run_stretch(
    ctx: Context,
    kv: list[Any],
    hidden: jax.Array,
    m: int,
    length: int,
    foreseen: Foreseen,
    lengths: jax.Array | np.ndarray,
    mask: jax.Array | np.ndarray,
    prompt: bool,
    top_up: Callable[[], None],
) -> Outcome:
    """Runs MoE layers m .. m + length - 1 as far as no expert is missing, at least one if it can.

    In a prompt everything is foreseen, so that none can be missing.

    kv: list of all layers' KV, changed in place. hidden: [B, T, H], the state before layer m.
    lengths: int32 [B]; mask: bool [B, T]; prompt: whether it is one. top_up: issues
    guesses for later layers.
    foreseen is corrected by what routing said of layers that have to run again.
    """
    pool, layers = ctx.pool, ctx.config.moe_layers[m : m + length]
    late = _bring(ctx, m, length, foreseen.needed, top_up)
    with ctx.trace.span("verification", "stretch", layer=layers[0], layers=length):
        out, new_kv = ctx.programs.stretch(
            *stretch_arguments(ctx, kv, hidden, m, length, lengths, mask, prompt)
        )
    kv[layers[0] : layers[0] + length] = new_kv
    pool.cache.unpin_all()
    # Slot writes have freed staging buffers by now.
    top_up()
    timed = ctx.recorder.timed("wait_ms") if late and not prompt else contextlib.nullcontext()
    with timed, ctx.trace.span("waits", "stretch", layer=layers[0]):
        misses, experts = np.asarray(out.misses), np.asarray(out.experts)
    done = first_missing(misses)
    if done < length:
        # Of the first layer that missed one this is exact, of those behind it nearly so.
        needed = needed_experts(experts[done:], ctx.config.num_experts)
        foreseen.needed[m + done] = needed[0]
        foreseen.needed[m + done + 1 : m + length] |= needed[1:]
        hidden = ctx.programs.hidden_at(out.entering, np.int32(done))
    else:
        hidden = out.hidden
    return Outcome(hidden, {m + i: experts[i] for i in range(done)}, late)


def first_missing(misses: np.ndarray) -> int:
    """The first of n layers that missed an expert, or n. misses: int32 [n]."""
    return int(np.argmax(misses > 0)) if misses.any() else len(misses)


def stretch_arguments(
    ctx: Context,
    kv: list[Any],
    hidden: jax.Array,
    m: int,
    length: int,
    lengths: jax.Array | np.ndarray,
    mask: jax.Array | np.ndarray,
    prompt: bool,
) -> tuple[Any, ...]:
    """What `programs.stretch` takes, from what `run_stretch` does."""
    layers = ctx.config.moe_layers[m : m + length]
    return (
        stretch_kinds(ctx, m, length),
        prompt,
        tuple(ctx.layer_params(layer) for layer in layers),
        tuple(ctx.decoding_draft(m + i) for i in range(length)),
        tuple(kv[layer] for layer in layers),
        hidden,
        ctx.pool.slots,
        ctx.pool.table()[m : m + length],
        lengths,
        mask,
    )


def _bring(
    ctx: Context, m: int, length: int, needed: np.ndarray, top_up: Callable[[], None]
) -> set[Key]:
    """Makes what the layers need resident and pins it; returns what had not arrived in time."""
    pool = ctx.pool
    missing: list[Key] = []
    for layer in range(m, m + length):
        experts = np.flatnonzero(needed[layer])
        pool.cache.pin(layer, experts)
        missing += [(layer, expert) for expert in pool.cache.absent(layer, experts)]
    arrived = set(pool.arrived()) if missing else set()
    pool.issue(missing, urgent=True)
    top_up()
    pool.commit(missing, next_layer=m)
    return {key for key in missing if key not in arrived}


def book_uses(
    ctx: Context, chosen: dict[int, np.ndarray], resident_before: np.ndarray, late: set[Key]
) -> None:
    """Books the experts that layers used, int32 [B, T, k] each: resident when the iteration began,
    prefetched, or waited for (`late`); and shows them to the eviction policy."""
    recorder = ctx.recorder
    for m, ids in chosen.items():
        used = distinct_experts(ids, ctx.config.num_experts)
        waited = sum((m, expert) in late for expert in used.tolist()) if late else 0
        here = used[resident_before[m, used]].tolist()
        resident = sum((m, expert) not in late for expert in here) if waited else len(here)
        recorder.resident_hits += resident
        recorder.demand_misses += waited
        recorder.prefetch_hits += len(used) - resident - waited
        ctx.eviction.observe_layer(m, used)
