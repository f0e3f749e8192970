"""Replays recorded routing through the runtime's expert cache and counts what it has to load.

    python scripts/replay_traces.py TRACES_DIR [--policy NAME] [--depth K] [--prompts N]
                                    [--json] [--check]

A trace is an .npz file with, for `greedy_` and `sampled_` text, `target_experts` and
`draft_experts` [MoE layer, prompt, position, k] and `target_argmax` and `draft_argmax` [prompt,
output position]. An iteration verifies depth + 1 positions; as many tokens are accepted as the
two argmax agree on from the first, plus one. The draft's routing at those positions is the
prediction; behind a rejected token a trace still holds the text's own tokens, not those that the
draft would have gone on with (routing of unrelated tokens there costs about 1 % more loads).
Layers come in order; a layer's experts are all needed at once, so they cannot evict one another.
The cache stays as it is from one prompt to the next.

Three orders frame the policy's: LRU, "expected next use" (a simple online order that a new one
should beat) and Belady's optimum, which knows the whole future. Figures are loads per output
token. `--check` compares with the recorded targets and exits with 1 if one is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specter_jax.offload import ExpertCache, LruEviction, get_policy, make_eviction

DEFAULT_DEPTH = 8
NUM_EXPERTS = {"deepseek-v2-lite": 64, "qwen1.5-moe-a2.7b": 60, "phi-3.5-moe-20-layers": 16}

# Loads per token at depth 8, as published with the traces: slots -> (LRU, expected next use).
# Their LRU lets a layer's experts evict one another and therefore loads a little more.
TARGETS: dict[tuple[str, str], dict[int, tuple[float, float]]] = {
    ("deepseek-v2-lite", "greedy"): {
        312: (84.6, 51.9),
        624: (69.9, 25.8),
        775: (43.5, 17.0),
        1237: (2.9, 3.3),
    },
    ("deepseek-v2-lite", "sampled"): {
        312: (103.3, 69.6),
        624: (95.0, 43.3),
        775: (69.4, 33.0),
        1237: (11.7, 10.0),
    },
    ("qwen1.5-moe-a2.7b", "greedy"): {380: (38.4, 15.4), 760: (5.0, 4.6), 1000: (1.9, 2.2)},
    ("qwen1.5-moe-a2.7b", "sampled"): {380: (46.5, 23.3), 760: (10.4, 9.1), 1000: (4.4, 4.4)},
    ("phi-3.5-moe-20-layers", "greedy"): {30: (20.4, 17.8), 60: (20.4, 14.0), 110: (19.4, 8.9)},
    ("phi-3.5-moe-20-layers", "sampled"): {30: (27.4, 24.4), 60: (27.4, 20.2), 110: (27.1, 14.5)},
}
MAX_RATIO_TO_LRU = 1.1
ROUNDING = 0.05
"""The targets are given with one decimal."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One verification: what it used, what the draft predicted, how far it got."""

    used: np.ndarray
    """bool [M, E]"""
    routing: np.ndarray
    """int [M, 1, T, k]: the draft's choices."""
    num_tokens: int
    """Output tokens that it yielded: accepted ones and one more."""


def load_sweeps(
    path: Path, kind: str, *, depth: int, num_prompts: int | None = None
) -> tuple[list[Sweep], int]:
    """Cut a trace's text of one kind ("greedy", "sampled") into sweeps; also returns E."""
    with np.load(path) as trace:
        target = trace[f"{kind}_target_experts"]
        draft = trace[f"{kind}_draft_experts"]
        agree = trace[f"{kind}_target_argmax"] == trace[f"{kind}_draft_argmax"]
        num_prompt_tokens = int(trace["prompt_tokens"])
    num_experts = NUM_EXPERTS.get(path.stem) or int(max(target.max(), draft.max())) + 1
    layer = np.arange(len(target))[:, None, None]
    sweeps = []
    for prompt in range(len(agree) if num_prompts is None else num_prompts):
        start = 0  # output tokens so far
        while start + depth < agree.shape[1]:
            drafted = agree[prompt, start : start + depth]
            accepted = depth if drafted.all() else int(np.argmin(drafted))
            # The position before the first new token is the first that has to be computed.
            first = num_prompt_tokens + start - 1
            positions = slice(first, first + depth + 1)
            used = np.zeros((len(target), num_experts), bool)
            used[layer, target[:, prompt, positions]] = True
            routing = draft[:, None, prompt, positions]
            sweeps.append(Sweep(used=used, routing=routing, num_tokens=accepted + 1))
            start += accepted + 1
    return sweeps, num_experts


class ExpectedNextUse(LruEviction):
    """Baseline: distance to the next use, the chance per sweep being a mix of two averages."""

    ranks_absent = True

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._layer = np.arange(num_layers)[:, None]
        self._fast = np.zeros((num_layers, num_experts))
        self._slow = np.zeros((num_layers, num_experts))
        self._used = np.zeros((num_layers, num_experts), bool)

    def begin_iteration(self, predicted=None, *, coverage=1.0, routing=None) -> None:
        self._predicted = predicted
        self._used[:] = False

    def observe_layer(self, layer: int, used: np.ndarray) -> None:
        self._used[layer, used] = True

    def end_iteration(self, committed=None, *, routing=None) -> None:
        self._fast = 0.4 * self._fast + 0.6 * self._used
        self._slow = 0.96 * self._slow + 0.04 * self._used

    def loaded(self, layer: int, expert: int) -> None:
        pass

    def retention(self, next_layer: int) -> np.ndarray:
        num_layers = len(self._layer)
        chance = np.maximum(0.65 * self._fast + 0.35 * self._slow, 1e-4)
        later = num_layers - next_layer + self._layer + num_layers * (1 / chance - 1)
        soon = self._predicted & (self._layer >= next_layer)
        return -np.where(soon, self._layer - next_layer, later)


class Belady(LruEviction):
    """The optimum: evict what is used furthest in the future, which is given."""

    ranks_absent = True

    def __init__(self, sweeps: list[Sweep]) -> None:
        shape = sweeps[0].used.shape
        never = np.full(shape, len(sweeps) * 1000)
        self._next = [never]  # next sweep, from each on, that uses the expert
        for index in range(len(sweeps) - 1, -1, -1):
            self._next.append(np.where(sweeps[index].used, index, self._next[-1]))
        self._next.append(never)  # popped by the first sweep
        self._layer = np.arange(shape[0])[:, None]

    def begin_iteration(self, predicted=None, *, coverage=1.0, routing=None) -> None:
        self._next.pop()

    def observe_layer(self, layer: int, used: np.ndarray) -> None:
        pass

    def loaded(self, layer: int, expert: int) -> None:
        pass

    def retention(self, next_layer: int) -> np.ndarray:
        sweep = np.where(self._layer > next_layer, self._next[-1], self._next[-2])
        return -(sweep * len(self._layer) + self._layer)


def replay(sweeps: list[Sweep], num_slots: int, eviction) -> float:
    """Loads per output token when these sweeps run through a cache that starts empty."""
    num_layers, num_experts = sweeps[0].used.shape
    cache = ExpertCache(
        num_layers=num_layers, num_experts=num_experts, num_slots=num_slots, eviction=eviction
    )
    loads = 0
    for sweep in sweeps:
        predicted = np.zeros((num_layers, num_experts), bool)
        predicted[np.arange(num_layers)[:, None, None, None], sweep.routing] = True
        eviction.begin_iteration(predicted, coverage=1.0, routing=sweep.routing)
        for layer in range(num_layers):
            used = np.flatnonzero(sweep.used[layer])
            missing = used[~cache.resident[layer, used]]
            cache.pin(layer, used)
            loads += len(cache.reserve_many(layer, missing, next_layer=layer))
            eviction.observe_layer(layer, used)
            cache.unpin_all()
        eviction.end_iteration(np.array([sweep.num_tokens]))
    return loads / sum(sweep.num_tokens for sweep in sweeps)


def replay_row(
    path: Path, kind: str, policy: str, *, depth: int, num_prompts: int | None
) -> list[dict]:
    """Every slot count of one trace and kind of text: one result per slot count."""
    sweeps, num_experts = load_sweeps(path, kind, depth=depth, num_prompts=num_prompts)
    num_layers = len(sweeps[0].used)
    total = num_layers * num_experts
    targets = TARGETS.get((path.stem, kind), {})
    orders: dict[str, Callable] = {
        "lru": lambda: LruEviction(num_layers, num_experts),
        "expected_next_use": lambda: ExpectedNextUse(num_layers, num_experts),
        "policy": lambda: make_eviction(
            get_policy(policy), num_layers=num_layers, num_experts=num_experts
        ),
        "belady": lambda: Belady(sweeps),
    }
    uses = sum(int(s.used.sum()) for s in sweeps) / sum(s.num_tokens for s in sweeps)
    widest = max(int(s.used.sum(1).max()) for s in sweeps)  # a layer's experts must fit at once
    results = []
    for num_slots in targets or (max(widest, total // 5), 2 * total // 5, 3 * total // 4):
        row = {"trace": path.stem, "kind": kind, "num_slots": num_slots, "uses": uses}
        row |= {name: replay(sweeps, num_slots, make()) for name, make in orders.items()}
        # Targets are for the whole trace at the depth they were measured at.
        if num_slots in targets and depth == DEFAULT_DEPTH and num_prompts is None:
            lru, expected = targets[num_slots]
            row["limit"] = min(
                expected + ROUNDING, MAX_RATIO_TO_LRU * (min(lru, row["lru"]) + ROUNDING)
            )
            row["ok"] = row["policy"] <= row["limit"]
        results.append(row)
    return results


def print_table(rows: list[dict], policy: str) -> None:
    """Markdown, one line per slot count."""
    print(
        f"| trace | text | slots | uses | LRU | expected next use | {policy} | Belady "
        f"| {policy} / LRU | / expected | / Belady | target |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        ours = row["policy"]
        ratios = " | ".join(
            f"{ours / row[name]:.3f}" for name in ("lru", "expected_next_use", "belady")
        )
        state = {True: "met", False: "MISSED", None: "-"}[row.get("ok")]
        print(
            f"| {row['trace']} | {row['kind']} | {row['num_slots']} | {row['uses']:.1f} "
            f"| {row['lru']:.2f} | {row['expected_next_use']:.2f} | {ours:.2f} "
            f"| {row['belady']:.2f} | {ratios} | {state} |"
        )


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, help="folder with .npz traces")
    parser.add_argument("--policy", default="lookahead", help="whose eviction order to replay")
    parser.add_argument("--depth", type=int, default=DEFAULT_DEPTH, help="tokens drafted")
    parser.add_argument("--prompts", type=int, help="only the first N prompts of each trace")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    args = parser.parse_args(argv)
    paths = sorted(args.traces.glob("*.npz"))
    if not paths:
        parser.error(f"no .npz traces in {args.traces}")
    begin = time.perf_counter()
    rows = [
        row
        for path in paths
        for kind in ("greedy", "sampled")
        for row in replay_row(path, kind, args.policy, depth=args.depth, num_prompts=args.prompts)
    ]
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        print_table(rows, args.policy)
        print(f"\n{len(rows)} rows in {time.perf_counter() - begin:.1f} s")
    missed = [row for row in rows if row.get("ok") is False]
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
