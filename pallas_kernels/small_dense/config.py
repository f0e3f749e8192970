"""Block shapes of the small dense kernels: fields, defaults for a shape, what is supported."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pallas_kernels.early_launch import supports_early_launch
from pallas_kernels.tuning import tuned_fields

TUNED_FOLDER = Path(__file__).parent
LEAST_BLOCK = 16  # the matrix unit's step along every axis
LANE = 8  # neighbouring inputs of one 16-byte load


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallDenseConfig:
    """Work of one program of each kernel; all numbers are powers of two.

    vector_*: a single row. vector_out: weight rows of a program (a gated part takes half as many
    outputs). vector_ahead: pieces of 8 inputs a thread that are read before the first is used.
    rows_*: any number of rows. rows_out: outputs of a program. rows_in: inputs multiplied per
    step. A row's bits must not depend on how many rows there are: none of these may be chosen by
    that number. norm_warps: of the norm's program, one a row. early_launch: let the next kernel
    be launched while this one runs (compute capability 9 on).
    """

    vector_out: int = 4
    vector_ahead: int = 6
    vector_warps: int = 4
    rows_out: int = 64
    rows_in: int = 128
    rows_warps: int = 4
    rows_stages: int = 5
    norm_warps: int = 4
    early_launch: bool = False


def unsupported_reason(num_in: int, dtype_names: set[str]) -> str | None:
    """Why the kernels cannot run this, or None. dtype_names: of x and of all weights."""
    if num_in % LEAST_BLOCK:
        return f"inputs must be a multiple of {LEAST_BLOCK}, got {num_in}"
    for name in sorted(dtype_names):
        if name not in ("bfloat16", "float16", "float32"):
            return f"x and weights must be bfloat16, float16 or float32, got {name}"
    return None


def config_for(num_in: int, num_out: int, dtype_name: str, device_kind: str) -> SmallDenseConfig:
    """Tuned config of a shape on a device, or one that is sure to fit the shape.

    num_out: of all parts of a call together, gated ones counted twice. dtype_name: of x.
    """
    fields = tuned_fields(TUNED_FOLDER, device_kind, inputs=num_in, outputs=num_out)
    config = SmallDenseConfig(**{"early_launch": supports_early_launch(device_kind), **fields})
    if dtype_name == "float32":
        # Tiles are twice as large; float32 only serves to check results.
        config = dataclasses.replace(config, rows_out=32, rows_in=32, rows_warps=4, rows_stages=2)
    return dataclasses.replace(config, rows_in=min(config.rows_in, num_in & -num_in))
