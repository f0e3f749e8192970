"""Times and counts whole generations: figures 7, 10, 14, 15 and 17, by the public API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specter_jax.api import generate
from specter_jax.controller import AUTO, PLAIN_DEPTH
from specter_jax.offload import DEFAULT_POLICY, get_policy
from specter_jax.report import SMALL
from specter_jax.report.prompts import Task, long_prompt, mixed, spread, token_ids
from specter_jax.report.settings import Settings
from specter_jax.systems import System, get_system

if TYPE_CHECKING:
    from specter_jax.model import Model
    from specter_jax.stats import Stats

Progress = Callable[[str], None]
Record = dict[str, Any]

HIT_RATE_POLICIES = ("lru", "lru-s", "sp-e", "sp-l", "lookahead")
"""Of figure 17, weakest first."""
PREFILL_SYSTEMS = ("mo", "specmoeoff", "specter")
"""Of figure 10; the others' prefill is one of these."""
PREFILL_REPEATS = 3


def run(
    model: Model,
    prompts: Sequence[np.ndarray],
    new_tokens: int,
    *,
    policy: str = DEFAULT_POLICY,
    depth: int | str = AUTO,
    batch_size: int = 1,
) -> Stats:
    """Generates from a freshly filled cache on, every output of full length."""
    model.use_policy(policy)
    model.reset_cache()
    result = generate(
        model,
        prompts,
        max_new_tokens=new_tokens,
        policy=policy,
        depth=depth,
        batch_size=batch_size,
        ignore_eos=True,
    )
    return result.stats


def measure_depth(
    model: Model, name: str, tasks: Sequence[Task], settings: Settings, progress: Progress
) -> Record:
    """Figure 7: time per token at fixed depths, and at the one that `auto` chose."""
    prompts = token_ids(model.path, mixed(tasks, settings.mixed_prompts), settings.prompt_tokens)
    depths = {depth: depth for depth in (PLAIN_DEPTH, *settings.depths)} | {"auto": AUTO}
    # A first pass of `auto` tries the depths; later ones are what later requests get.
    progress(f"{name}: trying depths")
    run(model, prompts, settings.new_tokens, depth=AUTO)
    passes: dict[int | str, list[Stats]] = {label: [] for label in depths}
    for number in range(settings.passes):
        for label, depth in depths.items():
            progress(f"{name}: time at depth {label}, pass {number + 1}")
            passes[label].append(run(model, prompts, settings.new_tokens, depth=depth))
    best = {label: fastest(found) for label, found in passes.items()}
    auto = best.pop("auto")
    return {
        "model": name,
        "setting": SMALL,
        "policy": DEFAULT_POLICY,
        "budget": share_label(settings.share),
        "points": [
            {"depth": depth, "tpot_ms": stats.tpot_ms, "stats": stats.to_dict()}
            for depth, stats in best.items()
        ],
        "auto": {
            "depth": most_used(auto.depths),
            "tpot_ms": auto.tpot_ms,
            "stats": auto.to_dict(),
        },
    }


def fastest(passes: Sequence[Stats]) -> Stats:
    """The pass of least time per token: what else the machine does only adds to it."""
    return min(passes, key=lambda stats: stats.tpot_ms or 0.0)


def measure_policies(
    model: Model,
    name: str,
    share: float,
    tasks: Sequence[Task],
    settings: Settings,
    progress: Progress,
) -> list[Record]:
    """Figure 17: hit rates of every policy under one budget."""
    prompts = token_ids(model.path, mixed(tasks, settings.mixed_prompts), settings.prompt_tokens)
    records = []
    for policy in HIT_RATE_POLICIES:
        progress(f"{name}: policy {policy} at {share_label(share)}")
        depth = settings.depth if get_policy(policy).speculative else PLAIN_DEPTH
        stats = run(model, prompts, settings.new_tokens, policy=policy, depth=depth)
        records.append(
            {
                "model": name,
                "setting": SMALL,
                "policy": policy,
                "depth": depth,
                **budget_fields(model, share),
                **use_shares(stats.to_dict()),
                "stats": stats.to_dict(),
            }
        )
    return records


def measure_systems(
    model: Model,
    name: str,
    share: float,
    tasks: Sequence[Task],
    systems: Sequence[System],
    settings: Settings,
    progress: Progress,
) -> list[Record]:
    """Figure 14: time per token of every system and task under one budget."""
    for system in systems:
        progress(f"{name}: system {system.name} at {share_label(share)}")
        _settle_depth(model, system, tasks, settings)
    records = []
    for task in tasks:
        progress(f"{name}: {task.name} at {share_label(share)}")
        prompts = spread(task.prompts, settings.end_to_end_prompts)
        ids = token_ids(model.path, prompts, settings.prompt_tokens)
        passes: dict[str, list[Stats]] = {system.name: [] for system in systems}
        # Systems in turn, so that what else the machine does meets all of them.
        for _ in range(settings.passes):
            for system in systems:
                found = run(model, ids, settings.new_tokens, **system.options)
                passes[system.name].append(found)
        for system in systems:
            stats = fastest(passes[system.name])
            records.append(
                {
                    "model": name,
                    "setting": SMALL,
                    "dataset": task.name,
                    "system": system.name,
                    "batch": 1,
                    "depth": system.depth,
                    **budget_fields(model, share),
                    "tpot_ms": stats.tpot_ms,
                    "stats": stats.to_dict(),
                }
            )
    return records


def _settle_depth(model: Model, system: System, tasks: Sequence[Task], settings: Settings) -> None:
    """Lets `auto` measure the depths on other text first, as any request but the first finds it."""
    if system.depth == AUTO:
        texts = mixed(tasks, settings.mixed_prompts)
        prompts = token_ids(model.path, texts, settings.prompt_tokens)
        run(model, prompts, settings.new_tokens, **system.options)


def measure_batch(
    model: Model,
    name: str,
    batch: int,
    tasks: Sequence[Task],
    systems: Sequence[System],
    settings: Settings,
    progress: Progress,
) -> list[Record]:
    """Figure 15: time per token and throughput of `batch` different prompts decoded together."""
    texts = mixed(tasks, batch)
    if len(texts) < batch:
        return []
    prompts = token_ids(model.path, texts, settings.prompt_tokens)
    records = []
    for system in systems:
        progress(f"{name}: system {system.name} at batch {batch}")
        depth = settings.batch_depth if get_policy(system.policy).speculative else PLAIN_DEPTH
        passes = [
            run(
                model,
                prompts,
                settings.new_tokens,
                policy=system.policy,
                depth=depth,
                batch_size=batch,
            )
            for _ in range(settings.passes)
        ]
        stats = fastest(passes)
        later = stats.new_tokens - stats.sequences
        records.append(
            {
                "model": name,
                "setting": SMALL,
                "system": system.name,
                "batch": batch,
                "depth": depth,
                **budget_fields(model, settings.share),
                "tpot_ms": stats.tpot_ms,
                "tokens_per_s": later / stats.decode_ms * 1e3 if stats.decode_ms else None,
                "stats": stats.to_dict(),
            }
        )
    return records


def measure_prefill(
    model: Model, name: str, tasks: Sequence[Task], settings: Settings, progress: Progress
) -> list[Record]:
    """Figure 10: latency of the prompt's pass and memory, over prompt length.

    The median of a few, the cache being filled anew before each.
    """
    records = []
    for tokens in settings.prefill_tokens:
        if tokens >= model.runtime.max_context:
            continue
        prompt = long_prompt(model.path, tasks, tokens)
        progress(f"{name}: prefill of {tokens} tokens")
        runs = {system: [] for system in PREFILL_SYSTEMS}
        for _ in range(PREFILL_REPEATS):
            for system, found in runs.items():
                policy = get_system(system).policy
                found.append(run(model, [prompt], 1, policy=policy, depth=PLAIN_DEPTH))
        for system, found in runs.items():
            records.append(
                {
                    "model": name,
                    "setting": SMALL,
                    "system": system,
                    "tokens": tokens,
                    **budget_fields(model, settings.share),
                    "prefill_ms": float(np.median([stats.prefill_ms for stats in found])),
                    "peak_device_bytes": max(stats.peak_device_bytes for stats in found),
                }
            )
    return records


def share_label(share: float) -> str:
    """A budget that is a share of all experts, in words."""
    return f"{share:.0%} of experts"


def budget_fields(model: Model, share: float) -> Record:
    """What a budget was: in words, in slots, and planned bytes of device memory."""
    return {
        "budget": share_label(share),
        "expert_slots": model.runtime.num_slots,
        "planned_bytes": model.ledger.total_bytes,
    }


def use_shares(stats: dict[str, Any]) -> Record:
    """Shares of expert uses that were resident, prefetched in time and waited for."""
    names = {
        "resident": "resident_hits",
        "prefetched": "prefetch_hits",
        "waited": "demand_misses",
    }
    uses = sum(stats.get(field) or 0 for field in names.values())
    shares = {
        name: round(stats[field] / uses, 4) if uses else None for name, field in names.items()
    }
    return {"hit_rate": stats.get("hit_rate"), **shares}


def most_used(depths: Mapping[Any, int]) -> int | None:
    """The depth that most iterations ran at; keys may be texts, as in JSON."""
    return int(max(depths, key=lambda depth: depths[depth])) if depths else None
