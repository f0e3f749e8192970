"""Routed experts at full precision, expert by expert over all rows."""

from pallas_kernels.expert_ffn.api import expert_ffn

__all__ = ["expert_ffn"]
