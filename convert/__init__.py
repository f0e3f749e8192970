"""Conversion of Hugging Face checkpoints; imports JAX only when something is converted."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.array_source import ArraySource, LazyTensor
    from convert.conversion import convert_checkpoint
    from convert.in_memory import InMemoryCheckpoint
    from convert.sources import SafetensorsSource, TensorSource

__all__ = [
    "ArraySource",
    "InMemoryCheckpoint",
    "LazyTensor",
    "SafetensorsSource",
    "TensorSource",
    "convert_checkpoint",
]

_MODULES = {
    "ArraySource": "array_source",
    "InMemoryCheckpoint": "in_memory",
    "LazyTensor": "array_source",
    "SafetensorsSource": "sources",
    "TensorSource": "sources",
    "convert_checkpoint": "conversion",
}


def __getattr__(name: str) -> Any:
    """Imports on first use, so that `specter-convert --help` answers at once."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"convert.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
