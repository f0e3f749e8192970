"""A model converted while it is loaded: nothing is written.

Plain experts are held one layer at a time. Nested ones are all encoded before the first is handed
out, because a slot must have room for the escapes of any of them; each layer is let go when the
next one is asked for, so that the host holds them once, wherever loading puts them.

For sources that Python makes tensor by tensor and for models that fit the host's memory but not
its disk. It has the interface of `specter_jax.checkpoint.Checkpoint` that loading uses.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from convert.layer_memory import LayerMemory
from convert.layers import convert_expert, shared_tree
from convert.plan import Plan, build_plan
from convert.progress import ProgressCallback
from convert.sources import TensorSource
from pallas_kernels.nested import NestedLayout, with_capacity
from specter_jax.arguments import as_callable, as_integer
from specter_jax.checkpoint import WORD_DTYPE, GroupSizes, check_expert, place
from specter_jax.config import ModelConfig
from specter_jax.errors import InvalidRequestError
from specter_jax.paths import as_path


class InMemoryCheckpoint:
    """A `TensorSource` seen as a converted checkpoint.

    Args:
        source: where tensors come from; read from several threads at once.
        tokenizer_path: directory of the tokenizer's files.
        num_workers: experts converted at the same time.
        processes: workers are forked processes, not threads. Worth it for sources that compute in
            Python; make the checkpoint before anything starts the GPU then.
        group_size, expert_format: as for `convert_checkpoint`.
        progress: told of nested experts that are encoded, as by `convert_checkpoint`.

    Raises as `convert.plan.build_plan` does, and InvalidRequestError for an argument out of range.
    Layers are meant to be read in order.
    """

    def __init__(
        self,
        source: TensorSource,
        *,
        tokenizer_path: str | Path,
        num_workers: int = 1,
        processes: bool = False,
        group_size: int | Sequence[int] | None = None,
        expert_format: str | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        self.path = as_path("tokenizer_path", tokenizer_path)
        num_workers = as_integer("num_workers", num_workers, 1)
        as_callable("progress", progress)
        self._closed = False
        self._source = source
        self._plan: Plan = build_plan(source, group_size, expert_format=expert_format)
        self._progress = progress
        self._memory = [LayerMemory(self._plan) for _ in self._plan.experts]
        work = _Work(source, self._plan, self._memory)
        self._workers = _Workers(work, num_workers, processes)
        self._layers: dict[int, list[Future]] = {}

    @property
    def config(self) -> ModelConfig:
        """The model's architecture."""
        return self._plan.config

    @property
    def group_sizes(self) -> GroupSizes:
        """Weights per INT4 scale."""
        return self._plan.group_sizes

    @functools.cached_property
    def nested_layout(self) -> NestedLayout | None:
        """Layout of a nested expert in its slot, None where they are plain.

        Encodes all experts when it is first asked for.
        """
        if self._plan.expert_format == "plain":
            return None
        sizes = (self.config.hidden_size, self.config.expert_intermediate_size)
        futures = [future for layer in self._held(0) for future in layer]
        capacity = 0
        for done, future in enumerate(futures, start=1):
            num_words = self._result(future)[0]
            capacity = max(capacity, NestedLayout.from_words(*sizes, num_words).capacity)
            if self._progress is not None:
                self._progress("encoding experts", done, len(futures))
        return NestedLayout(*sizes, capacity)

    @property
    def expert_bytes(self) -> int:
        """See `Checkpoint.expert_bytes`."""
        if self.nested_layout is not None:
            return 4 * self.nested_layout.num_words
        return self.config.expert_elements * self._plan.dtype.itemsize

    def load_shared(self, dtype: Any, device: Any = None) -> dict[str, Any]:
        """See `Checkpoint.load_shared`."""
        self._check()
        trees = [self._workers.submit("shared", part) for part in self._plan.shared]
        return {
            part: jax.tree.map(lambda array: place(array, dtype, device), self._result(tree))
            for part, tree in zip(self._plan.shared, trees, strict=True)
        }

    def load_draft_layer(self, layer: int, device: Any = None) -> dict[str, jax.Array]:
        """See `Checkpoint.load_draft_layer`."""
        for future in self._held(layer)[0]:
            self._result(future)
        # Copies: the memory is given back later, and JAX may go on using an array it was given
        # (on the CPU it does, whatever it is told about aliasing).
        draft = {name: array.copy() for name, array in self._memory[layer].draft.items()}
        return jax.device_put(draft, device)

    def open_experts(self) -> _Experts:
        """See `Checkpoint.open_experts`."""
        return _Experts(self)

    def close(self) -> None:
        """Ends the workers; call it when everything is loaded."""
        self._closed = True
        self._layers.clear()
        self._workers.close()

    def _check(self, layer: int = 0, expert: int = 0) -> None:
        """Raises InvalidRequestError if it is closed or an index is out of range."""
        if self._closed:
            raise InvalidRequestError("this InMemoryCheckpoint is closed; make another one")
        check_expert(layer, expert, self.config.num_moe_layers, self.config.num_experts)

    def _result(self, future: Future) -> Any:
        """What a worker made; if that fails nothing else is made either."""
        try:
            return future.result()
        except BaseException:
            self.close()
            raise

    def _expert(self, layer: int, expert: int) -> np.ndarray:
        """See `ExpertFiles.get`."""
        self._check(layer, expert)
        layout = self.nested_layout
        size, array = self._result(self._held(layer)[0][expert])
        if array is None:
            array = self._memory[layer].get(expert, size)
        if layout is None:
            return array.copy()  # see `load_draft_layer`
        return with_capacity(array, layout.hidden, layout.inner, layout.capacity)

    def _held(self, layer: int) -> list[list[Future]]:
        """Futures of the experts of `layer` and of those after it that are held or begun now."""
        self._check(layer)
        ahead = 2 if self._plan.expert_format == "plain" else len(self._plan.experts)
        wanted = range(layer, min(layer + ahead, len(self._plan.experts)))
        for other in self._layers.keys() - set(wanted):
            del self._layers[other]
            self._memory[other].release()
        for each in wanted:
            if each not in self._layers:
                self._layers[each] = [
                    self._workers.submit("expert", each, expert)
                    for expert in range(self.config.num_experts)
                ]
        return [self._layers[each] for each in wanted]


class _Work:
    """Makes the parts of one checkpoint; its methods run in the workers."""

    def __init__(self, source: TensorSource, plan: Plan, memory: list[LayerMemory]) -> None:
        self._source = source
        self._plan = plan
        self._memory = memory

    def shared(self, part: str) -> Any:
        """One part of the shared parameters."""
        return shared_tree(self._source, self._plan, self._plan.shared[part])

    def expert(self, layer: int, expert: int) -> tuple[int, np.ndarray | None]:
        """Makes an expert and its draft: its size, and itself if its layer's memory lacks room."""
        memory = self._memory[layer]
        plan = self._plan
        array = convert_expert(self._source, plan, plan.experts[layer], expert, memory.draft)
        return array.size, memory.put(expert, array)


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
        nested = checkpoint.nested_layout is not None
        self.dtype = WORD_DTYPE if nested else checkpoint._plan.dtype
        self.expert_bytes = checkpoint.expert_bytes

    def get(self, layer: int, expert: int) -> np.ndarray:
        """See `ExpertFiles.get`."""
        return self._checkpoint._expert(layer, expert)
