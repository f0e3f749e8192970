"""One true-size model in one expert format: time per token for budgets and policies.

A process of its own per model and format, started by `h200.py`, because pinned host memory is only
given back when a process ends. The model is loaded once; budgets only change its slots, smallest
first, so that the device's peak belongs to the budget it is reported with.
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
# XLA keeps at most 64 GB of pinned host memory otherwise.
os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "120")

import jax

sys.path.insert(0, str(Path(__file__).parents[2]))
import bench_prompts
import kernel_cases
import overlap
import true_size

import specter_jax as sj
from specter_jax.engine.store import device_sharding
from specter_jax.offload import get_policy
from specter_jax.parameter_sizes import num_shared_elements

GIB = 2**30
PROMPT_TOKENS = 64
CONTEXT = 2048
"""The small checkpoints, and so the stretched ones, go no further."""


class Bench:
    """Runs cells on one loaded model and keeps what was measured.

    Attributes:
        results: JSON-ready, see `h200.py`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin = time.perf_counter()
        self.results: dict[str, Any] = {"cells": [], "prefill": [], "machine": {}}
        self.prompts: dict[str, list[list[int]]] = {}

    def say(self, *words: Any) -> None:
        """Prints with the time since the start."""
        print(f"[{time.perf_counter() - self.begin:6.1f} s]", *words, flush=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """Says where loading and compiling are, at the beginning and the end of each."""
        if done in (0, 1, total):
            self.say(what, done, "of", total)

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.begin

    def out_of_time(self) -> bool:
        """Whether the time limit is near; what is left is then not measured."""
        return self.elapsed > self.args.limit_s

    def write(self) -> None:
        """Writes what there is so far: an interrupted run keeps its cells."""
        self.args.out.write_text(json.dumps(self.results, indent=1) + "\n")

    def load(self) -> sj.Model:
        """The model at the smallest budget."""
        args = self.args
        checkpoint = true_size.true_checkpoint(
            args.data,
            args.model,
            expert_format=args.format,
            num_workers=os.cpu_count() or 1,
            num_layers=args.layers,
        )
        # Before the model is there: the arrays it takes would count into the model's peak.
        copy_bytes_per_s = kernel_cases.copy_bandwidth()["copy"]
        begin = time.perf_counter()
        model = sj.load(
            checkpoint,
            gpu_memory=f"{args.budgets[0]}GiB",
            dtype="bfloat16",
            max_context=CONTEXT,
            progress=self.progress,
        )
        checkpoint.close()
        self.results["machine"] = {
            "load_s": time.perf_counter() - begin,
            "copy_bytes_per_s": copy_bytes_per_s,
            "gpu": model.device.device_kind,
            "jax": jax.__version__,
            "link_bytes_per_s": link_bandwidth(model),
            "expert_bytes": model.ledger.expert_bytes,
            "draft_bytes": model.ledger.draft_bytes,
            "shared_bytes": model.ledger.shared_bytes,
        }
        self.say("loaded", self.results["machine"])
        self.prompts = bench_prompts.token_prompts(args.data, model, PROMPT_TOKENS)
        return model

    def cell(
        self, model: sj.Model, budget: int, dataset: str, policy: str, depth: int | str
    ) -> dict[str, Any]:
        """Time per token of one policy: a warm-up on one prompt, then the others."""
        prompts = self.prompts[dataset][: 1 + self.args.prompts]
        common = dict(policy=policy, depth=depth, ignore_eos=True)
        begin = time.perf_counter()
        sj.generate(model, prompts[:1], max_new_tokens=self.args.warm_tokens, **common)
        warm_s = time.perf_counter() - begin
        result = sj.generate(
            model, prompts[1:], max_new_tokens=self.args.new_tokens, batch_size=1, **common
        )
        stats = result.stats
        cell = {
            "model": self.args.model,
            "budget_gib": budget,
            "expert_format": self.args.format,
            "policy": policy,
            "depth": depth,
            "dataset": dataset,
            "batch": 1,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "slots": model.ledger.num_slots,
            "experts": model.config.num_moe_layers * model.config.num_experts,
            "warm_s": warm_s,
            "floor_ms": floor_ms(model, stats, self.results["machine"]),
            "within_budget": stats.peak_device_bytes <= budget * GIB,
            "stats": stats.to_dict(),
            "tokens": result.tokens,
        }
        self.say(summary(cell, stats))
        self.results["cells"].append(cell)
        self.write()
        return cell

    def exactness(self, model: sj.Model, cell: dict[str, Any]) -> None:
        """Compares a cell's output with plain decoding at the same budget; counts what differs."""
        prompts = self.prompts[cell["dataset"]][1 : 1 + self.args.prompts]
        plain = sj.generate(
            model,
            prompts,
            max_new_tokens=self.args.new_tokens,
            batch_size=1,
            policy=cell["policy"],
            depth=0,
            ignore_eos=True,
        )
        same = [a == b for a, b in zip(plain.tokens, cell["tokens"], strict=True)]
        cell["plain"] = {
            "tpot_ms": plain.stats.tpot_ms,
            "identical": sum(same),
            "of": len(same),
            "first_difference": [
                next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
                for a, b in zip(plain.tokens, cell["tokens"], strict=True)
            ],
        }
        self.say("plain decoding:", cell["plain"])
        self.write()

    def prefill(self, model: sj.Model, budget: int, lengths: Sequence[int]) -> None:
        """Time to the first token of long prompts, against moving the experts once."""
        words = [token for prompts in self.prompts.values() for p in prompts for token in p]
        for length in lengths:
            prompt = [(words * (length // len(words) + 1))[:length]]
            common = dict(max_new_tokens=1, depth=0, policy="lookahead", ignore_eos=True)
            sj.generate(model, prompt, **common)
            runs = [sj.generate(model, prompt, **common).stats for _ in range(2)]
            best = min(runs, key=lambda stats: stats.ttft_ms)
            least = best.bytes_host_to_device / self.results["machine"]["link_bytes_per_s"] * 1e3
            self.results["prefill"].append(
                {
                    "model": self.args.model,
                    "budget_gib": budget,
                    "expert_format": self.args.format,
                    "prompt_tokens": length,
                    "ttft_ms": best.ttft_ms,
                    "bytes_host_to_device": best.bytes_host_to_device,
                    "transfer_ms": least,
                    "peak_device_bytes": best.peak_device_bytes,
                    "system": "specter",
                }
            )
            self.say("prefill", self.results["prefill"][-1])
            self.write()

    def overlap(self, model: sj.Model, depth: int) -> None:
        """A device profile: how much of the transfers' time the device computed as well."""
        prompt = next(iter(self.prompts.values()))[:1]
        measured = overlap.measure(
            lambda: sj.generate(model, prompt, max_new_tokens=24, depth=depth, ignore_eos=True)
        )
        self.results["overlap"] = measured
        self.say("overlap", {k: v for k, v in measured.items() if k != "kernels"})
        trace = sj.Trace()
        sj.generate(model, prompt, max_new_tokens=24, depth=depth, ignore_eos=True, trace=trace)
        trace.write(self.args.out.with_suffix(".timeline.json"))
        self.write()


def link_bandwidth(model: sj.Model) -> float:
    """Bytes per second from pinned host memory to the device, up to 16 experts at a time."""
    store, target = model.pool.store, device_sharding(model.device)
    count = min(16, model.pool.max_in_flight)  # no more than the ledger has room for
    keys = [(m, e) for m in range(2) for e in range(8)][:count]
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(jax.device_put([store.get(*key) for key in keys], target))
        best = min(best, time.perf_counter() - begin)
    return len(keys) * store.expert_bytes / best


def floor_ms(model: sj.Model, stats: sj.Stats, machine: dict[str, Any]) -> dict[str, float]:
    """The least time per token: bytes over the link, bytes out of device memory, the larger.

    A draft step reads the shared parameters (without the embedding table) and the chosen codes; a
    verification the shared parameters and every distinct expert.
    """
    config, ledger = model.config, model.ledger
    shared = 2 * (num_shared_elements(config) - config.vocab_size * config.hidden_size)
    expert_draft = ledger.draft_bytes / (config.num_moe_layers * config.num_experts)
    step = shared + config.num_moe_layers * config.top_k * expert_draft
    used = stats.resident_hits + stats.prefetch_hits + stats.demand_misses
    per_expert = ledger.expert_bytes + (expert_draft if model.pool.store.is_nested else 0)
    read = stats.drafted * step + stats.iterations * shared + used * per_expert
    moved = stats.bytes_host_to_device - stats.prefill_bytes_host_to_device
    tokens = stats.new_tokens - stats.sequences
    link = moved / machine["link_bytes_per_s"] / tokens * 1e3
    memory = read / machine["copy_bytes_per_s"] / tokens * 1e3
    return {"tpot_ms": max(link, memory), "link_ms": link, "memory_ms": memory}


def summary(cell: dict[str, Any], stats: sj.Stats) -> str:
    """One cell on one line of the log."""
    turns = stats.iterations

    def each(total_ms: float) -> str:
        return f"{total_ms / turns:.1f}"

    return (
        f"{cell['budget_gib']} GiB {cell['expert_format']} {cell['policy']} depth {cell['depth']}"
        f" {cell['dataset']}: tpot {stats.tpot_ms:.2f} ms (floor {cell['floor_ms']['tpot_ms']:.2f}"
        f"), ttft {stats.ttft_ms:.0f} ms, hit {_percent(stats.hit_rate)}, accepted"
        f" {_percent(stats.acceptance_rate)}, match {_percent(stats.expert_match_rate)}; per"
        f" iteration: draft {each(stats.draft_ms)} (boundaries {each(stats.boundary_ms)}), verify"
        f" {each(stats.verify_ms)} (wait {each(stats.wait_ms)}) ms; {turns} iterations,"
        f" {stats.resumes} resumed, {stats.demand_misses} misses,"
        f" {stats.bytes_host_to_device / 1e9:.1f} GB, peak {stats.peak_device_bytes / GIB:.2f} GiB,"
        f" {cell['slots']} slots, warm {cell['warm_s']:.0f} s"
    )


def _policies(args: argparse.Namespace, budget: int) -> list[str]:
    """All policies asked for, or only the first where `--policies-at` leaves the budget out."""
    if args.policies_at and budget not in args.policies_at:
        return args.policies[:1]
    return args.policies


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", choices=true_size.MODELS, required=True)
    parser.add_argument("--format", choices=("nested", "plain"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budgets", type=int, nargs="+", help="GiB, ascending")
    parser.add_argument("--policies", nargs="+", default=["lookahead"])
    parser.add_argument("--policies-at", type=int, nargs="+", help="GiB (default: every budget)")
    parser.add_argument("--exact-at", type=int, nargs="+", help="GiB (default: every budget)")
    parser.add_argument("--depths", nargs="+", default=["8"], help="the first for every policy")
    parser.add_argument("--datasets", nargs="+", default=["mt_bench"])
    parser.add_argument("--prompts", type=int, default=3, choices=(1, 2, 3))
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--warm-tokens", type=int, default=32)
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--layers", type=int, help="fewer layers, to try this script out")
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    args = parser.parse_args(argv)
    args.budgets = args.budgets or list(true_size.MODELS[args.model].budgets_gib)
    depths = [depth if depth == "auto" else int(depth) for depth in args.depths]
    bench = Bench(args)
    model = bench.load()
    for number, budget in enumerate(args.budgets):
        if bench.out_of_time():
            break
        if number:
            model.resize(gpu_memory=f"{budget}GiB")
        for dataset in args.datasets:
            for policy in _policies(args, budget):
                speculative = get_policy(policy).speculative
                wanted = depths if policy == "lookahead" else depths[:1]
                for depth in wanted if speculative else [0]:
                    if bench.out_of_time():
                        break
                    cell = bench.cell(model, budget, dataset, policy, depth)
                    if args.exact_at and budget not in args.exact_at:
                        continue
                    if policy == "lookahead" and depth == depths[0] and not bench.out_of_time():
                        bench.exactness(model, cell)
        if args.overlap and number == len(args.budgets) // 2 and not bench.out_of_time():
            bench.overlap(model, depths[0])
        if args.prefill and number == len(args.budgets) // 2 and not bench.out_of_time():
            bench.prefill(model, budget, args.prefill)
    bench.say("done")
    sys.stdout.flush()
    # Freeing tens of gigabytes of pinned memory one by one takes long; the system does it faster.
    os._exit(0)


if __name__ == "__main__":
    main()
