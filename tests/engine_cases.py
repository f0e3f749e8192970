"""The trained model under several cache sizes, prompts, and helpers to break and watch it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

import specter_jax as sj
from specter_jax.model import Model

QUARTER = 40
"""Slots for a quarter of the model's 5 x 32 experts."""
ALL = 160
FEW = 4
"""One token's experts of one layer: nearly every verification and prefill goes in groups."""
MANY = 80
NEW_TOKENS = 12
CONTEXT = 96
"""All shapes below fall into the same buckets, so that few programs are compiled."""

PROMPTS = [
    "The old man walked",
    "def fibonacci(n):",
    "Tom has 3 apples and buys 4",
    "Once upon a time",
]


@functools.cache
def load_tiny(directory: Path, slots: int = QUARTER, stretches: bool = False) -> Model:
    """The model in float32, loaded once per number of slots for the whole test run.

    stretches: verify in stretches of layers, as on a GPU; more programs to compile.
    """
    model = sj.load(
        directory, expert_slots=slots, dtype="float32", max_context=CONTEXT, max_batch=3
    )
    model.runtime = dataclasses.replace(model.runtime, stretches=stretches)
    return model


load_in_stretches = functools.partial(load_tiny, stretches=True)


def run(model: Model, prompts, **options):
    """`generate`, one prompt at a time and short unless told otherwise."""
    settings = {"max_new_tokens": NEW_TOKENS, "depth": 3, "batch_size": 1} | options
    return sj.generate(model, prompts, **settings)


@functools.cache
def plain_tokens(directory: Path) -> list[list[int]]:
    """Greedy output for PROMPTS without speculation and with every expert resident."""
    return run(load_tiny(directory, ALL), PROMPTS, depth=0).tokens


@contextlib.contextmanager
def wrong_draft(model: Model) -> Iterator[None]:
    """The draft with the signs of some experts' weights turned: half of what it says is wrong."""
    right = model.params["draft"]

    def broken(layer):
        tables = np.array(layer["tables"])
        tables[::4] *= -1.0
        return layer | {"tables": jax.device_put(tables, layer["tables"].sharding)}

    model.params["draft"] = {name: broken(layer) for name, layer in right.items()}
    try:
        yield
    finally:
        model.params["draft"] = right


@contextlib.contextmanager
def count_compilations() -> Iterator[list[str]]:
    """Receives an entry for each program that is compiled or fetched from JAX's cache on disk."""
    compiled: list[str] = []
    counting = True

    def on_event(event: str, seconds: float, **details: object) -> None:
        if counting and event == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(details.get("fun_name", details)))

    # A listener cannot be taken off through JAX's public interface.
    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        yield compiled
    finally:
        counting = False


def assert_slots_match_store(model: Model) -> None:
    """Every expert that the table names has exactly its bytes in its slot."""
    pool = model.pool
    slots = np.asarray(pool.slots)
    for layer, expert in np.argwhere(pool.cache.resident):
        held = slots[pool.cache.slot_table[layer, expert]]
        stored = np.asarray(pool.store.get(int(layer), int(expert)))
        assert held.tobytes() == stored.tobytes(), f"layer {layer} expert {expert}"
