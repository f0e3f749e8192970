"""Compares speculative output with plain decoding, token for token, on a set of prompts.

    python scripts/exactness.py [--model DIR] [--dataset FILE.jsonl] [--limit N]
        [--policy NAME...] [--depth N...] [--expert-slots N] [--batch-size N]

Every prompt is decoded greedily in float32, first without speculation (depth 0), then with every
policy and depth named. Prints a line per batch and a table per policy and depth. Exit code 1 if any
output differs; the line then names the prompt and the first position that does.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.prompt_sets import (
    DEFAULT_DATASET,
    DEFAULT_MODEL,
    Case,
    batches,
    load_quarter,
    percent,
    read_cases,
)
from specter_jax.cli.session import prepare_environment
from specter_jax.controller import PLAIN_DEPTH

if TYPE_CHECKING:
    from specter_jax.model import Model
    from specter_jax.stats import Stats


def first_difference(expected: list[int], got: list[int]) -> int | None:
    """The first position where two token lists differ, None if they are equal."""
    for position, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return position
    return None if len(expected) == len(got) else min(len(expected), len(got))


def main(arguments: list[str] | None = None) -> int:
    """Runs the comparison; returns the exit code."""
    options = _parser().parse_args(arguments)
    prepare_environment()
    model = load_quarter(
        options.model,
        expert_slots=options.expert_slots,
        dtype="float32",
        max_context=options.prompt_tokens + options.max_new_tokens,
        max_batch=options.batch_size,
        cache_dir=options.cache_dir,
    )
    print(f"{model.config.family}, {model.runtime.num_slots} expert slots, float32")
    cases = read_cases(
        options.dataset, model.path, limit=options.limit, tokens=options.prompt_tokens
    )
    groups = batches(cases, options.batch_size)
    plain, _ = _decode(model, groups, options.policy[0], PLAIN_DEPTH, options.max_new_tokens, {})
    differing = 0
    for policy in options.policy:
        for depth in options.depth:
            outputs, stats = _decode(model, groups, policy, depth, options.max_new_tokens, plain)
            print(table(f"{policy}, depth {depth}", groups, plain, outputs, stats), flush=True)
            differing += sum(plain[case.name] != outputs[case.name] for case in cases)
    print(f"{differing} outputs differ" if differing else "all outputs are identical")
    return int(differing > 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--dataset", type=Path, default=DEFAULT_DATASET)
    parser.add_argument("--limit", type=int, help="prompts, evenly spread (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=256, help="prompts are cut to this")
    parser.add_argument("--policy", nargs="+", default=["lookahead"])
    parser.add_argument("--depth", nargs="+", type=int, default=[8])
    parser.add_argument("--expert-slots", type=int, help="default: a quarter of the experts")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--cache-dir", help="where a Hugging Face model's conversion is kept")
    return parser


def _decode(
    model: Model,
    groups: list[list[Case]],
    policy: str,
    depth: int,
    max_new_tokens: int,
    plain: dict[str, list[int]],
) -> tuple[dict[str, list[int]], dict[str, list[Stats]]]:
    """Tokens by prompt and each batch's statistics by task; compares with `plain` as it goes."""
    import specter_jax as sj

    outputs: dict[str, list[int]] = {}
    stats: dict[str, list[Stats]] = {}
    total = sum(len(group) for group in groups)
    begin = time.perf_counter()
    for group in groups:
        result = sj.generate(
            model,
            [case.ids for case in group],
            max_new_tokens=max_new_tokens,
            depth=depth,
            policy=policy,
        )
        stats.setdefault(group[0].task, []).append(result.stats)
        for case, tokens in zip(group, result.tokens, strict=True):
            outputs[case.name] = tokens
            position = first_difference(plain.get(case.name, tokens), tokens)
            if position is not None:
                print(f"prompt {case.name} differs from new token {position} on", flush=True)
        seconds = (time.perf_counter() - begin) / len(outputs)
        progress = f"{len(outputs)}/{total} {group[0].task} {seconds:.2f} s/prompt"
        print(f"{policy} depth {depth}: {progress}", flush=True)
    return outputs, stats


def table(
    title: str,
    groups: list[list[Case]],
    plain: dict[str, list[int]],
    outputs: dict[str, list[int]],
    stats: dict[str, list[Stats]],
) -> str:
    """Markdown: one line per task and one for all."""
    from specter_jax.stats import merge

    lines = [
        "",
        f"{title}",
        "",
        "| task | prompts | identical | tokens | acceptance | expert match | hit rate |",
        "|---|---|---|---|---|---|---|",
    ]
    everything = [one for part in stats.values() for one in part]
    for task, part in [*stats.items(), ("all", everything)]:
        names = [c.name for group in groups for c in group if task in ("all", c.task)]
        same = sum(plain[name] == outputs[name] for name in names)
        one = merge(part)
        lines.append(
            f"| {task} | {len(names)} | {same} | {one.new_tokens} | "
            f"{percent(one.acceptance_rate)} | {percent(one.expert_match_rate)} | "
            f"{percent(one.hit_rate)} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
