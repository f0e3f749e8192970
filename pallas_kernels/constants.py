"""Sentinels that stand in device arrays, shared by kernels and runtime."""

NOT_RESIDENT = -1
"""Entry of a slot table for an expert that is in no slot."""
