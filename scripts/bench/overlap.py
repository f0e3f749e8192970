"""What a device profile says of transfers and computation running at the same time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import jax

from scripts.bench import device_profile

Span = tuple[float, float]


def measure(run: Callable[[], Any]) -> dict[str, Any]:
    """Profiles `run`: milliseconds of host-to-device copies, of kernels, and of both at once."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        on_device = device_profile.stream_events(folder)
    copies = merged([_span(event) for event in on_device if "MemcpyH2D" in event["name"]])
    kernels = merged([_span(event) for event in on_device if "Memcpy" not in event["name"]])
    both = overlap(copies, kernels)
    return {
        "copy_ms": total(copies) / 1e3,
        "kernel_ms": total(kernels) / 1e3,
        "both_ms": both / 1e3,
        "share_of_copies_under_kernels": both / total(copies) if copies else None,
    }


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event.get("dur", 0)


def merged(spans: list[Span]) -> list[Span]:
    """The union of spans as disjoint ones in order."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def total(spans: list[Span]) -> float:
    """Length of disjoint spans."""
    return sum(end - start for start, end in spans)


def overlap(one: list[Span], other: list[Span]) -> float:
    """Length of what two lists of disjoint ordered spans have in common."""
    length, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        length += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return length
