"""JAX's persistent compilation cache, so that a program is compiled once per machine."""

from __future__ import annotations

import os
from pathlib import Path

import jax

CACHE_VARIABLE = "SPECTER_CACHE"
"""Environment variable that names the directory of what this package keeps between runs."""

_MIN_COMPILE_SECONDS = 0.2


def cache_root() -> Path:
    """Where conversions and compiled programs are kept."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "specter-jax")


def keep_compiled_programs() -> None:
    """Turns JAX's compilation cache on for this process, unless one is set already.

    An unset cache means minutes of compilation in every process that runs a large model.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_root() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
