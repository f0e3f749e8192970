"""Compares the policies with a quarter of the experts in slots: hit rate, bytes, time per token.

    python scripts/policies.py [--model DIR] [--dataset FILE.jsonl] [--limit N] [--depth K]
        [--dtype float32|bfloat16] [--expert-slots N]

Every policy decodes the same prompts with a cache that it starts itself. Prints a markdown table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.prompt_sets import (
    DEFAULT_DATASET,
    DEFAULT_MODEL,
    Case,
    load_quarter,
    percent,
    read_cases,
)
from specter_jax.cli.session import prepare_environment

if TYPE_CHECKING:
    from specter_jax.model import Model
    from specter_jax.stats import Stats


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; returns the exit code."""
    options = _parser().parse_args(arguments)
    prepare_environment()
    from specter_jax.offload import POLICIES

    model = load_quarter(
        options.model,
        expert_slots=options.expert_slots,
        dtype=options.dtype,
        max_context=options.prompt_tokens + options.max_new_tokens,
        cache_dir=options.cache_dir,
    )
    cases = read_cases(
        options.dataset, model.path, limit=options.limit, tokens=options.prompt_tokens
    )
    print(
        f"{model.config.family}, {model.runtime.num_slots} expert slots, {options.dtype}, depth "
        f"{options.depth}, {len(cases)} prompts, {options.max_new_tokens} new tokens\n"
    )
    print("| policy | hit rate | resident | prefetched | waited for | MB per token | TPOT, ms |")
    print("|---|---|---|---|---|---|---|")
    for name in options.policy or POLICIES:
        stats = measure(model, cases, name, options.depth, options.max_new_tokens)
        print(_row(name, stats), flush=True)
    return 0


def measure(model: Model, cases: list[Case], policy: str, depth: int, max_new_tokens: int) -> Stats:
    """Statistics over all prompts, one at a time, from a freshly filled cache on."""
    import specter_jax as sj

    model.use_policy(policy)
    model.reset_cache()
    prompts = [case.ids for case in cases]
    return sj.generate(
        model, prompts, max_new_tokens=max_new_tokens, depth=depth, policy=policy, batch_size=1
    ).stats


def _row(name: str, stats: Stats) -> str:
    uses = stats.resident_hits + stats.prefetch_hits + stats.demand_misses
    shares = (
        percent(count / uses)
        for count in (stats.resident_hits, stats.prefetch_hits, stats.demand_misses)
    )
    megabytes = stats.bytes_host_to_device / stats.new_tokens / 1e6
    cells = [name, percent(stats.hit_rate), *shares, f"{megabytes:.2f}", f"{stats.tpot_ms:.1f}"]
    return f"| {' | '.join(cells)} |"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--dataset", type=Path, default=DEFAULT_DATASET)
    parser.add_argument("--limit", type=int, default=24, help="prompts, evenly spread")
    parser.add_argument("--policy", nargs="+", help="default: all")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=256, help="prompts are cut to this")
    parser.add_argument("--dtype", default="float32", choices=("bfloat16", "float32"))
    parser.add_argument("--expert-slots", type=int, help="default: a quarter of the experts")
    parser.add_argument("--cache-dir", help="where a Hugging Face model's conversion is kept")
    return parser


if __name__ == "__main__":
    sys.exit(main())
