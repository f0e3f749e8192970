"""Statistics of routing, from what draft and target chose in each verification. NumPy only."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Iteration:
    """One verification of T = depth + 1 positions of one sequence, M MoE layers.

    draft: int [M, D, k], the draft's choices at the first D of these positions. target: int
    [M, T, k]. num_new: tokens it yielded, the accepted ones and the target's own.
    """

    draft: np.ndarray
    target: np.ndarray
    num_new: int


Request = Sequence[Iteration]
"""What one prompt's generation consisted of."""


def match_record(requests: Sequence[Request]) -> dict[str, Any]:
    """How many of the target's experts the draft had named, per (position, layer) observation.

    `matched_counts[i]`: observations in which i of the k experts matched. `mean`: share of all
    the target's choices that matched; `per_layer`, `per_request`: the same of each.
    """
    per_request = [_matches(request) for request in requests]
    matched = np.concatenate(per_request, 1)
    top_k = requests[0][0].target.shape[2]
    return {
        "top_k": top_k,
        "observations": int(matched.size),
        "matched_counts": np.bincount(matched.ravel(), minlength=top_k + 1).tolist(),
        "mean": _rounded(matched.mean() / top_k),
        "per_layer": [_rounded(x) for x in matched.mean(1) / top_k],
        "per_request": [_rounded(m.mean() / top_k) for m in per_request],
    }


def _matches(request: Request) -> np.ndarray:
    """int [M, observations]: the target's experts that the draft named at the same position."""
    counts = []
    for it in request:
        both = min(it.draft.shape[1], it.target.shape[1])
        draft, target = it.draft[:, :both], it.target[:, :both]
        counts.append((target[..., :, None] == draft[..., None, :]).any(-1).sum(-1))
    return np.concatenate(counts, 1)


def distinct(experts: np.ndarray, num_experts: int) -> np.ndarray:
    """Distinct experts of each layer; experts: int [M, ...] -> int [M]."""
    used = np.zeros((len(experts), num_experts), bool)
    used[np.arange(len(experts))[:, None], experts.reshape(len(experts), -1)] = True
    return used.sum(1)


def spread_of(counts: np.ndarray) -> dict[str, Any]:
    """Mean and range of counts of distinct experts, int [verifications, M]."""
    low, high = np.percentile(counts, [10, 90])
    return {
        "mean": _rounded(counts.mean()),
        "p10": _rounded(low),
        "p90": _rounded(high),
        "min": int(counts.min()),
        "max": int(counts.max()),
        "per_layer": [_rounded(x) for x in counts.mean(0)],
        "verifications": len(counts),
    }


def distinct_experts(requests: Sequence[Request], num_experts: int) -> dict[str, Any]:
    """`spread_of` the target's distinct experts per layer and verification."""
    rows = [distinct(it.target, num_experts) for request in requests for it in request]
    return spread_of(np.array(rows))


def batched_distinct(
    requests: Sequence[Request], batch: int, num_experts: int
) -> dict[str, Any] | None:
    """`spread_of` when `batch` requests are verified together; None with fewer requests.

    Sequences of a batch advance in step, so that its i-th verification joins the i-th of each
    sequence; only verifications in which all of them still run are counted.
    """
    if batch > len(requests):
        return None
    groups = [requests[i : i + batch] for i in range(0, len(requests) - batch + 1, batch)]
    rows = [
        distinct(np.concatenate([it.target for it in together], 1), num_experts)
        for group in groups
        for together in zip(*group, strict=False)
    ]
    return spread_of(np.array(rows))


def diversity_record(tasks: Mapping[str, Sequence[Request]], num_experts: int) -> dict[str, Any]:
    """Distinct experts per task, and Jensen-Shannon distances between the tasks' expert use.

    `distances[i][j]` is the mean over layers of the distance, 0 (alike) to 1 (disjoint), between
    the distributions of the target's choices for committed tokens. `halves[i]` is the distance
    between every other request of one task and the rest: what chance alone makes of so few.
    """
    shares = [_distribution(requests, num_experts) for requests in tasks.values()]
    distances = np.zeros((len(shares), len(shares)))
    for i, j in itertools.combinations(range(len(shares)), 2):
        distances[i, j] = distances[j, i] = jensen_shannon(shares[i], shares[j])
    halves = [_halves(requests, num_experts) for requests in tasks.values()]
    return {
        "tasks": [
            {"task": name, "requests": len(requests), **distinct_experts(requests, num_experts)}
            for name, requests in tasks.items()
        ],
        "distances": [[_rounded(x) for x in row] for row in distances],
        "halves": halves,
    }


def jensen_shannon(first: np.ndarray, second: np.ndarray) -> float:
    """Mean over rows of the Jensen-Shannon distance to base 2; rows of both sum to 1, [M, E]."""
    middle = (first + second) / 2

    def divergence(share: np.ndarray) -> np.ndarray:
        ratio = np.where(share > 0, share, 1.0) / np.where(share > 0, middle, 1.0)
        return (share * np.log2(ratio)).sum(1)

    halved = (divergence(first) + divergence(second)) / 2
    return float(np.sqrt(np.maximum(halved, 0.0)).mean())


def _distribution(requests: Sequence[Request], num_experts: int) -> np.ndarray:
    """float [M, E]: shares of the target's choices for committed tokens."""
    chosen = np.concatenate([it.target[:, : it.num_new] for r in requests for it in r], 1)
    counts = [np.bincount(layer.ravel(), minlength=num_experts) for layer in chosen]
    return np.array(counts) / chosen[0].size


def _halves(requests: Sequence[Request], num_experts: int) -> float | None:
    if len(requests) < 2:
        return None
    first, second = (_distribution(requests[i::2], num_experts) for i in (0, 1))
    return _rounded(jensen_shannon(first, second))


def _rounded(value: float) -> float:
    # Beyond four digits these are noise, and the JSON is to be read by people too.
    return round(float(value), 4)
