"""JAX's persistent compilation cache, so that a program is compiled once per machine."""

from __future__ import annotations

import jax

from specter_jax.errors import InvalidRequestError
from specter_jax.paths import cache_root

_MIN_COMPILE_SECONDS = 0.2


def keep_compiled_programs() -> None:
    """Turns JAX's compilation cache on for this process, unless one is set already.

    An unset cache means minutes of compilation in every process that runs a large model. Without
    a directory to keep programs in, it stays off.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    try:
        directory = cache_root() / "compiled"
    except InvalidRequestError:
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
