"""Kernels and array formats that know arrays and nothing of the runtime."""
