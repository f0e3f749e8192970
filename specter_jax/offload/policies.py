"""The runtime's policies by name.

A policy says whether to speculate, where the knowledge for prefetching comes from, and which
eviction order the expert cache follows. The engine reads the flags; nothing else depends on the
name. `POLICIES` are compared with one another; `SYSTEM_POLICIES` are what published systems need
besides these (`specter_jax.systems`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specter_jax.config.checks import shown
from specter_jax.errors import UnknownPolicyError
from specter_jax.offload.eviction import EvictionPolicy, LayerLruEviction, LruEviction
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
    eviction: Literal["lru", "layer-lru", "lookahead"]
    use_cutoff: bool = False
    """Prefetch only below the layer that `cutoff.cutoff_layer` gives."""
    whole_layers: bool = False
    """Verification brings all experts of each layer, whatever the routing."""
    description: str


POLICIES: dict[str, PolicySpec] = {
    spec.name: spec
    for spec in (
        PolicySpec(
            name="lookahead",
            speculative=True,
            prefetch="draft",
            eviction="lookahead",
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
            description="speculation; prefetch the next layer's experts, predicted by its router "
            "from this layer's hidden state; LRU",
        ),
        PolicySpec(
            name="lru-s",
            speculative=True,
            prefetch="none",
            eviction="lru",
            description="speculation; experts loaded on demand; LRU",
        ),
        PolicySpec(
            name="lru",
            speculative=False,
            prefetch="none",
            eviction="lru",
            description="no speculation; experts loaded on demand; LRU",
        ),
    )
}

SYSTEM_POLICIES: dict[str, PolicySpec] = {
    spec.name: spec
    for spec in (
        PolicySpec(
            name="mo",
            speculative=False,
            prefetch="next_layer",
            eviction="layer-lru",
            description="no speculation; prefetch the next layer's experts, predicted by its "
            "router from this layer's hidden state; LRU in each layer's share of the slots",
        ),
        PolicySpec(
            name="mo-sm",
            speculative=True,
            prefetch="next_layer",
            eviction="layer-lru",
            description="the same with speculation",
        ),
        PolicySpec(
            name="specmoeoff",
            speculative=True,
            prefetch="none",
            eviction="lru",
            whole_layers=True,
            description="speculation; verification streams all experts of each layer",
        ),
    )
}


def get_policy(name: str) -> PolicySpec:
    """Look a policy up by name.

    Raises:
        UnknownPolicyError: if there is none of that name; the message lists those there are.
    """
    known = POLICIES | SYSTEM_POLICIES
    if not isinstance(name, str) or name not in known:
        raise UnknownPolicyError(f"unknown policy {shown(name)}: choose one of {', '.join(known)}")
    return known[name]


def make_eviction(spec: PolicySpec, *, num_layers: int, num_experts: int) -> EvictionPolicy:
    """A fresh eviction state of the kind that the policy names, for M layers of E experts."""
    kinds = {
        "lru": LruEviction,
        "layer-lru": LayerLruEviction,
        "lookahead": LookaheadEviction,
    }
    return kinds[spec.eviction](num_layers, num_experts)
