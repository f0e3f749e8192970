"""The runtime's policies by name, and the plans that prefetching ones make.

A policy says whether to speculate, where the knowledge for prefetching comes from, and which
eviction order the expert cache follows. The engine reads the flags; nothing else depends on the
name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from specter_jax.errors import UnknownPolicyError
from specter_jax.offload.eviction import EvictionPolicy, LookaheadEviction, LruEviction

DEFAULT_POLICY = "lookahead"


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """What one named policy does."""

    name: str
    speculative: bool
    """Draft several tokens and verify them at once; otherwise one token per sweep."""
    prefetch: Literal["none", "next_layer", "draft"]
    """Source of prefetching: nothing, the next layer's router, or the draft's routing."""
    eviction: Literal["lru", "lookahead"]
    use_cutoff: bool
    """Prefetch only below the layer that `cutoff.cutoff_layer` gives."""
    description: str


POLICIES: dict[str, PolicySpec] = {
    spec.name: spec
    for spec in (
        PolicySpec(
            name="lookahead",
            speculative=True,
            prefetch="draft",
            eviction="lookahead",
            use_cutoff=False,
            description="speculation; prefetch everything the draft predicts, in layer order; "
            "evict by expected next use",
        ),
        PolicySpec(
            name="sp-l",
            speculative=True,
            prefetch="draft",
            eviction="lru",
            use_cutoff=True,
            description="speculation; prefetch what the draft predicts up to a cut-off layer "
            "(SP-MoE); LRU",
        ),
        PolicySpec(
            name="sp-e",
            speculative=True,
            prefetch="next_layer",
            eviction="lru",
            use_cutoff=False,
            description="speculation; prefetch the next layer's experts, predicted by its router "
            "from this layer's hidden state; LRU",
        ),
        PolicySpec(
            name="lru-s",
            speculative=True,
            prefetch="none",
            eviction="lru",
            use_cutoff=False,
            description="speculation; experts loaded on demand; LRU",
        ),
        PolicySpec(
            name="lru",
            speculative=False,
            prefetch="none",
            eviction="lru",
            use_cutoff=False,
            description="no speculation; experts loaded on demand; LRU",
        ),
    )
}


def get_policy(name: str) -> PolicySpec:
    """Look a policy up by name.

    Raises:
        UnknownPolicyError: if there is none of that name; the message lists those there are.
    """
    if name not in POLICIES:
        raise UnknownPolicyError(f"unknown policy {name!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]


def make_eviction(spec: PolicySpec, *, num_layers: int, num_experts: int) -> EvictionPolicy:
    """A fresh eviction state of the kind that the policy names, for M layers of E experts."""
    kind = {"lru": LruEviction, "lookahead": LookaheadEviction}[spec.eviction]
    return kind(num_layers, num_experts)


def plan_loads(
    predicted: np.ndarray,
    resident: np.ndarray,
    in_flight: np.ndarray | None = None,
    *,
    start_layer: int = 0,
    cutoff: int | None = None,
    counts: np.ndarray | None = None,
) -> list[tuple[int, int]]:
    """Predicted experts that have to be loaded, in the order in which to issue them.

    Layer order, because verification consumes layers in that order; within a layer the most
    often predicted first (a prediction of several tokens is less likely to be wrong), then by id.

    Args:
        predicted: bool [M, E], the draft's prediction.
        resident: bool [M, E], experts in a slot.
        in_flight: bool [M, E] or None, experts whose transfer has been issued.
        start_layer: first layer to consider.
        cutoff: first layer not to consider, or None for all.
        counts: int [M, E] or None, how many drafted tokens chose each expert.

    Returns:
        (layer, expert) pairs.
    """
    missing = predicted & ~resident
    if in_flight is not None:
        missing &= ~in_flight
    missing[:start_layer] = False
    if cutoff is not None:
        missing[cutoff:] = False
    layers, experts = np.nonzero(missing)
    if counts is not None:
        order = np.lexsort((experts, -counts[layers, experts].astype(np.int64), layers))
        layers, experts = layers[order], experts[order]
    return list(zip(layers.tolist(), experts.tolist(), strict=True))


def prefetch_admission(
    loads: list[tuple[int, int]],
    *,
    victim_retention: np.ndarray,
    load_retention: np.ndarray,
    num_free: int,
) -> list[tuple[int, int]]:
    """The prefix-respecting choice of `loads` that is worth a slot while the draft still runs.

    Free slots are filled first. After that the i-th further load would evict the i-th lowest
    candidate victim, so it is admitted only while that victim is worth less than the load:
    retention is comparable between resident and absent experts, and a predicted expert's is
    higher the sooner its layer comes.

    Args:
        loads: (layer, expert) pairs in issue order, as from `plan_loads`.
        victim_retention: [V], retention of the slots' experts that may be evicted now.
        load_retention: [M, E], retention of every expert, from the eviction policy.
        num_free: free slots.

    Returns:
        The admitted pairs, in the order given.
    """
    admitted = list(loads[:num_free])
    victims = np.sort(victim_retention)
    for (layer, expert), victim in zip(loads[num_free:], victims, strict=False):
        if victim >= load_retention[layer, expert]:
            break
        admitted.append((layer, expert))
    return admitted
