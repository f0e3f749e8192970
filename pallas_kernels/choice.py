"""Who computes a kernel's function: Pallas, or its plain-JAX reference."""

from __future__ import annotations

from typing import Literal

from pallas_kernels import tuning

Implementation = Literal["pallas", "reference"]


def takes_kernels(kernel: str, implementation: str | None, reason: str | None) -> bool:
    """Whether the Pallas kernels are taken.

    kernel: its name, for messages. implementation: "pallas", "reference", or None for the kernels
    on an NVIDIA GPU where nothing speaks against them. reason: what speaks against them on a GPU,
    or None.

    Raises:
        NotImplementedError: "pallas" is asked for and cannot be; the text says why.
        ValueError: unknown implementation.
    """
    if not tuning.is_cuda_gpu():
        reason = f"needs an NVIDIA GPU, the default device is {tuning.device_kind()}"
    if implementation is None:
        return reason is None
    if implementation not in ("pallas", "reference"):
        raise ValueError(
            f'implementation must be "pallas", "reference" or None, got {implementation!r}'
        )
    if implementation == "pallas" and reason:
        raise NotImplementedError(f"{kernel} by Pallas: {reason}")
    return implementation == "pallas"
