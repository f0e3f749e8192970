"""Tuned block shapes: one JSON file per kernel and device, a list of entries.

An entry has `match`, sizes that must all be equal, and `config`, fields of the kernel's config.
Files are written by `scripts/bench/tune_kernels.py`.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax


def device_file_name(device_kind: str) -> str:
    """`NVIDIA H200` -> `nvidia_h200.json`."""
    return device_kind.lower().replace(" ", "_") + ".json"


def device_kind() -> str:
    """The default device's name, such as `NVIDIA H200` or `cpu`."""
    return jax.devices()[0].device_kind


@functools.cache
def _entries(folder: Path, kind: str) -> tuple[dict[str, Any], ...]:
    file = folder / device_file_name(kind)
    return tuple(json.loads(file.read_text())) if file.exists() else ()


def tuned_fields(folder: Path, kind: str, **sizes: int) -> dict[str, Any]:
    """Config fields of the first entry for device `kind` that matches `sizes`, or nothing."""
    for entry in _entries(folder, kind):
        if all(sizes[name] == value for name, value in entry["match"].items()):
            return entry["config"]
    return {}


def is_cuda_gpu() -> bool:
    """Whether the default device is an NVIDIA GPU."""
    device = jax.devices()[0]
    return device.platform == "gpu" and "rocm" not in device.client.platform_version.lower()
