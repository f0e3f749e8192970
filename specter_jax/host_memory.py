"""Pinned host memory for the experts, which XLA takes from a pool with a limit.

The limit is 64 GiB unless the environment names another one when JAX first uses the GPU. The pool
grows by regions, each as large as all before it, and what it takes is pinned whether it is used or
not. So a limit is to be a little above what is needed, not as high as the machine allows.
"""

from __future__ import annotations

import math
import os

import jax

from specter_jax.errors import BudgetError
from specter_jax.sizes import format_size

LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_DEFAULT_GIB = 64
_SPARE_GIB = 2
"""Beside the experts: programs' small results, and rounding."""


def limit_for(expert_bytes: int) -> int:
    """GiB that the pool needs for so many bytes of experts, one part in twenty to spare."""
    return math.ceil(1.05 * expert_bytes / 2**30) + _SPARE_GIB


def allow_pinned(expert_bytes: int) -> None:
    """Raises the limit for so many bytes where the default is too low and none was given.

    Without effect once JAX has used the GPU.
    """
    needed = limit_for(expert_bytes)
    if needed > _DEFAULT_GIB:
        os.environ.setdefault(LIMIT, str(needed))


def pinned_error(error: jax.errors.JaxRuntimeError, expert_bytes: int) -> Exception:
    """What to raise for an error while experts are pinned: `error` unless memory ran out."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return error
    return BudgetError(
        f"no pinned host memory left for the experts, which take {format_size(expert_bytes)}: the "
        f"host needs as much and JAX must be allowed it, by {LIMIT}={limit_for(expert_bytes)} in "
        "the environment before it first uses the GPU; nested experts take about half of plain ones"
    )
