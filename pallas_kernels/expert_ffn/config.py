"""Block shapes of the expert FFN kernels."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertFFNConfig:
    """Work of one program: a tile of weights times a block of rows.

    A row's bits must not depend on how many rows there are. Every element of a product is summed
    over the same steps of `block_in`, whatever `block_rows` is.
    """

    block_rows: int = 16
    block_out: int = 64
    block_in: int = 64
    num_warps: int = 4
    num_stages: int = 4
