"""What a model is and what a memory budget buys, without loading any weights."""

import contextlib
import dataclasses
import os
from typing import Any

from specter_jax.checkpoint import Checkpoint, open_checkpoint
from specter_jax.errors import BudgetError
from specter_jax.memory import MemoryLedger, min_slots
from specter_jax.model import plan
from specter_jax.sizes import parse_size
from specter_jax.source import resolve_checkpoint

# Memory sizes of GPUs that are sold, GiB.
USUAL_BUDGETS_GIB = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 141, 192)
USUAL_SHARES = (0.25, 0.5, 0.75, 1.0)


def info(
    path: str | os.PathLike[str],
    *,
    gpu_memory: str | int | None = None,
    dtype: str = "bfloat16",
    max_context: int | None = None,
    max_batch: int = 1,
    cache_dir: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Describe a model and tabulate memory budgets; sizes are bytes.

    Args:
        path: a converted directory, or a Hugging Face one, which is converted first.
        gpu_memory: a budget to tabulate beside the usual ones.
        dtype, max_context, max_batch: as for `load`; they decide the sizes of shared parameters
            and KV.

    Returns:
        A JSON-ready dictionary: architecture, format and sizes of the parts, and under "budgets"
        rows of `gpu_memory_bytes`, `expert_slots` and `share` (of all experts), smallest budget
        first, from one token's experts of one layer up to all experts. `bits_per_weight` is what
        an expert takes on the link and in its slot. Where experts are nested, `escape_share_mean`
        and `escape_share_max` are the escapes of an expert as a share of its weights, and rows have
        `plain_expert_slots` and `plain_share` too: what plain experts would come to (None where
        the budget is too small for them). All of these are None otherwise.

    Raises:
        BudgetError: `gpu_memory` is too small.
        InvalidRequestError, CheckpointError, ConversionError: as for `load`.
    """
    directory = resolve_checkpoint(path, cache_dir=cache_dir)
    checkpoint = open_checkpoint(directory)
    config = checkpoint.config
    nested = checkpoint.manifest.expert_format == "nested"
    plain = dataclasses.replace(
        checkpoint,
        manifest=dataclasses.replace(checkpoint.manifest, expert_format="plain", escape_capacity=0),
    )

    def ledger_of(
        *, budget: int | None = None, slots: int | None = None, stored: Checkpoint = checkpoint
    ) -> MemoryLedger:
        return plan(
            stored,
            budget=budget,
            expert_slots=slots,
            dtype=dtype,
            max_context=max_context,
            max_batch=max_batch,
        )[0]

    everything = ledger_of()
    total_experts = everything.num_slots
    least = ledger_of(slots=min_slots(config))
    ledgers = [least, *(ledger_of(slots=s) for s in _slot_counts(total_experts, least.num_slots))]
    budgets = [(ledger.total_bytes, ledger.num_slots) for ledger in ledgers]
    for size in _usual_budgets(least.total_bytes, everything.total_bytes):
        budgets.append((size, ledger_of(budget=size).num_slots))
    if gpu_memory is not None:
        size = parse_size(gpu_memory)
        budgets.append((size, ledger_of(budget=size).num_slots))

    def row_of(size: int, slots: int) -> dict[str, Any]:
        plain_slots = None
        if nested:
            # A budget too small for plain experts is an answer here, not an error.
            with contextlib.suppress(BudgetError):
                plain_slots = ledger_of(budget=size, stored=plain).num_slots
        return {
            "gpu_memory_bytes": size,
            "expert_slots": slots,
            "share": slots / total_experts,
            "plain_expert_slots": plain_slots,
            "plain_share": None if plain_slots is None else plain_slots / total_experts,
        }

    mean_escapes, max_escapes = _escape_shares(checkpoint) if nested else (None, None)
    return {
        "path": str(directory),
        "family": config.family,
        "num_layers": config.num_layers,
        "num_moe_layers": len(config.moe_layers),
        "num_experts": config.num_experts,
        "top_k": config.top_k,
        "hidden_size": config.hidden_size,
        "expert_intermediate_size": config.expert_intermediate_size,
        "vocab_size": config.vocab_size,
        "max_context": config.max_context,
        "stored_dtype": checkpoint.manifest.dtype,
        "dtype": dtype,
        "expert_format": checkpoint.manifest.expert_format,
        "bits_per_weight": 8 * everything.expert_bytes / config.expert_elements,
        "escape_share_mean": mean_escapes,
        "escape_share_max": max_escapes,
        "shared_bytes": everything.shared_bytes,
        "draft_bytes": everything.draft_bytes,
        "kv_bytes": everything.kv_bytes,
        "staging_bytes": everything.staging_bytes,
        "workspace_bytes": everything.workspace_bytes,
        "expert_bytes": everything.expert_bytes,
        "all_experts_bytes": total_experts * everything.expert_bytes,
        "budgets": [row_of(size, slots) for size, slots in sorted(set(budgets))],
    }


def _escape_shares(checkpoint: Checkpoint) -> tuple[float, float]:
    """Escapes of a nested expert as a share of its weights: mean and most."""
    config, experts = checkpoint.config, checkpoint.open_experts()
    counts = [
        experts.num_escapes(layer, expert)
        for layer in range(config.num_moe_layers)
        for expert in range(config.num_experts)
    ]
    weights = config.expert_elements
    return sum(counts) / len(counts) / weights, max(counts) / weights


def _slot_counts(total: int, least: int) -> list[int]:
    return [slots for share in USUAL_SHARES if (slots := round(total * share)) > least]


def _usual_budgets(least_bytes: int, all_bytes: int) -> list[int]:
    """The usual sizes that hold the least, up to the first that holds everything."""
    sizes = [gib * 2**30 for gib in USUAL_BUDGETS_GIB if gib * 2**30 >= least_bytes]
    enough = next((i for i, size in enumerate(sizes) if size >= all_bytes), len(sizes))
    return sizes[: enough + 1]
