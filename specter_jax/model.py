"""A loaded model: parameters and slots on the device, experts in pinned host memory."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.draft_experts import prepare_draft_layer
from specter_jax.arguments import as_callable, as_choice
from specter_jax.budget import check_device, plan, slots_for
from specter_jax.checkpoint import Checkpoint, open_checkpoint
from specter_jax.compilation import keep_compiled_programs
from specter_jax.config import ModelConfig, layer_name
from specter_jax.config.checks import shown
from specter_jax.controller import DepthController
from specter_jax.engine.batch import Batch
from specter_jax.engine.context import Context, Optimism
from specter_jax.engine.pace import Pace
from specter_jax.engine.programs import Programs, build_programs
from specter_jax.engine.slots import SlotPool
from specter_jax.engine.store import ExpertStore, device_sharding, pin_layer
from specter_jax.engine.warmup import warm_up
from specter_jax.errors import InvalidRequestError
from specter_jax.host_memory import allow_pinned, pinned_error
from specter_jax.memory import MemoryLedger
from specter_jax.offload import DEFAULT_POLICY, get_policy, make_eviction
from specter_jax.runtime_config import DTYPES, RuntimeConfig
from specter_jax.sizes import parse_size
from specter_jax.source import resolve_checkpoint
from specter_jax.stats import StatsRecorder
from specter_jax.trace import NullTrace, Tracer

Progress = Callable[[str, int, int], None]
"""`(what, done, total)`, called while converting, loading and compiling."""


@dataclasses.dataclass(repr=False)
class Model:
    """What `load` returns and `generate` runs.

    Attributes:
        config: the model's architecture. params: {"shared": tree, "draft": tree} on the device.
        pool: expert slots and transfers; it and `policy`, `optimism`, `pace` carry over from one
            generation to the next, so that a warm cache stays warm.
        warm: shapes whose programs have run once, see `ensure_warm`.
        controllers: what `depth="auto"` has measured, by policy and batch size.
        progress: told of compilation, as `load` was of loading.
        lock: held by a running generation, see `exclusive`.
        cache_is_filled: false while, or because, `reset_cache` was interrupted.
        ledger: where the device's memory went. dtype: "bfloat16" or "float32", of computation.
    """

    path: Path
    config: ModelConfig
    params: dict[str, Any]
    programs: Programs
    runtime: RuntimeConfig
    pool: SlotPool
    ledger: MemoryLedger
    dtype: str
    device: jax.Device
    policy: str
    optimism: Optimism
    pace: Pace = dataclasses.field(default_factory=Pace)
    warm: set[tuple] = dataclasses.field(default_factory=set)
    controllers: dict[tuple[str, int], DepthController] = dataclasses.field(default_factory=dict)
    progress: Progress | None = None
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    cache_is_filled: bool = True

    def __repr__(self) -> str:
        held = f"{self.pool.num_slots} of {self.config.num_moe_layers * self.config.num_experts}"
        return f"<Model {self.path}: {self.config.family}, {self.dtype}, {held} experts in slots>"

    def context(self, recorder: StatsRecorder, trace: Tracer) -> Context:
        """What the engine's phases share during one generation."""
        self.pool.trace = trace
        return Context(
            config=self.config,
            params=self.params,
            programs=self.programs,
            runtime=self.runtime,
            pool=self.pool,
            eviction=self.pool.cache.eviction,
            policy=get_policy(self.policy),
            recorder=recorder,
            trace=trace,
            optimism=self.optimism,
            pace=self.pace,
            device=self.device,
        )

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """One generation at a time: slots and statistics are shared.

        Raises InvalidRequestError if one is running, in another thread or around this call.
        """
        if not self.lock.acquire(blocking=False):
            raise InvalidRequestError(
                "this model is generating already: wait for it, or give all prompts in one call"
            )
        try:
            yield
        finally:
            self.lock.release()

    def auto_depth(self, batch_size: int) -> DepthController:
        """The controller of `depth="auto"` for the current policy; it keeps what it measured."""
        return self.controllers.setdefault((self.policy, batch_size), DepthController())

    def ensure_warm(self, batch: Batch, depths: Sequence[int]) -> None:
        """Compiles what decoding `batch` at `depths` may run, once per set of shapes.

        Afterwards nothing compiles, whatever is accepted or missed. Resets the cache if there was
        something to compile.
        """
        shapes = (
            len(batch.prompts),
            tuple(batch.widths(self.runtime)),
            batch.capacity(self.runtime),
            batch.draws is not None,
            get_policy(self.policy).prefetch == "next_layer",
            get_policy(self.policy).whole_layers,
        )
        missing = [depth for depth in sorted(set(depths)) if (*shapes, depth) not in self.warm]
        if not missing:
            return
        ctx = self.context(StatsRecorder(sequences=len(batch.prompts)), NullTrace())
        report = self.progress or (lambda what, done, total: None)
        try:
            warm_up(ctx, batch, missing, lambda done: report("compiling", done, len(missing)))
        finally:
            self.pool.settle()
            self.reset_cache()
        self.warm.update((*shapes, depth) for depth in missing)

    def use_policy(self, name: str) -> None:
        """Switches the policy; another one than before starts with a freshly filled cache.

        Raises UnknownPolicyError.
        """
        spec = get_policy(name)
        if name != self.policy or not self.cache_is_filled:
            self.policy = spec.name
            self.reset_cache()

    def resize(
        self, *, gpu_memory: str | int | None = None, expert_slots: int | None = None
    ) -> None:
        """Gives the model another budget: other slots, freshly filled; nothing is loaded again.

        Programs compile anew, because the number of slots is part of their shapes.

        gpu_memory, expert_slots: as for `load`, which also warns alike.

        Raises:
            BudgetError: the budget is too small; the model stays as it is. After any other error
                it has its old slots, filled again by the next request.
            InvalidRequestError: an argument is out of range, or the model is generating.
        """
        budget = None if gpu_memory is None else parse_size(gpu_memory)
        ledger = slots_for(self.config, self.ledger, budget=budget, expert_slots=expert_slots)
        check_device(self.device, ledger)
        with self.exclusive():
            # The old slots go first: both may not fit.
            self.pool.settle()
            self.cache_is_filled = False
            self.pool.slots.delete()
            self.pool = _make_pool(self.config, self.pool.store, self.device, ledger, self.policy)
            self.ledger = ledger
            self.runtime = dataclasses.replace(self.runtime, num_slots=ledger.num_slots)
            self.warm.clear()
            self.controllers.clear()
            self._forget()
            self.cache_is_filled = True

    def reset_cache(self) -> None:
        """Forgets what was learnt and fills the slots as `load` did."""
        self.cache_is_filled = False
        self._forget()
        # What a fill or a resize that was interrupted left behind.
        self.pool.settle()
        self.pool.reset(_eviction(self.config, self.policy))
        self.pool.fill()
        self.cache_is_filled = True

    def _forget(self) -> None:
        """Starts to learn anew how this cache behaves."""
        self.optimism = Optimism()
        self.pace = Pace()


def load(
    path: str | os.PathLike[str] | Checkpoint,
    *,
    gpu_memory: str | int | None = None,
    expert_slots: int | None = None,
    dtype: str = "bfloat16",
    max_context: int | None = None,
    max_batch: int = 1,
    cache_dir: str | os.PathLike[str] | None = None,
    expert_format: str | None = None,
    verify: str = "sizes",
    progress: Progress | None = None,
) -> Model:
    """Loads a converted directory, or a Hugging Face one, which is converted once into a cache.

    Args:
        path: the directory; or an open checkpoint, such as `convert.InMemoryCheckpoint`.
        gpu_memory: device memory this model may use, such as "16GiB" or a number of bytes; what
            the rest leaves becomes expert slots. expert_slots: their number outright; more than
            there are experts draw a RuntimeWarning and are not used. Neither: every expert gets
            a slot.
        dtype: "bfloat16", or "float32" to check results.
        max_context: longest prompt plus output, tokens; memory for its KV is set aside.
        max_batch: most prompts decoded together.
        cache_dir: where a Hugging Face directory's conversion is kept.
        expert_format: "nested" or "plain", how that conversion stores full-precision experts; by
            default nested where that is possible.
        verify: "sizes", or "checksums" to read and check every file.
        progress: called as `(what, done, total)` while converting, loading, and compiling for a
            new size of request.

    Raises:
        BudgetError: the budget is too small, or pinned host memory is; the message says what is
            needed.
        InvalidRequestError: an argument is out of range.
        CheckpointError, ConversionError, UnsupportedModelError: the directory cannot be used.
    """
    as_choice("dtype", dtype, DTYPES)
    as_callable("progress", progress)
    keep_compiled_programs()
    budget = None if gpu_memory is None else parse_size(gpu_memory)
    if isinstance(path, str | os.PathLike):
        directory = resolve_checkpoint(
            path, cache_dir=cache_dir, expert_format=expert_format, progress=progress
        )
        checkpoint = open_checkpoint(directory, verify=verify)
    elif hasattr(path, "load_shared"):
        checkpoint = path
    else:
        raise InvalidRequestError(
            f"path is {shown(path)}; expected a directory or an open checkpoint, such as "
            "convert.InMemoryCheckpoint"
        )
    config = checkpoint.config
    ledger, runtime = plan(
        checkpoint,
        budget=budget,
        expert_slots=expert_slots,
        dtype=dtype,
        max_context=max_context,
        max_batch=max_batch,
    )
    pinned_bytes = ledger.expert_bytes * config.num_moe_layers * config.num_experts
    allow_pinned(pinned_bytes)
    device = jax.devices()[0]
    check_device(device, ledger)
    on_device = device_sharding(device)
    params = {"shared": checkpoint.load_shared(dtype, on_device), "draft": {}}
    experts = checkpoint.open_experts()
    stored = []
    for m, layer in enumerate(config.moe_layers):
        draft = checkpoint.load_draft_layer(m, on_device)
        params["draft"][layer_name(layer)] = prepare_draft_layer(draft)
        layer_experts = [experts.get(m, e) for e in range(config.num_experts)]
        try:
            stored.append(pin_layer(layer_experts, device))
        except jax.errors.JaxRuntimeError as error:
            raise pinned_error(error, pinned_bytes) from error
        if progress is not None:
            progress("loading experts", m + 1, config.num_moe_layers)
    store = ExpertStore(tuple(stored))
    pool = _make_pool(config, store, device, ledger, DEFAULT_POLICY)
    return Model(
        path=checkpoint.path,
        config=config,
        params=params,
        programs=build_programs(config, dtype, device),
        runtime=runtime,
        pool=pool,
        ledger=ledger,
        dtype=dtype,
        device=device,
        policy=DEFAULT_POLICY,
        optimism=Optimism(),
        progress=progress,
    )


def _eviction(config: ModelConfig, policy: str):
    return make_eviction(
        get_policy(policy), num_layers=config.num_moe_layers, num_experts=config.num_experts
    )


def _make_pool(
    config: ModelConfig, store: ExpertStore, device: jax.Device, ledger: MemoryLedger, policy: str
) -> SlotPool:
    """A filled pool of as many slots as the ledger has."""
    pool = SlotPool(
        store=store,
        device=device,
        num_slots=ledger.num_slots,
        max_in_flight=ledger.max_in_flight,
        eviction=_eviction(config, policy),
    )
    pool.fill()
    return pool
