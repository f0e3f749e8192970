"""Mixture-of-experts inference on one GPU: INT4 drafting, expert prefetch, exact verification.

Names are loaded on first use, so that a command line can refuse bad arguments before JAX starts.
"""

import importlib
from typing import Any

_HOMES = {
    "GenerationResult": "specter_jax.api",
    "Model": "specter_jax.model",
    "ModelConfig": "specter_jax.config",
    "POLICIES": "specter_jax.offload",
    "SamplingConfig": "specter_jax.sampling_config",
    "SpecterError": "specter_jax.errors",
    "Stats": "specter_jax.stats",
    "Trace": "specter_jax.trace",
    "draft_chunk": "specter_jax.models",
    "draft_step": "specter_jax.models",
    "generate": "specter_jax.api",
    "init_kv": "specter_jax.models",
    "load": "specter_jax.model",
    "prefill": "specter_jax.models",
    "verify": "specter_jax.models",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
