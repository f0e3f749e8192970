"""Routed experts at full precision, expert by expert over all rows."""

from pallas_kernels.expert_ffn.api import block_rows, expert_ffn

__all__ = ["block_rows", "expert_ffn"]
