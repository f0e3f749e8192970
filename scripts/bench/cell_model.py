"""A model for `cells.py`: loading it, its link, its memory, and the floor of a time per token."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import jax

import specter_jax as sj
from scripts.bench import kernel_cases, true_size
from specter_jax.engine.store import device_sharding
from specter_jax.host_memory import allow_pinned
from specter_jax.memory import kv_bytes, workspace_bytes
from specter_jax.model import Progress
from specter_jax.parameter_sizes import num_shared_elements

GIB = 2**30


def load(
    data: Path,
    name: str,
    *,
    expert_format: str,
    budget: int,
    max_context: int,
    num_layers: int | None,
    progress: Progress,
) -> tuple[sj.Model, dict[str, Any]]:
    """The model with a budget in GiB, and what there is to say of the machine."""
    checkpoint = true_size.true_checkpoint(
        data, name, expert_format=expert_format, num_workers=num_cores(), num_layers=num_layers
    )
    # Before anything starts the GPU; nested experts take 8.6 bits of 16.
    config = checkpoint.config
    plain_bytes = 2 * config.expert_elements * config.num_moe_layers * config.num_experts
    allow_pinned(plain_bytes if expert_format == "plain" else plain_bytes * 5 // 8)
    # Before the model is there: the arrays it takes would count into the model's peak.
    copy_bytes_per_s = kernel_cases.copy_bandwidth()["copy"]
    begin = time.perf_counter()
    model = sj.load(
        checkpoint,
        gpu_memory=f"{budget}GiB",
        dtype="bfloat16",
        max_context=max_context,
        progress=progress,
    )
    checkpoint.close()
    return model, {
        "load_s": time.perf_counter() - begin,
        "copy_bytes_per_s": copy_bytes_per_s,
        "gpu": model.device.device_kind,
        "jax": jax.__version__,
        "link_bytes_per_s": link_bandwidth(model),
        "expert_bytes": model.ledger.expert_bytes,
        "draft_bytes": model.ledger.draft_bytes,
        "shared_bytes": model.ledger.shared_bytes,
    }


def num_cores() -> int:
    """Those that this process may run on: fewer than there are, where two run side by side."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_budget(model: sj.Model, budget: int, *, max_batch: int, max_context: int) -> None:
    """Slots for `budget` GiB, beside what batches and contexts need; raises BudgetError."""
    runtime = dataclasses.replace(model.runtime, max_batch=max_batch, max_context=max_context)
    sizes = {
        "batch": max_batch,
        "max_context": max_context,
        "prefill_tokens": runtime.prefill_tokens,
        "itemsize": jax.numpy.dtype(model.dtype).itemsize,
    }
    # `resize` buys slots with what the ledger's other entries leave.
    model.runtime = runtime
    model.ledger = dataclasses.replace(
        model.ledger,
        kv_bytes=kv_bytes(model.config, **sizes),
        workspace_bytes=workspace_bytes(model.config, **sizes),
    )
    model.resize(gpu_memory=f"{budget}GiB")


def link_bandwidth(model: sj.Model) -> float:
    """Bytes per second from pinned host memory to the device, of as many experts as may be on
    their way at once: with fewer, the first one's latency counts for more."""
    store, target = model.pool.store, device_sharding(model.device)
    keys = [(m, e) for m in range(store.num_layers) for e in range(store.num_experts)]
    keys = keys[: model.pool.max_in_flight]  # what the ledger has room for
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
    floor = f"floor {cell['floor_ms']['tpot_ms']:.2f}" if cell["floor_ms"] else "no floor"

    def each(total_ms: float) -> str:
        return f"{total_ms / turns:.1f}"

    return (
        f"{cell['budget_gib']} GiB {cell['expert_format']} {cell['policy']} depth {cell['depth']}"
        f" {cell['dataset']} batch {cell['batch']}: {stats.new_tokens} tokens, tpot"
        f" {stats.tpot_ms:.2f} ms ({floor}), ttft {stats.ttft_ms:.0f} ms, hit"
        f" {_percent(stats.hit_rate)}, accepted {_percent(stats.acceptance_rate)}, match"
        f" {_percent(stats.expert_match_rate)}; per iteration: draft {each(stats.draft_ms)}"
        f" (boundaries {each(stats.boundary_ms)}), verify"
        f" {each(stats.verify_ms)} (wait {each(stats.wait_ms)}) ms; {turns} iterations,"
        f" {stats.resumes} resumed, {stats.demand_misses} misses,"
        f" {stats.bytes_host_to_device / 1e9:.1f} GB, peak {stats.peak_device_bytes / GIB:.2f} GiB,"
        f" {cell['slots']} slots, warm {cell['warm_s']:.0f} s"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
