"""Block shapes of the nested expert FFN kernels: fields, defaults, what is supported."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pallas_kernels.tuning import tuned_fields

TUNED_FOLDER = Path(__file__).parent
ROW_STEP = 8  # rows that escapes are applied to at once
QUAD = 4  # escapes of one 16-byte load


@dataclasses.dataclass(frozen=True, kw_only=True)
class NestedFFNConfig:
    """Work of one program: a tile of weights times a block of rows.

    block_rows: a power of two times `ROW_STEP`. block_out: outputs of a tile; a program has two
    tiles. block_in: inputs decoded at once, a power of two. quads: four times so many escapes of a
    weight row are corrected by one step at most. A row's bits must not depend on how many rows
    there are: only `block_rows` may.
    """

    block_rows: int = 8
    block_out: int = 64
    block_in: int = 128
    quads: int = 1
    num_warps: int = 4
    num_stages: int = 3

    @property
    def product_rows(self) -> int:
        """Rows of a product: with fewer than 16 the matrix unit would take another instruction,
        which may round otherwise."""
        return max(self.block_rows, 16)


def config_for(
    hidden: int,
    inner: int,
    dtype_name: str,
    device_kind: str,
    *,
    num_choices: int,
    num_experts: int,
) -> NestedFFNConfig:
    """Tuned config of a shape on a device, or one that is sure to fit the shape.

    num_choices: rows times experts per row. Blocks of rows hold an expert's average share of them
    with room to spare: each further block of an expert decodes its weights again.
    """
    common = (hidden | inner) & -(hidden | inner)  # largest power of two that divides both
    fields = {
        "block_out": min(64, inner & -inner, (hidden & -hidden) // 2),
        "block_in": min(128, common),
    }
    if dtype_name == "float32":
        # Tiles of float32 are twice as large, and such products keep both operands in registers.
        fields |= {"block_in": min(64, common), "num_stages": 2}
    else:
        fields |= tuned_fields(TUNED_FOLDER, device_kind, hidden=hidden, inner=inner)
    share = num_choices / num_experts
    fields["block_rows"] = 8 if share <= 4 else 16 if share <= 12 else 32 if share <= 24 else 64
    return NestedFFNConfig(**fields)
