"""A model converted while it is loaded: nothing is written, one layer's experts at a time.

For sources that Python makes tensor by tensor and for models that fit the host's memory but not
its disk. It has the interface of `specter_jax.checkpoint.Checkpoint` that loading uses.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
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
        num_workers: experts converted at the same time.
        processes: workers are forked processes, not threads. Worth it for sources that compute in
            Python; make the checkpoint before anything starts the GPU then.
        group_size: as for `convert_checkpoint`.

    Raises as `convert.plan.build_plan` does. Layers are meant to be read in order: the experts of
    one layer are held, those of the next are prepared meanwhile.
    """

    def __init__(
        self,
        source: TensorSource,
        *,
        tokenizer_path: str | Path,
        num_workers: int = 1,
        processes: bool = False,
        group_size: int | tuple[int, int] | None = None,
    ) -> None:
        self.path = Path(tokenizer_path)
        self._source = source
        self._plan: Plan = build_plan(source, group_size)
        self._workers = _Workers(_Work(source, self._plan), num_workers, processes)
        self._layers: dict[int, list[Future]] = {}

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
        trees = [self._workers.submit("shared", part) for part in self._plan.shared]
        return {
            part: jax.tree.map(lambda array: place(array, dtype, device), tree.result())
            for part, tree in zip(self._plan.shared, trees, strict=True)
        }

    def load_draft_layer(self, layer: int, device: Any = None) -> dict[str, jax.Array]:
        """See `Checkpoint.load_draft_layer`."""
        draft = empty_draft(self._plan)
        for expert, future in enumerate(self._layer(layer)):
            for name, array in future.result()[1].items():
                draft[name][expert] = array
        return jax.tree.map(lambda array: place(array, None, device), draft)

    def open_experts(self) -> _Experts:
        """See `Checkpoint.open_experts`."""
        return _Experts(self)

    def close(self) -> None:
        """Ends the workers; call it when everything is loaded."""
        self._layers.clear()
        self._workers.close()

    def packed_expert(self, layer: int, expert: int) -> np.ndarray:
        """The packed expert `[3 * F * H]` of MoE layer `layer`."""
        return self._layer(layer)[expert].result()[0]

    def _layer(self, layer: int) -> list[Future]:
        """Futures of the layer's experts; those of the next layer are begun too."""
        for wanted in (layer, layer + 1):
            if wanted not in self._layers and wanted < len(self._plan.experts):
                self._layers[wanted] = [
                    self._workers.submit("expert", wanted, expert)
                    for expert in range(self.config.num_experts)
                ]
        for other in [held for held in self._layers if held not in (layer, layer + 1)]:
            del self._layers[other]
        return self._layers[layer]


class _Work:
    """Makes the parts of one checkpoint; its methods run in the workers."""

    def __init__(self, source: TensorSource, plan: Plan) -> None:
        self._source = source
        self._plan = plan

    def shared(self, part: str) -> Any:
        """One part of the shared parameters."""
        return shared_tree(self._source, self._plan, self._plan.shared[part])

    def expert(self, layer: int, expert: int) -> tuple[np.ndarray, Draft]:
        """The packed expert and its draft arrays."""
        draft = empty_draft(self._plan, num_experts=1)
        packed = convert_expert(
            self._source, self._plan, self._plan.experts[layer], expert, draft, place=0
        )
        return packed, {name: array[0] for name, array in draft.items()}


class _Workers:
    """Threads of this process, or forked processes, that run `_Work`."""

    def __init__(self, work: _Work, num_workers: int, processes: bool) -> None:
        self._work = None if processes else work
        if not processes:
            self._executor: Executor = ThreadPoolExecutor(num_workers)
            return
        # Forked workers inherit the source, which need not be picklable.
        self._executor = ProcessPoolExecutor(
            num_workers,
            mp_context=multiprocessing.get_context("fork"),
            initializer=_inherit_work,
            initargs=(work,),
        )
        # The first task starts all workers: now, before the caller starts anything else.
        self._executor.submit(int).result()

    def submit(self, method: str, *arguments: Any) -> Future:
        """The future result of one of `_Work`'s methods."""
        if self._work is not None:
            return self._executor.submit(getattr(self._work, method), *arguments)
        return self._executor.submit(_run_inherited, method, *arguments)

    def close(self) -> None:
        """Ends them without waiting for what nobody asked for."""
        self._executor.shutdown(wait=False, cancel_futures=True)


_inherited: _Work | None = None
"""In a worker process: what it works on."""


def _inherit_work(work: _Work) -> None:
    global _inherited
    _inherited = work


def _run_inherited(method: str, *arguments: Any) -> Any:
    return getattr(_inherited, method)(*arguments)


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
