"""Block shapes of the nested expert FFN kernels: fields, defaults, what is supported."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from pallas_kernels.tuning import tuned_fields

TUNED_FOLDER = Path(__file__).parent
MOST_ROW_STEP = 8  # rows that escapes are applied to at once, in one 16-byte load of bf16
QUAD = 4  # escapes of one 16-byte load


@dataclasses.dataclass(frozen=True, kw_only=True)
class NestedFFNConfig:
    """Work of one program: a tile of weights times a block of rows.

    block_rows: a power of two. block_out: outputs of a tile; a program has two tiles, whose rows
    are as many as its threads, so that each thread corrects one row. block_in: inputs decoded at
    once, a power of two. quads: four times so many escapes of a weight row are corrected by one
    step at most.

    num_warps decides on the instruction of the products. Multiples of 4 take that of a warp group,
    with 64 outputs, before which a step fences all of its memory accesses several times. Fewer
    warps take that of a single warp, which waits for nothing else.

    A row's bits must not depend on how many rows there are: only `block_rows` may.
    """

    block_rows: int = 8
    block_out: int = 64
    block_in: int = 128
    quads: int = 1
    num_warps: int = 4
    num_stages: int = 3

    @property
    def row_step(self) -> int:
        """Rows that escapes are applied to at once."""
        return min(self.block_rows, MOST_ROW_STEP)

    @property
    def product_rows(self) -> int:
        """Rows of a product: a single warp's instruction has 8; a warp group's may round otherwise
        with fewer than 16."""
        return max(self.block_rows, 8 if self.num_warps % 4 else 16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """How the work is cut into programs; every one computes the same.

    fields: of `NestedFFNConfig`, as far as the sizes allow. least_rows, most_rows: of a block.
    """

    fields: Mapping[str, int]
    least_rows: int = 4
    most_rows: int = 64


_GROUP = MappingProxyType({"block_out": 64, "num_warps": 4, "num_stages": 3})
_PAIR = MappingProxyType({"block_out": 32, "num_warps": 2})
VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        # A warp group a program: three programs (12 warps) on a multiprocessor.
        "group": Variant(fields=_GROUP, least_rows=8),
        # The same bits with four inputs side by side where few rows choose an expert.
        "group_narrow": Variant(fields=_GROUP),
        # Two warps a program: seven programs. Of 64 rows the warps would share the rows, and each
        # would decode all weights.
        "pair": Variant(fields={**_PAIR, "num_stages": 3}, most_rows=32),
        # Seven or eight, and half the shared memory, which leaves more cache for gathered inputs.
        "pair_short": Variant(fields={**_PAIR, "num_stages": 2}, most_rows=32),
    }
)
DEFAULT_VARIANT = "pair"


def config_for(
    hidden: int,
    inner: int,
    dtype_name: str,
    device_kind: str,
    *,
    num_choices: int,
    num_experts: int,
    variant: str = DEFAULT_VARIANT,
) -> NestedFFNConfig:
    """Tuned config of a shape on a device, or one that is sure to fit the shape.

    num_choices: rows times experts per row. Blocks of rows hold an expert's average share of them
    with room to spare: each further block of an expert decodes its weights again. variant: a name
    in `VARIANTS`.
    """
    common = (hidden | inner) & -(hidden | inner)  # largest power of two that divides both
    chosen = VARIANTS[variant]
    fields = dict(chosen.fields)
    fields["block_out"] = min(fields["block_out"], inner & -inner, (hidden & -hidden) // 2)
    fields["block_in"] = min(128, common)
    if dtype_name == "float32":
        # Tiles of float32 are twice as large, and such products keep both operands in registers.
        fields |= {"block_in": min(64, common), "num_stages": 2}
    else:
        fields |= tuned_fields(TUNED_FOLDER, device_kind, hidden=hidden, inner=inner)
    share = num_choices / num_experts
    rows = next((rows for rows, most in _MOST_SHARES if share <= most), 64)
    fields["block_rows"] = min(max(rows, chosen.least_rows), chosen.most_rows)
    return NestedFFNConfig(**fields)


_MOST_SHARES = ((4, 2), (8, 4), (16, 12), (32, 24))
"""Rows of a block, and the largest average share of choices that they are taken for."""
