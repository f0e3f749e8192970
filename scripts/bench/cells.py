"""One true-size model in one expert format: time per token for budgets, policies and systems.

A process of its own per model and format, started by `h200.py`, because pinned host memory is only
given back when a process ends. The model is loaded once; budgets only change its slots, smallest
first, so that the device's peak belongs to the budget it is reported with. `cell_plan.py` says in
which order things are measured and what is left out when `--limit-s` is near. Every cell is written
at once.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

sys.path.insert(0, str(Path(__file__).parents[2]))
import specter_jax as sj
from scripts.bench import bench_prompts, overlap, results_file, true_size
from scripts.bench.cell_model import GIB, floor_ms, load, set_budget, summary
from scripts.bench.cell_options import add_cell_options, with_defaults
from scripts.bench.cell_plan import Item, Stage, Timetable, affordable, compared, missing, stages
from specter_jax.controller import AUTO
from specter_jax.offload import DEFAULT_POLICY
from specter_jax.report.result_records import system_name

PROMPT_TOKENS = 64
CONTEXT = 2048
"""The small checkpoints, and so the stretched ones, go no further."""
FIRST_TOKENS = 8
"""Of the first warm-up, which tells how slow a policy is."""
TIMELINE_TOKENS = 48


class Bench:
    """Measures items on one loaded model and keeps what was measured.

    Attributes:
        results: JSON-ready, see `h200.py`; "failed" names items that ended with an error.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin = time.perf_counter()
        self.plan = stages(args)
        if args.missing:
            known = results_file.read(args.missing)
            self.plan = missing(self.plan, known, args.model, args.format)
        self.results: dict[str, Any] = {"cells": [], "prefill": [], "machine": {}, "failed": []}
        self.prompts: dict[str, list[list[int]]] = {}
        self.tokens: dict[tuple[Any, ...], tuple[dict[str, Any], list[list[int]]]] = {}

    def say(self, *words: Any) -> None:
        """Prints with the time since the start."""
        print(f"[{self.elapsed:6.1f} s]", *words, flush=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """Says where loading and compiling are, at the beginning and the end of each."""
        if done in (0, total):
            self.say(what, done, "of", total)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.begin

    def write(self) -> None:
        """Writes what there is so far: an interrupted run keeps its cells."""
        self.args.out.write_text(json.dumps(self.results, indent=1) + "\n")

    def load(self) -> sj.Model:
        """The model at the smallest budget."""
        args = self.args
        model, self.results["machine"] = load(
            args.data,
            args.model,
            expert_format=args.format,
            budget=self.plan[0].budget,
            max_context=CONTEXT,
            num_layers=args.layers,
            progress=self.progress,
        )
        self.say("loaded", self.results["machine"])
        self.prompts = bench_prompts.token_prompts(
            args.data,
            model,
            PROMPT_TOKENS,
            datasets=args.datasets,
            count=1 + max(args.prompts, *args.batches, 1),
        )
        return model

    def run(self, model: sj.Model) -> None:
        """All stages of the plan, as far as the time allows; an item's error ends only itself."""
        timetable = Timetable(self.plan, self.args.limit_s)
        for number, stage in enumerate(self.plan):
            if not any(timetable.fits(number, item, self.elapsed) for item in stage.items):
                continue
            try:
                if number or stage.max_batch > 1:
                    self.set_budget(model, stage)
            except sj.SpecterError as error:
                self.failed(stage, None, error)
                continue
            for item in stage.items:
                if not timetable.fits(number, item, self.elapsed):
                    self.say("left out:", stage.budget, "GiB", *item.about)
                    continue
                begin = self.elapsed
                try:
                    getattr(self, item.kind)(model, stage.budget, item)
                    timetable.took(item, self.elapsed - begin)
                except Exception as error:
                    self.failed(stage, item, error)

    def set_budget(self, model: sj.Model, stage: Stage) -> None:
        """Gives the model the stage's budget; batches take short contexts, which need less."""
        batches = stage.max_batch > 1
        context = PROMPT_TOKENS + self.args.batch_new_tokens if batches else CONTEXT
        set_budget(model, stage.budget, max_batch=stage.max_batch, max_context=context)

    def failed(self, stage: Stage, item: Item | None, error: Exception) -> None:
        """Notes an error; the rest is still measured."""
        what = item.about if item else ("batches up to", stage.max_batch)
        message = f"{type(error).__name__}: {str(error)[:500]}"
        self.say("failed:", stage.budget, "GiB", *what, message)
        self.results["failed"].append([stage.budget, *what, message])
        self.write()

    def cell(self, model: sj.Model, budget: int, item: Item) -> None:
        """Time per token: warm-ups on one prompt, then the others, fewer of them if it is slow."""
        args = self.args
        prompts = self.prompts[item.dataset]
        warm, prompts = prompts[:1], prompts[1:]
        new_tokens, count = args.new_tokens, args.prompts
        if item.batch > 1:
            warm = prompts = prompts[: item.batch]
            new_tokens, count = args.batch_new_tokens, 1
        common = dict(policy=item.policy, depth=item.depth, batch_size=item.batch, ignore_eos=True)
        begin = time.perf_counter()
        stats = sj.generate(model, warm, max_new_tokens=FIRST_TOKENS, **common).stats
        # Auto has tried the depths when it is measured, as any request but the first finds it.
        more = new_tokens if item.depth == AUTO else min(args.warm_tokens, new_tokens)
        more = min(more, int(args.cell_s / 2 * 1e3 / stats.tpot_ms))
        if more > FIRST_TOKENS:
            stats = sj.generate(model, warm, max_new_tokens=more, **common).stats
        warm_s = time.perf_counter() - begin
        machine = self.results["machine"]
        count, new_tokens = affordable(
            count,
            new_tokens,
            slow_prompts=args.slow_prompts,
            ttft_ms=stats.ttft_ms,
            tpot_ms=stats.tpot_ms,
            cell_s=args.cell_s,
        )
        prompts = prompts[: count if item.batch == 1 else item.batch]
        result = sj.generate(model, prompts, max_new_tokens=new_tokens, **common)
        stats = result.stats
        cell = {
            "model": args.model,
            "budget_gib": budget,
            "expert_format": args.format,
            "policy": item.policy,
            "depth": item.depth,
            "dataset": item.dataset,
            "batch": item.batch,
            "date": now(),
            "slots": model.ledger.num_slots,
            "experts": model.config.num_moe_layers * model.config.num_experts,
            "warm_s": warm_s,
            "floor_ms": floor_ms(model, stats, machine) if item.batch == 1 else None,
            "within_budget": stats.peak_device_bytes <= budget * GIB,
            "stats": stats.to_dict(),
        }
        slow = args.slow_prompts
        if item.policy == DEFAULT_POLICY and item.batch == 1 and len(prompts) > slow:
            # What a cell that takes longer is to be compared with: texts differ.
            first = sj.generate(model, prompts[:slow], max_new_tokens=new_tokens, **common).stats
            cell["first_prompts"] = {"sequences": slow, "tpot_ms": first.tpot_ms}
        self.say(summary(cell, stats))
        self.results["cells"].append(cell)
        if item.batch == 1:
            self.tokens[budget, item.policy, item.depth, item.dataset] = cell, result.tokens
        self.write()

    def exact(self, model: sj.Model, budget: int, item: Item) -> None:
        """Compares a cell's output with plain decoding at the same budget; counts what differs.

        Where plain decoding is slow, the first tokens of fewer prompts are compared.
        """
        args = self.args
        cell, tokens = self.tokens[budget, item.policy, item.depth, item.dataset]
        prompts = self.prompts[item.dataset]
        common = dict(policy=item.policy, depth=0, batch_size=1, ignore_eos=True)
        first = sj.generate(model, prompts[:1], max_new_tokens=FIRST_TOKENS, **common).stats
        count, new_tokens = affordable(
            len(tokens),
            len(tokens[0]),
            slow_prompts=args.slow_prompts,
            ttft_ms=first.ttft_ms,
            tpot_ms=first.tpot_ms,
            cell_s=args.cell_s,
        )
        prompts = prompts[1 : 1 + count]
        plain = sj.generate(model, prompts, max_new_tokens=new_tokens, **common)
        cell["plain"] = {
            "tpot_ms": plain.stats.tpot_ms,
            "new_tokens": plain.stats.new_tokens,
            **compared(plain.tokens, tokens),
        }
        self.say("plain decoding:", cell["plain"])
        self.write()

    def prefill(self, model: sj.Model, budget: int, item: Item) -> None:
        """Time to the first token of a long prompt, against moving the same bytes."""
        words = [token for prompts in self.prompts.values() for p in prompts for token in p]
        prompt = [(words * (item.tokens // len(words) + 1))[: item.tokens]]
        runs = []
        for _ in range(3):
            # What the prompt before it left in the cache would be this one's own experts.
            model.use_policy(item.policy)
            model.reset_cache()
            options = dict(max_new_tokens=1, depth=0, policy=item.policy, ignore_eos=True)
            runs.append(sj.generate(model, prompt, **options).stats)
        best = min(runs[1:], key=lambda stats: stats.ttft_ms)
        least = best.bytes_host_to_device / self.results["machine"]["link_bytes_per_s"] * 1e3
        self.results["prefill"].append(
            {
                "model": self.args.model,
                "budget_gib": budget,
                "expert_format": self.args.format,
                "date": now(),
                "prompt_tokens": item.tokens,
                "ttft_ms": best.ttft_ms,
                "bytes_host_to_device": best.bytes_host_to_device,
                "transfer_ms": least,
                "peak_device_bytes": best.peak_device_bytes,
                "system": system_name({"policy": item.policy}),
            }
        )
        self.say("prefill", self.results["prefill"][-1])
        self.write()

    def overlap(self, model: sj.Model, budget: int, item: Item) -> None:
        """A device profile: how much of the transfers' time the device computed as well."""
        prompt = self.prompts[item.dataset][:1]
        options = dict(policy=item.policy, depth=item.depth, ignore_eos=True)
        # Compiled and warm: neither is what the profile is of.
        sj.generate(model, prompt, max_new_tokens=24, **options)
        measured = overlap.measure(lambda: sj.generate(model, prompt, max_new_tokens=24, **options))
        self.results["overlap"] = measured | {
            "budget_gib": budget,
            "depth": item.depth,
            "note": "CUDA graphs are off: while XLA profiles, it runs them as single kernels",
        }
        self.say("overlap", {k: v for k, v in measured.items() if k != "kernels"})
        self.write()
        trace = sj.Trace()
        sj.generate(model, prompt, max_new_tokens=TIMELINE_TOKENS, trace=trace, **options)
        about = {"budget_gib": budget, "depth": item.depth, "expert_format": self.args.format}
        content = trace.to_dict() | {"otherData": {"model": self.args.model, **about}}
        path = self.args.out.with_suffix(".timeline.json")
        path.write_text(json.dumps(content, separators=(",", ":")))


def now() -> str:
    """UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    bench = Bench(args)
    if not bench.plan:
        bench.say("nothing is missing")
        return
    model = bench.load()
    bench.run(model)
    bench.say("done", len(bench.results["failed"]), "failed")
    bench.write()
    sys.stdout.flush()
    # Freeing tens of gigabytes of pinned memory one by one takes long; the system does it faster.
    os._exit(1 if bench.results["failed"] else 0)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", choices=true_size.MODELS, required=True)
    parser.add_argument("--format", choices=("nested", "plain"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="fewer layers, to try this script out")
    add_cell_options(parser)
    args = parser.parse_args(argv)
    args.budgets = args.budgets or list(true_size.MODELS[args.model].budgets_gib)
    return with_defaults(args)


if __name__ == "__main__":
    main()
