"""On what the figures were measured: machine, versions, models. Names no paths, users or hosts."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from specter_jax.report import SMALL

if TYPE_CHECKING:
    from specter_jax.model import Model

PACKAGES = ("specter-jax", "jax", "jaxlib", "flax", "numpy", "transformers", "matplotlib")


def machine() -> dict[str, Any]:
    """Date (UTC), processor, cores, memory, device and versions, JSON-ready."""
    device = jax.devices()[0]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "memory_gib": _memory_gib(),
        "device": device.device_kind,
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def load_average() -> float | None:
    """Processes that wanted to run, on average over the last minute; None where unknown."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def describe_model(model: Model, name: str, source: str | os.PathLike[str]) -> dict[str, Any]:
    """What a model is and where its weights come from, JSON-ready; sizes in bytes."""
    config = model.config
    return {
        "model": name,
        "setting": SMALL,
        "family": config.family,
        "provenance": _provenance(Path(source)),
        "layers": config.num_layers,
        "moe_layers": config.num_moe_layers,
        "experts": config.num_experts,
        "top_k": config.top_k,
        "hidden_size": config.hidden_size,
        "expert_intermediate_size": config.expert_intermediate_size,
        "expert_format": "nested" if model.pool.store.is_nested else "plain",
        "expert_bytes": model.pool.store.expert_bytes,
        "shared_bytes": model.ledger.shared_bytes,
        "draft_bytes": model.ledger.draft_bytes,
    }


def _provenance(source: Path) -> str:
    """What a checkpoint's own training record says; nothing is assumed without one."""
    try:
        record = json.loads((source / "training.json").read_text(encoding="utf-8"))
        tokens, loss = int(record["tokens"]), float(record["val_loss"])
    except (OSError, ValueError, KeyError, TypeError):
        return "as given, training unknown"
    return f"trained small: {tokens / 1e6:.0f} M tokens, validation loss {loss:.2f}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, OSError, ValueError):
        return None
