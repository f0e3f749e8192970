"""Attention of a few new tokens over a cache of keys and values, and their appending to it."""

from pallas_kernels.decode_attention.api import attend_grouped, attend_latent

__all__ = ["attend_grouped", "attend_latent"]
