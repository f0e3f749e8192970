"""What every phase of an iteration shares: the model on the device, slots, policy, books."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from specter_jax.config import ModelConfig, layer_name
from specter_jax.engine.pace import Pace
from specter_jax.engine.programs import Programs
from specter_jax.engine.side_work import SideWork
from specter_jax.engine.slots import SlotPool
from specter_jax.offload import EvictionPolicy, PolicySpec
from specter_jax.runtime_config import RuntimeConfig
from specter_jax.stats import StatsRecorder
from specter_jax.trace import Tracer


@dataclasses.dataclass
class Optimism:
    """Whether to verify in one program although nothing predicts the experts.

    One program costs one meeting with the host, layer by layer one each; after a miss the rest is
    done layer by layer anyway. So: one program while misses are the exception.
    """

    miss_rate: float = 1.0

    def observe(self, missed: bool) -> None:
        """Takes in whether a sweep lacked an expert."""
        self.miss_rate += 0.2 * (missed - self.miss_rate)

    @property
    def expects_none(self) -> bool:
        """Whether the next sweep is likely to find everything resident."""
        return self.miss_rate < 0.5


@dataclasses.dataclass
class Context:
    """One generation's surroundings.

    params: {"shared": tree, "draft": tree}, on the device; recorder and trace are this
    generation's, the rest outlives it. side_work: makes what runs host work beside the draft.
    """

    config: ModelConfig
    params: dict[str, Any]
    programs: Programs
    runtime: RuntimeConfig
    pool: SlotPool
    eviction: EvictionPolicy
    policy: PolicySpec
    recorder: StatsRecorder
    trace: Tracer
    optimism: Optimism
    pace: Pace
    device: jax.Device
    side_work: Callable[[], SideWork] = SideWork

    @property
    def shared(self) -> dict[str, Any]:
        return self.params["shared"]

    @functools.cached_property
    def representatives(self) -> tuple[int, ...]:
        """See `ModelConfig.representatives`: layers that share a program."""
        return self.config.representatives

    def layer_params(self, layer: int) -> dict[str, Any]:
        """Shared parameters of decoder layer `layer`."""
        return self.shared[layer_name(layer)]

    def decoding_draft(self, m: int) -> dict[str, Any] | None:
        """What the slots' experts of MoE layer `m` are decoded with; None where they are plain."""
        if not self.pool.store.is_nested:
            return None
        return self.params["draft"][layer_name(self.config.moe_layers[m])]


def distinct_experts(chosen: np.ndarray, num_experts: int) -> np.ndarray:
    """Sorted distinct expert ids among `chosen` (any shape), the masked tokens' id left out."""
    counts = np.bincount(chosen.ravel(), minlength=num_experts + 1)
    return np.flatnonzero(counts[:num_experts])


def needed_experts(chosen: np.ndarray, num_experts: int) -> np.ndarray:
    """bool [M, E]: the experts among `chosen`, int [M, ...], the masked tokens' id left out."""
    flat = chosen.reshape(len(chosen), -1)
    needed = np.zeros((len(chosen), num_experts + 1), bool)
    needed[np.arange(len(chosen))[:, None], flat] = True
    return needed[:, :num_experts]
