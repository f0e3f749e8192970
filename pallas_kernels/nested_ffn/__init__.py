"""Routed experts at full precision, from nested words and the resident draft."""

from pallas_kernels.nested_ffn.api import nested_ffn

__all__ = ["nested_ffn"]
