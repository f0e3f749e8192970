"""Which experts are on the device, which come next, which leave: host-side decisions, no JAX."""

from specter_jax.offload.cache import ExpertCache, Placement
from specter_jax.offload.cutoff import cutoff_layer
from specter_jax.offload.elb import ExpertLookaheadBuffer, Snapshot
from specter_jax.offload.eviction import EvictionPolicy, LayerLruEviction, LruEviction
from specter_jax.offload.lookahead import LookaheadEviction
from specter_jax.offload.plans import plan_loads, prefetch_admission
from specter_jax.offload.policies import (
    DEFAULT_POLICY,
    POLICIES,
    SYSTEM_POLICIES,
    PolicySpec,
    get_policy,
    make_eviction,
)

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "SYSTEM_POLICIES",
    "EvictionPolicy",
    "ExpertCache",
    "ExpertLookaheadBuffer",
    "LayerLruEviction",
    "LookaheadEviction",
    "LruEviction",
    "Placement",
    "PolicySpec",
    "Snapshot",
    "cutoff_layer",
    "get_policy",
    "make_eviction",
    "plan_loads",
    "prefetch_admission",
]
