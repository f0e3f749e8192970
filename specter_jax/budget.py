"""What a budget of device memory buys for a checkpoint, before anything is loaded."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import numpy as np

from specter_jax.arguments import as_integer
from specter_jax.checkpoint import Checkpoint
from specter_jax.config import ModelConfig
from specter_jax.errors import BudgetError
from specter_jax.memory import MemoryLedger, buy_slots, plan_memory
from specter_jax.parameter_sizes import parameter_sizes
from specter_jax.runtime_config import RuntimeConfig

DEFAULT_MAX_CONTEXT = 4096
"""Longest prompt plus output that memory is set aside for, unless the model's context is less."""


def plan(
    checkpoint: Checkpoint,
    *,
    budget: int | None,
    expert_slots: int | None,
    dtype: str,
    max_context: int | None,
    max_batch: int,
) -> tuple[MemoryLedger, RuntimeConfig]:
    """What a budget buys, without loading anything; raises BudgetError, InvalidRequestError.

    Warns, in the name of the caller's caller, of more slots asked for than there are experts.
    """
    config = checkpoint.config
    max_batch = as_integer("max_batch", max_batch, 1)
    if expert_slots is not None:
        expert_slots = as_integer("expert_slots", expert_slots)
    if max_context is None:
        max_context = min(config.max_context, DEFAULT_MAX_CONTEXT)
    max_context = as_integer("max_context", max_context, 2, config.max_context)
    itemsize = np.dtype(jax.numpy.dtype(dtype)).itemsize
    prefill_tokens = RuntimeConfig.prefill_tokens
    sizes = parameter_sizes(checkpoint, itemsize)
    ledger = plan_memory(
        config=config,
        shared_bytes=sizes.shared_bytes,
        draft_bytes=sizes.draft_bytes,
        expert_bytes=sizes.expert_bytes,
        itemsize=itemsize,
        max_batch=max_batch,
        max_context=max_context,
        prefill_tokens=prefill_tokens,
        gpu_memory=budget,
        expert_slots=expert_slots,
    )
    _warn_of_idle_slots(ledger, expert_slots)
    runtime = RuntimeConfig(
        num_slots=ledger.num_slots,
        max_in_flight=ledger.max_in_flight,
        max_context=max_context,
        max_batch=max_batch,
        prefill_tokens=prefill_tokens,
    )
    return ledger, runtime


def slots_for(
    config: ModelConfig,
    ledger: MemoryLedger,
    *,
    budget: int | None,
    expert_slots: int | None,
) -> MemoryLedger:
    """`ledger` with the slots of another budget; raises and warns as `plan` does."""
    if expert_slots is not None:
        expert_slots = as_integer("expert_slots", expert_slots)
    ledger = dataclasses.replace(ledger, budget_bytes=budget)
    ledger = buy_slots(config, ledger, expert_slots)
    _warn_of_idle_slots(ledger, expert_slots)
    return ledger


def _warn_of_idle_slots(ledger: MemoryLedger, expert_slots: int | None) -> None:
    """Says so if there are fewer slots than were asked for, because there are no more experts."""
    if expert_slots is not None and expert_slots > ledger.num_slots:
        warnings.warn(
            f"expert_slots is {expert_slots}, but the model has {ledger.num_slots} experts: "
            f"{ledger.num_slots} slots are used",
            RuntimeWarning,
            # This, `plan` or `slots_for`, `load` or `resize`, their caller.
            stacklevel=4,
        )


def check_device(device: jax.Device, ledger: MemoryLedger) -> None:
    """Raises BudgetError before anything is loaded if the plan exceeds the device's memory."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None and ledger.total_bytes > limit:
        raise BudgetError(
            f"this needs {ledger.total_bytes / 2**30:.1f} GiB but {device.device_kind} offers "
            f"{limit / 2**30:.1f} GiB: give gpu_memory or expert_slots"
        )
