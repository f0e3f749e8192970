"""A result file with everything that `scripts/bench/h200.py` measures; times are invented."""

from itertools import product
from typing import Any

from specter_jax.offload import get_policy
from specter_jax.systems import SYSTEMS

BUDGETS = {
    "deepseek-v2-lite": (16, 24, 32),
    "qwen1.5-moe-a2.7b": (16, 24, 32),
    "phi-3.5-moe": (32, 48),
}
FORMATS = {"nested": "bbb2222", "plain": "aaa1111"}
"""And the commit that each was measured at."""
DATASETS = ("mt_bench", "human_eval")
POLICIES = ("lookahead", "sp-l", "sp-e", "lru", "lru-s")
DEPTHS = ("auto", 1, 2, 4, 16)
BATCHES = (1, 4, 8, 16, 32)
BATCH_POLICIES = ("lookahead", "specmoeoff", "sp-l", "mo")
PREFILL_SYSTEMS = ("specter", "specmoeoff", "mo")
PROMPTS = (128, 512, 2047)
DAY = "2001-02-03"

Entry = dict[str, Any]


def full_results() -> dict[str, Any]:
    """The content of `h200.json`."""
    content: dict[str, Any] = {"meta": {"date": f"{DAY}T04:05:06+00:00", "gpu": "G9"}}
    content |= {"cells": [], "prefill": [], "kernels": [], "baseline": [], "planner": []}
    for model, budgets in BUDGETS.items():
        middle = budgets[len(budgets) // 2]
        for (name, commit), budget in product(FORMATS.items(), budgets):
            place = {"model": model, "budget_gib": budget, "expert_format": name, "commit": commit}
            cells = [place | cell for cell in _cells(budget, sweeps=budget == middle)]
            content["cells"] += cells
            content["planner"] += [_predicted(cell) for cell in cells if cell["depth"] == 8]
            if budget == middle:
                content["prefill"] += [
                    place | _prefill(system, tokens, budget)
                    for system in PREFILL_SYSTEMS
                    for tokens in PROMPTS
                ]
        content["baseline"] += [_library(model, budget) for budget in budgets]
        content["prefill"] += [
            {"model": model, "budget_gib": middle} | _prefill("transformers", tokens, middle)
            for tokens in PROMPTS
        ]
        content["kernels"] += _kernels(model)
    return content


def _cells(budget: int, sweeps: bool) -> list[Entry]:
    """Cells of one model and format at one budget, each once."""
    asked = [(policy, 8, DATASETS[0], 1) for policy in POLICIES]
    for system, dataset in product(SYSTEMS.values(), DATASETS):
        asked.append((system.policy, "auto" if sweeps else 8, dataset, 1))
    asked.append(("lookahead", 8, DATASETS[1], 1))
    if sweeps:
        asked += [("lookahead", depth, DATASETS[0], 1) for depth in DEPTHS]
        asked += [(p, 8, DATASETS[0], batch) for p, batch in product(BATCH_POLICIES, BATCHES)]
    settled = [
        (policy, depth if get_policy(policy).speculative else 0, dataset, batch)
        for policy, depth, dataset, batch in asked
    ]
    return [_cell(budget, *one) for one in dict.fromkeys(settled)]


def _cell(budget: int, policy: str, depth: int | str, dataset: str, batch: int) -> Entry:
    slow = 1.0 + len(policy) / 10 + (abs(depth - 8) / 8 if isinstance(depth, int) else 0)
    time = 100.0 / budget * slow * batch**0.5
    tokens = 128 * batch
    stats = {
        "sequences": batch,
        "new_tokens": tokens,
        "tpot_ms": time,
        "decode_ms": (tokens - batch) * time / batch,
        "hit_rate": 0.75,
        "resident_hits": 40 + len(policy),
        "prefetch_hits": 30,
        "demand_misses": 20,
        "acceptance_rate": 0.9,
        "depths": {"8": 20, "4": 3},
    }
    cell = {"policy": policy, "depth": depth, "dataset": dataset, "batch": batch, "date": DAY}
    if (policy, depth, batch) == ("lookahead", 8, 1):
        cell["plain"] = {"tpot_ms": 2 * time, "identical": 3, "of": 3}
    return cell | {"stats": stats}


def _predicted(cell: Entry) -> Entry:
    names = ("model", "expert_format", "budget_gib", "policy", "depth", "dataset")
    time = cell["stats"]["tpot_ms"]
    about = {name: cell[name] for name in names}
    return about | {"predicted_tpot_ms": 1.1 * time, "measured_tpot_ms": time}


def _library(model: str, budget: int) -> Entry:
    stats = {"sequences": 1, "new_tokens": 3, "tpot_ms": 4e4 / budget, "decode_ms": 8e4 / budget}
    about = {"system": "transformers", "baseline": True, "dataset": "any", "weights": "random"}
    return (
        {"model": model, "budget_gib": budget, "batch": 1, "date": DAY} | about | {"stats": stats}
    )


def _prefill(system: str, tokens: int, budget: int) -> Entry:
    """Of the library too, whose rows say of which weights."""
    row = {
        "system": system,
        "prompt_tokens": tokens,
        "ttft_ms": 300.0 + tokens / 10 + len(system),
        "peak_device_bytes": budget * 2**30,
        "date": DAY,
    }
    return row | ({"weights": "random"} if system == "transformers" else {})


def _kernels(model: str) -> list[Entry]:
    rows = [("draft", n, None, 14.0) for n in (1, 4, 32)]
    for name, time in (("full precision", 70.0), ("INT4, decoded first", 300.0)):
        rows += [(f"draft, {name}", n, name, time) for n in (1, 32)]
    rows += [(kernel, n, None, 80.0) for kernel in ("ffn", "ffn nested") for n in (1, 9, 17, 544)]
    rows += [("ffn token-wise", 9, None, 380.0), ("ffn ragged_dot", 9, None, 370.0)]
    return [
        {"kernel": kernel, "shape": model, "num_rows": n, "us": time + n, "date": DAY}
        | ({"format": name} if name else {})
        for kernel, n, name, time in rows
    ]
