"""Dense products of few rows, which read each weight once at the memory's speed."""

from pallas_kernels.small_dense.api import (
    Normalized,
    normalize,
    normalized,
    products,
    runs_in_kernels,
)
from pallas_kernels.small_dense.operands import Dense, Norm

__all__ = ["Dense", "Norm", "Normalized", "normalize", "normalized", "products", "runs_in_kernels"]
