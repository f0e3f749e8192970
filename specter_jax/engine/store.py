"""The expert store: every routed expert at full precision in pinned host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding


def host_sharding(device: jax.Device) -> SingleDeviceSharding:
    """Pinned host memory of `device`: what it copies from and to at full link speed."""
    return SingleDeviceSharding(device, memory_kind="pinned_host")


def device_sharding(device: jax.Device) -> SingleDeviceSharding:
    """Memory of `device` itself."""
    return SingleDeviceSharding(device, memory_kind="device")


@dataclasses.dataclass(frozen=True)
class ExpertStore:
    """Pinned copies of all routed experts.

    experts: `experts[m][e]` is an expert of MoE layer m, in pinned memory: packed `[3 * F * H]`, or
        nested words, int32 `[W]`; all have one shape.
    """

    experts: tuple[tuple[jax.Array, ...], ...]

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.experts[0][0].dtype)

    @property
    def is_nested(self) -> bool:
        """Whether experts are words that the draft is needed to decode."""
        return self.dtype == np.int32

    @property
    def expert_bytes(self) -> int:
        return self.experts[0][0].nbytes

    @property
    def num_layers(self) -> int:
        return len(self.experts)

    @property
    def num_experts(self) -> int:
        return len(self.experts[0])

    def get(self, layer: int, expert: int) -> jax.Array:
        """The pinned expert of MoE layer `layer`."""
        return self.experts[layer][expert]


def pin_layer(experts: Sequence[np.ndarray], device: jax.Device) -> tuple[jax.Array, ...]:
    """One layer's experts in pinned memory; on the CPU these may be the given arrays themselves."""
    arrays = jax.device_put(list(experts), host_sharding(device))
    return tuple(jax.block_until_ready(arrays))
