"""The runtime's policies by name.

A policy says whether to speculate, where the knowledge for prefetching comes from, and which
eviction order the expert cache follows. The engine reads the flags; nothing else depends on the
name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specter_jax.errors import UnknownPolicyError
from specter_jax.offload.eviction import EvictionPolicy, LruEviction
from specter_jax.offload.lookahead import LookaheadEviction

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
    if not isinstance(name, str) or name not in POLICIES:
        raise UnknownPolicyError(f"unknown policy {name!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]


def make_eviction(spec: PolicySpec, *, num_layers: int, num_experts: int) -> EvictionPolicy:
    """A fresh eviction state of the kind that the policy names, for M layers of E experts."""
    kind = {"lru": LruEviction, "lookahead": LookaheadEviction}[spec.eviction]
    return kind(num_layers, num_experts)
