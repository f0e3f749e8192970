"""Block shapes of the expert FFN kernels: fields, defaults for a shape, what is supported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.tuning import tuned_fields

TUNED_FOLDER = Path(__file__).parent
LEAST_BLOCK = 16  # the matrix unit's step along every axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertFFNConfig:
    """Work of one program: a tile of weights times a block of rows.

    A row's bits must not depend on how many rows there are. Every element of a product is summed
    over the same steps of `block_in` by the same instruction, whatever `block_rows` is; only
    `block_rows` may depend on the number of rows.
    """

    block_rows: int = 16
    block_out: int = 64
    block_in: int = 64
    num_warps: int = 4
    num_stages: int = 6


def unsupported_reason(hidden: int, inner: int, dtype_name: str) -> str | None:
    """Why the kernels cannot run these sizes, or None. dtype_name: type of the products."""
    for name, value in (("hidden size", hidden), ("expert inner size", inner)):
        if value % LEAST_BLOCK:
            return f"{name} must be a multiple of {LEAST_BLOCK}, got {value}"
    if dtype_name not in ("bfloat16", "float16", "float32"):
        return f"products must be bfloat16, float16 or float32, got {dtype_name}"
    return None


def config_for(
    hidden: int,
    inner: int,
    dtype_name: str,
    device_kind: str,
    *,
    num_choices: int,
    num_experts: int,
) -> ExpertFFNConfig:
    """Tuned config of a shape on a device, or one that is sure to fit the shape.

    num_choices: rows times experts per row; blocks of rows are as large as an expert's average
    share of them.
    """
    common = (hidden | inner) & -(hidden | inner)  # largest power of two that divides both
    block = min(64, common)
    fields = {
        "block_out": block,
        "block_in": block,
        # float32 tiles are twice as large, and more of them than this do not fit.
        "num_stages": 2 if dtype_name == "float32" else 6,
    }
    tuned = tuned_fields(TUNED_FOLDER, device_kind, hidden=hidden, inner=inner)
    if dtype_name != "float32":
        fields |= tuned
    share = num_choices / num_experts
    fields["block_rows"] = 16 if share <= 16 else 32 if share <= 32 else 64
    return ExpertFFNConfig(**fields)


def rows_of_blocks(
    config_for: Callable[..., Any],
    hidden: int,
    inner: int,
    compute_dtype: jax.typing.DTypeLike,
    *,
    num_choices: int,
    num_experts: int,
) -> int | None:
    """Rows of a block that the kernels group choices in, None where the reference is taken.

    config_for: this module's, or that of kernels which support the same sizes.
    """
    dtype_name = jnp.dtype(compute_dtype).name
    if not tuning.is_cuda_gpu() or unsupported_reason(hidden, inner, dtype_name):
        return None
    counts = dict(num_choices=num_choices, num_experts=num_experts)
    return config_for(hidden, inner, dtype_name, tuning.device_kind(), **counts).block_rows
