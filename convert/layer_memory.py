"""Memory that worker processes write their results into, one block per MoE layer.

Sending an expert through a pipe costs the receiver more time than it takes to make one. Anonymous
shared memory is there before the workers are forked; a page costs nothing until it is written.
"""

from __future__ import annotations

import math
import mmap

import numpy as np

from convert.layers import Draft, empty_draft
from convert.plan import Plan
from specter_jax.checkpoint import WORD_DTYPE

_ALIGNMENT = 4096


class LayerMemory:
    """One MoE layer's experts and draft.

    Attributes:
        draft: the layer's draft arrays, see `convert.layers.empty_draft`.
    """

    def __init__(self, plan: Plan) -> None:
        config = plan.config
        self._dtype = WORD_DTYPE if plan.expert_format == "nested" else plan.dtype
        # A nested expert takes about half of it; one that is nearly all escapes may not fit.
        self._expert_bytes = _aligned(config.expert_elements * plan.dtype.itemsize)
        shapes = {name: (one.shape[1:], one.dtype) for name, one in empty_draft(plan, 1).items()}
        sizes = {
            name: _aligned(config.num_experts * math.prod(shape) * dtype.itemsize)
            for name, (shape, dtype) in shapes.items()
        }
        self._map = mmap.mmap(-1, config.num_experts * self._expert_bytes + sum(sizes.values()))
        self.draft: Draft = {}
        offset = config.num_experts * self._expert_bytes
        for name, (shape, dtype) in shapes.items():
            self.draft[name] = np.ndarray((config.num_experts, *shape), dtype, self._map, offset)
            offset += sizes[name]

    def put(self, expert: int, array: np.ndarray) -> np.ndarray | None:
        """Stores an expert; gives it back if it is too large to be stored."""
        if array.nbytes > self._expert_bytes:
            return array
        self.get(expert, array.size)[:] = array
        return None

    def get(self, expert: int, size: int) -> np.ndarray:
        """A view of a stored expert of `size` elements, valid until `release`."""
        return np.ndarray((size,), self._dtype, self._map, expert * self._expert_bytes)

    def release(self) -> None:
        """Gives the memory back to the system; what was stored is gone."""
        remove = getattr(mmap, "MADV_REMOVE", None)  # Linux
        if remove is not None:
            self._map.madvise(remove)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
