"""The ledger of device memory: what each part takes, and how many expert slots a budget buys."""

from __future__ import annotations

import dataclasses
import math

from specter_jax.config import ModelConfig
from specter_jax.errors import BudgetError
from specter_jax.runtime_config import MAX_DEPTH, kv_capacity, prefill_bucket
from specter_jax.sizes import format_size

_RESERVE_BYTES = 320 << 20
"""Programs, library handles and allocator rounding that no array accounts for."""

_MAX_STAGING_BYTES = 400 << 20
_MIN_IN_FLIGHT, _MAX_IN_FLIGHT = 4, 48


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryLedger:
    """Bytes of device memory by purpose; `budget_bytes` is None where none was promised."""

    shared_bytes: int
    draft_bytes: int
    kv_bytes: int
    staging_bytes: int
    workspace_bytes: int
    expert_bytes: int
    num_slots: int
    max_in_flight: int
    budget_bytes: int | None = None

    @property
    def slot_bytes(self) -> int:
        return self.num_slots * self.expert_bytes

    @property
    def fixed_bytes(self) -> int:
        """All but the slots."""
        return (
            self.shared_bytes
            + self.draft_bytes
            + self.kv_bytes
            + self.staging_bytes
            + self.workspace_bytes
        )

    @property
    def total_bytes(self) -> int:
        return self.fixed_bytes + self.slot_bytes


def staging_slots(expert_bytes: int) -> int:
    """Experts in flight at once: enough to hide latency, few enough not to eat the cache."""
    return max(_MIN_IN_FLIGHT, min(_MAX_IN_FLIGHT, _MAX_STAGING_BYTES // max(1, expert_bytes)))


def workspace_bytes(
    config: ModelConfig, *, batch: int, max_context: int, prefill_tokens: int, itemsize: int
) -> int:
    """Most temporary memory of any program, from the shapes of its largest arrays.

    A prefill holds attention scores (float32, twice: before and after the softmax) and a handful
    of activations; a sampled verification holds a few float32 arrays of logits.
    """
    width = min(prefill_tokens, prefill_bucket(max_context))
    context = kv_capacity(max_context, max_context)
    scores = 2 * 4 * batch * config.num_heads * width * context
    inner = max(
        config.num_heads * (config.head_dim + config.v_head_dim),
        2 * config.dense_intermediate_size,
        2 * config.shared_intermediate_size,
        2 * config.expert_intermediate_size,
    )
    activations = batch * width * (6 * config.hidden_size + 2 * inner) * max(4, itemsize)
    logits = 6 * 4 * batch * (MAX_DEPTH + 1) * config.vocab_size
    return _RESERVE_BYTES + max(scores + activations, logits)


def kv_bytes(
    config: ModelConfig, *, batch: int, max_context: int, prefill_tokens: int, itemsize: int
) -> int:
    """KV of `batch` sequences of `max_context` tokens."""
    capacity = kv_capacity(max_context, max_context)
    return batch * capacity * config.kv_elements_per_token() * itemsize


def min_slots(config: ModelConfig) -> int:
    """Fewest slots that make sense: one token's experts of one layer."""
    return config.top_k


def plan_memory(
    *,
    config: ModelConfig,
    shared_bytes: int,
    draft_bytes: int,
    expert_bytes: int,
    itemsize: int,
    max_batch: int,
    max_context: int,
    prefill_tokens: int,
    gpu_memory: int | None = None,
    expert_slots: int | None = None,
) -> MemoryLedger:
    """Divides the device's memory.

    gpu_memory: budget in bytes, of which slots get what the rest leaves; expert_slots: slots
    outright. Neither: every expert gets a slot. itemsize: bytes of an activation.
    Raises BudgetError if the result is below one token's experts, or both are given.
    """
    sizes = {
        "batch": max_batch,
        "max_context": max_context,
        "prefill_tokens": prefill_tokens,
        "itemsize": itemsize,
    }
    in_flight = staging_slots(expert_bytes)
    ledger = MemoryLedger(
        shared_bytes=shared_bytes,
        draft_bytes=draft_bytes,
        kv_bytes=kv_bytes(config, **sizes),
        staging_bytes=in_flight * expert_bytes,
        workspace_bytes=workspace_bytes(config, **sizes),
        expert_bytes=expert_bytes,
        num_slots=0,
        max_in_flight=in_flight,
        budget_bytes=gpu_memory,
    )
    return buy_slots(config, ledger, expert_slots)


def buy_slots(
    config: ModelConfig, ledger: MemoryLedger, expert_slots: int | None = None
) -> MemoryLedger:
    """`ledger` with the slots that its budget pays for, or with `expert_slots`; see `plan_memory`.

    Raises BudgetError if that is less than one token's experts, or both are given.
    """
    if ledger.budget_bytes is not None and expert_slots is not None:
        raise BudgetError("gpu_memory and expert_slots were both given: give one of them")
    num_experts = config.num_moe_layers * config.num_experts
    if expert_slots is not None:
        slots = expert_slots
    elif ledger.budget_bytes is not None:
        slots = math.floor((ledger.budget_bytes - ledger.fixed_bytes) / ledger.expert_bytes)
    else:
        slots = num_experts
    if slots < min_slots(config):
        raise BudgetError(_too_small(ledger, min_slots(config), expert_slots))
    return dataclasses.replace(ledger, num_slots=min(slots, num_experts))


def _too_small(ledger: MemoryLedger, least: int, expert_slots: int | None) -> str:
    if expert_slots is not None:
        return f"expert_slots is {expert_slots}; one token needs {least} at least"
    needed = ledger.fixed_bytes + least * ledger.expert_bytes
    return (
        f"a budget of {format_size(ledger.budget_bytes)} is too small: this model needs at least "
        f"{format_size(needed, round_up=True)} (shared {format_size(ledger.shared_bytes)}, draft "
        f"{format_size(ledger.draft_bytes)}, kv {format_size(ledger.kv_bytes)}, staging "
        f"{format_size(ledger.staging_bytes)}, workspace {format_size(ledger.workspace_bytes)}, "
        f"{least} expert slots {format_size(least * ledger.expert_bytes)}); a smaller max_context "
        "or batch lowers it"
    )
