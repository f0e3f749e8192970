"""Time per token of Hugging Face transformers with accelerate's offload, at given memory budgets.

    python scripts/bench/transformers_baseline.py --data DIR --model deepseek-v2-lite
        --budgets 16 24 --out FILE.json

The model has its true size and random weights: a layer that was offloaded is moved to the GPU as a
whole each time it runs, so that neither routing nor text has any influence on the time. What goes
where is accelerate's own choice (`infer_auto_device_map`), host memory taking what the budget does
not hold. A token takes seconds where much is offloaded: a cell ends after `--cell-s`, and what was
measured by then is what counts. Writes {"baseline": [...], "prefill": [...]} as `h200.py` gathers
it. Needs PyTorch, transformers and accelerate, which Specter itself does not. Without a GPU,
`--tiny` tries it out on the CPU.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

try:
    import accelerate
    import torch
    import transformers
except ImportError as error:
    raise SystemExit(
        f"error: {error.name} is not installed; this baseline needs PyTorch, transformers and "
        "accelerate: pip install torch transformers accelerate"
    ) from None

from scripts.bench import results_file, true_size
from scripts.bench.random_weights import fill

GIB = 2**30
HEADROOM_GIB = 1.0
"""Of a budget, for activations and what else is not weights."""
LEAST_STEPS = 2
"""Tokens after the first one that a cell has in any case."""
SLOW_S = 2.0
"""A prefill longer than this is timed once: the transfers that it waits for hardly vary."""

TINY = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "vocab_size": 512,
}


class Baseline:
    """The model's weights in host memory, and a model dispatched anew for each budget.

    Attributes:
        results: JSON-ready, see the module's docstring.
        weights: made once; dispatching copies what the GPU gets and leaves them as they are.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin = time.perf_counter()
        self.results: dict[str, Any] = {"baseline": [], "prefill": []}
        self.weights: dict[str, torch.Tensor] = {}
        # So that nobody takes a trial for a measurement.
        self.name = args.model + (" (tiny)" if args.tiny else "")
        self.on_gpu = torch.cuda.is_available()
        if not self.on_gpu and not args.tiny:
            raise SystemExit("error: PyTorch sees no GPU; --tiny tries this out on the CPU")

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.begin

    def say(self, *words: Any) -> None:
        """Prints with the time since the start."""
        print(f"[{self.elapsed:6.1f} s]", *words, flush=True)

    def load(self) -> torch.nn.Module:
        """The model in host memory, bf16, random weights."""
        settings = true_size.true_config(self.args.data, self.args.model)
        if self.args.tiny:
            settings |= {name: value for name, value in TINY.items() if name in settings}
            settings.pop("layer_types", None)
        family = settings.pop("model_type")
        config = transformers.AutoConfig.for_model(family, **settings)
        with accelerate.init_empty_weights(include_buffers=False):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.tie_weights()
        fill(model, self.weights)
        model.eval()
        size = sum(p.nbytes for p in model.parameters())
        self.say(f"{type(model).__name__}, {size / GIB:.1f} GiB made")
        return model

    def place(self, model: torch.nn.Module, budget: float) -> tuple[torch.nn.Module, float]:
        """Gives the GPU what the budget holds; returns the share of bytes that it got."""
        if not self.on_gpu:
            return accelerate.cpu_offload(model, execution_device=torch.device("cpu")), 0.0
        size = sum(p.nbytes for p in model.parameters())
        memory = {0: int((budget - self.args.headroom_gib) * GIB), "cpu": 2 * size}
        device_map = accelerate.infer_auto_device_map(
            model,
            max_memory=memory,
            no_split_module_classes=sorted(model._no_split_modules or ()),
            dtype=torch.bfloat16,
        )
        kept = {
            name
            for name, _ in model.named_parameters()
            if any(
                device != "cpu" and (not module or name == module or name.startswith(module + "."))
                for module, device in device_map.items()
            )
        }
        share = sum(p.nbytes for n, p in model.named_parameters() if n in kept) / size
        skip = getattr(model, "_skip_keys_device_placement", None)
        skip = sorted(skip) if isinstance(skip, set | frozenset) else skip
        dispatched = accelerate.dispatch_model(
            model, device_map=device_map, main_device=0, skip_keys=skip
        )
        return dispatched, share

    def measure(self, budget: float) -> None:
        """One cell: a warm-up of one token, then a prompt and new tokens one by one."""
        args = self.args
        # A dispatched model cannot be taken back; the next budget starts from a new one.
        begin = self.elapsed
        model, share = self.place(self.load(), budget)
        device = torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        prompt = torch.arange(args.prompt_tokens)[None] % model.config.vocab_size
        placed_s = self.elapsed - begin
        generate(model, prompt.to(device), 1)
        ttft, steps = generate(model, prompt.to(device), args.new_tokens, args.cell_s)
        peak = torch.cuda.max_memory_allocated() if self.on_gpu else None
        stats = {
            "sequences": 1,
            "new_tokens": 1 + len(steps),
            "ttft_ms": ttft * 1e3,
            "decode_ms": sum(steps) * 1e3,
            "tpot_ms": sum(steps) / len(steps) * 1e3,
            "step_ms": [step * 1e3 for step in steps],
            "peak_device_bytes": peak,
        }
        cell = {
            "system": "transformers",
            "baseline": True,
            "model": self.name,
            "budget_gib": budget,
            "dataset": "any",
            "batch": 1,
            "date": _now(),
            "prompt_tokens": args.prompt_tokens,
            "weights": "random",
            "share_on_gpu": share,
            "within_budget": None if peak is None else peak <= budget * GIB,
            "versions": {
                module.__name__: module.__version__ for module in (torch, transformers, accelerate)
            },
            "stats": stats,
        }
        self.results["baseline"].append(cell)
        self.say(
            f"{budget:g} GiB: placed in {placed_s:.0f} s, {share:.0%} of the weights on the GPU, "
            f"{stats['new_tokens']} tokens, ttft {stats['ttft_ms']:.0f} "
            f"ms, tpot {stats['tpot_ms']:.1f} ms, peak {(peak or 0) / GIB:.2f} GiB"
        )
        self.write()
        for length in args.prefill if budget in args.prefill_at else ():
            if self.elapsed > args.limit_s:
                break
            self.prefill(model, device, budget, length)
        del model
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def prefill(
        self, model: torch.nn.Module, device: torch.device, budget: float, length: int
    ) -> None:
        """Time to the first token of a longer prompt: the better of two, or one if it is slow."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        prompt = (torch.arange(length)[None] % model.config.vocab_size).to(device)
        best = generate(model, prompt, 1)[0]
        if best < SLOW_S:
            best = min(best, generate(model, prompt, 1)[0])
        self.results["prefill"].append(
            {
                "system": "transformers",
                "model": self.name,
                "budget_gib": budget,
                "date": _now(),
                "prompt_tokens": length,
                "weights": "random",
                "ttft_ms": best * 1e3,
                "peak_device_bytes": torch.cuda.max_memory_allocated() if self.on_gpu else None,
            }
        )
        self.say("prefill", self.results["prefill"][-1])
        self.write()

    def write(self) -> None:
        """Writes what there is so far: an interrupted run keeps its cells."""
        self.args.out.write_text(json.dumps(self.results, indent=1) + "\n")


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@torch.no_grad()
def generate(
    model: torch.nn.Module, prompt: torch.Tensor, new_tokens: int, most_s: float = float("inf")
) -> tuple[float, list[float]]:
    """Greedy decoding of int64 [1, T]: seconds to the first token, and of each token after it.

    Ends before `new_tokens` once it took `most_s` seconds and has `LEAST_STEPS` further tokens.
    """
    times = [time.perf_counter()]
    for _ in itertools.islice(_tokens(model, prompt), new_tokens):
        times.append(time.perf_counter())
        if times[-1] - times[0] > most_s and len(times) >= 2 + LEAST_STEPS:
            break
    seconds = [end - start for start, end in itertools.pairwise(times)]
    return seconds[0], seconds[1:]


def _tokens(model: torch.nn.Module, prompt: torch.Tensor) -> Iterator[int]:
    """New tokens, each when the host knows it."""
    cache, tokens = None, prompt
    while True:
        out = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        tokens = out.logits[:, -1].argmax(-1, keepdim=True).to(prompt.device)
        yield int(tokens)


def missing(
    budgets: Sequence[float], known: Mapping[str, Any], args: argparse.Namespace
) -> list[float]:
    """Budgets of which the result file lacks the cell, or a longer prompt that is wanted there."""

    def of_model(section: str) -> list[Mapping[str, Any]]:
        entries = known.get(section) or []
        return [e for e in entries if (e["model"], e.get("system")) == (args.model, "transformers")]

    cells = {entry["budget_gib"] for entry in of_model("baseline")}
    prompts = {(entry["budget_gib"], entry["prompt_tokens"]) for entry in of_model("prefill")}
    wanted = {(at, length) for at in args.prefill_at for length in args.prefill}
    lacking = {at for at, length in wanted - prompts}
    return [budget for budget in budgets if budget not in cells or budget in lacking]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", choices=true_size.MODELS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budgets", type=float, nargs="+", help="GiB (default: the model's)")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=6, help="the first included")
    parser.add_argument("--prefill", type=int, nargs="*", default=[], help="longer prompts")
    parser.add_argument("--prefill-at", type=float, nargs="+", help="GiB (default: middle budget)")
    parser.add_argument("--cell-s", type=float, default=8.0, help="seconds that a cell may take")
    parser.add_argument("--headroom-gib", type=float, default=HEADROOM_GIB)
    parser.add_argument("--limit-s", type=float, default=float("inf"))
    parser.add_argument("--missing", type=Path, help="leave out budgets this result file has")
    parser.add_argument("--tiny", action="store_true", help="a few small layers; no figures")
    args = parser.parse_args(argv)
    if args.new_tokens < 2:
        parser.error("--new-tokens must be at least 2")
    budgets = sorted(args.budgets or true_size.MODELS[args.model].budgets_gib)
    args.prefill_at = args.prefill_at or [budgets[len(budgets) // 2]]
    if args.missing:
        budgets = missing(budgets, results_file.read(args.missing), args)
        if not budgets:
            print("nothing is missing", flush=True)
            return
    baseline = Baseline(args)
    for budget in budgets:
        if baseline.elapsed > args.limit_s:
            baseline.say(f"{budget:g} GiB left out: no time")
            continue
        baseline.measure(int(budget) if budget == int(budget) else budget)
    baseline.say("done")


if __name__ == "__main__":
    main()
