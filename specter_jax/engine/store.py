"""The expert store: every routed expert at full precision in pinned host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

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

    experts: `experts[m][e]` is the packed expert `[3 * F * H]` of MoE layer m, in pinned memory.
    expert_bytes: size of one of them.
    dtype: their element type.
    """

    experts: tuple[tuple[jax.Array, ...], ...]
    expert_bytes: int
    dtype: np.dtype

    @property
    def num_layers(self) -> int:
        return len(self.experts)

    @property
    def num_experts(self) -> int:
        return len(self.experts[0])

    @property
    def num_bytes(self) -> int:
        return self.num_layers * self.num_experts * self.expert_bytes

    def get(self, layer: int, expert: int) -> jax.Array:
        """The pinned packed expert of MoE layer `layer`."""
        return self.experts[layer][expert]


def load_store(
    read: Callable[[int, int], np.ndarray],
    num_layers: int,
    num_experts: int,
    device: jax.Device,
    on_layer: Callable[[int], None] | None = None,
) -> ExpertStore:
    """Copies every expert into pinned memory, layer by layer.

    read: `read(m, e) -> [3 * F * H]`, a (memory-mapped) array of MoE layer m's expert e.
    on_layer: called with the number of layers done, for progress.
    """
    pinned = host_sharding(device)
    layers = []
    for m in range(num_layers):
        arrays = jax.device_put([read(m, e) for e in range(num_experts)], pinned)
        jax.block_until_ready(arrays)
        layers.append(tuple(arrays))
        if on_layer is not None:
            on_layer(m + 1)
    first = layers[0][0]
    return ExpertStore(tuple(layers), first.nbytes, np.dtype(first.dtype))
