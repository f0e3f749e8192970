"""Routed experts at full precision, from nested words and the resident draft."""

from pallas_kernels.nested_ffn.api import block_rows, nested_ffn

__all__ = ["block_rows", "nested_ffn"]
