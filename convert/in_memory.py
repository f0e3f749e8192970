"""A model converted while it is loaded: nothing is written, one layer's experts at a time.

For sources that Python makes tensor by tensor and for models that fit the host's memory but not
its disk. It has the interface of `specter_jax.checkpoint.Checkpoint` that loading uses.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from convert.layers import Draft, convert_expert, empty_draft, shared_tree
from convert.plan import Plan, build_plan
from convert.sources import TensorSource
from specter_jax.checkpoint import GroupSizes, place
from specter_jax.config import ModelConfig


class InMemoryCheckpoint:
    """A `TensorSource` seen as a converted checkpoint.

    Args:
        source: where tensors come from; read from several threads at once.
        tokenizer_path: directory of the tokenizer's files.
        num_threads: experts converted at the same time.
        group_size: as for `convert_checkpoint`.

    Raises as `convert.plan.build_plan` does. Layers are meant to be read in order: the experts of
    one layer are held, those of the next are prepared meanwhile.
    """

    def __init__(
        self,
        source: TensorSource,
        *,
        tokenizer_path: str | Path,
        num_threads: int = 1,
        group_size: int | tuple[int, int] | None = None,
    ) -> None:
        self.path = Path(tokenizer_path)
        self._source = source
        self._plan: Plan = build_plan(source, group_size)
        self._threads = ThreadPoolExecutor(num_threads)
        self._layers: dict[int, tuple[Draft, list[Any]]] = {}

    @property
    def config(self) -> ModelConfig:
        """The model's architecture."""
        return self._plan.config

    @property
    def group_sizes(self) -> GroupSizes:
        """Weights per INT4 scale."""
        return self._plan.group_sizes

    def load_shared(self, dtype: Any, device: Any = None) -> dict[str, Any]:
        """See `Checkpoint.load_shared`."""
        trees = self._threads.map(
            lambda part: shared_tree(self._source, self._plan, self._plan.shared[part]),
            self._plan.shared,
        )
        return {
            part: jax.tree.map(lambda array: place(array, dtype, device), tree)
            for part, tree in zip(self._plan.shared, trees, strict=True)
        }

    def load_draft_layer(self, layer: int, device: Any = None) -> dict[str, jax.Array]:
        """See `Checkpoint.load_draft_layer`."""
        draft, experts = self._layer(layer)
        for expert in experts:
            expert.result()
        return jax.tree.map(lambda array: place(array, None, device), draft)

    def open_experts(self) -> _Experts:
        """See `Checkpoint.open_experts`."""
        return _Experts(self)

    def packed_expert(self, layer: int, expert: int) -> np.ndarray:
        """The packed expert `[3 * F * H]` of MoE layer `layer`."""
        return self._layer(layer)[1][expert].result()

    def _layer(self, layer: int) -> tuple[Draft, list[Any]]:
        """The layer's draft and the futures of its experts; begins the next layer's."""
        for wanted in (layer, layer + 1):
            if wanted not in self._layers and wanted < len(self._plan.experts):
                self._layers[wanted] = self._begin(wanted)
        for other in [held for held in self._layers if held not in (layer, layer + 1)]:
            del self._layers[other]
        return self._layers[layer]

    def _begin(self, layer: int) -> tuple[Draft, list[Any]]:
        draft = empty_draft(self._plan)
        names = self._plan.experts[layer]
        futures = [
            self._threads.submit(convert_expert, self._source, self._plan, names, expert, draft)
            for expert in range(self.config.num_experts)
        ]
        return draft, futures


class _Experts:
    """The expert store's interface, see `specter_jax.checkpoint.ExpertFiles`."""

    def __init__(self, checkpoint: InMemoryCheckpoint) -> None:
        self._checkpoint = checkpoint
        plan = checkpoint._plan
        self.dtype = plan.dtype
        self.expert_bytes = plan.config.expert_elements * plan.dtype.itemsize

    def get(self, layer: int, expert: int) -> np.ndarray:
        """The packed expert `[3 * F * H]`."""
        return self._checkpoint.packed_expert(layer, expert)
