"""Which experts a token takes and with what weight. Logits and scores are float32.

Ties in top-k go to the lower expert id.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import routing
from pallas_kernels.routing import RoutingRule
from pallas_kernels.small_dense import Dense, Normalized, products
from specter_jax.config import ModelConfig


class Router(nn.Module):
    """`weight` [num_experts, hidden]."""

    config: ModelConfig

    def setup(self) -> None:
        shape = (self.config.num_experts, self.config.hidden_size)
        self.weight = self.param("weight", nn.initializers.normal(0.02), shape)

    def dense(self) -> Dense:
        """The product that yields float32 logits [..., num_experts], for `products`."""
        # A float32 router weight must not be rounded to bfloat16; bfloat16 products are exact.
        return Dense(weight=self.weight, widen=True)

    def __call__(self, x: jax.Array | Normalized) -> tuple[jax.Array, jax.Array]:
        """x: [batch, tokens, hidden] -> experts int32 and weights float32 [batch, tokens, k]."""
        return choose_experts(self.config, products(x, [self.dense()])[0])


def choose_experts(
    config: ModelConfig, logits: jax.Array, mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """logits: float32 [..., num_experts] -> experts int32 [..., k], weights float32 [..., k].

    mask: bool [...] or None for all; where false, experts are `config.no_expert`.
    """
    if routing.supported(logits):
        all_rows = jnp.ones(logits.shape[:-1], bool)
        return routing.choose_experts(
            logits, all_rows if mask is None else mask, routing_rule(config)
        )
    experts, weights = choose_plainly(config, logits)
    return experts if mask is None else jnp.where(
        mask[..., None], experts, config.no_expert
    ), weights


def choose_plainly(config: ModelConfig, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`choose_experts` without a mask, in plain JAX: what the kernel must agree with."""
    if config.routing == "sparse_mixer":
        experts, weights = sparse_mixer(logits, config.router_jitter)
    else:
        scores = jax.nn.softmax(logits, -1)
        if config.routing == "group_limited":
            scores = limit_groups(scores, config.num_groups, config.top_groups)
        weights, experts = lax.top_k(scores, config.top_k)
    if config.normalize_weights:
        weights = weights / weights.sum(-1, keepdims=True)
    if config.routed_scaling_factor != 1.0:
        weights = weights * config.routed_scaling_factor
    return experts.astype(jnp.int32), weights


def routing_rule(config: ModelConfig) -> RoutingRule:
    """What the kernel needs to know of `config`."""
    return RoutingRule(
        kind=config.routing,
        top_k=config.top_k,
        num_groups=config.num_groups,
        top_groups=config.top_groups,
        normalize_weights=config.normalize_weights,
        scaling_factor=config.routed_scaling_factor,
        jitter=config.router_jitter,
    )


def limit_groups(scores: jax.Array, num_groups: int, top_groups: int) -> jax.Array:
    """Zeroes all but the groups whose best expert scores highest (DeepSeek-V2, section 2.2.2).

    scores: [..., num_experts], groups are equal consecutive ranges of ids.
    """
    grouped = scores.reshape(*scores.shape[:-1], num_groups, -1)
    _, best = lax.top_k(grouped.max(-1), top_groups)
    keep = (best[..., None] == jnp.arange(num_groups)).any(-2)
    return jnp.where(keep[..., None], grouped, 0.0).reshape(scores.shape)


def sparse_mixer(logits: jax.Array, jitter: float) -> tuple[jax.Array, jax.Array]:
    """Top-2 routing of SparseMixer (2310.00811, 2409.12136) in evaluation mode.

    Each pick is an argmax; its weight is its softmax among those experts whose logit is within
    `2 * jitter`, relatively, of it. The second pick ignores the first.
    logits: float32 [..., num_experts]. Returns experts int32 and weights float32 [..., 2].
    """
    first, first_weight = _pick(logits, logits, jitter)
    ids = jnp.arange(logits.shape[-1])
    remaining = jnp.where(ids == first[..., None], -jnp.inf, logits)
    second, second_weight = _pick(logits, remaining, jitter)
    experts = jnp.stack((first, second), -1)
    return experts.astype(jnp.int32), jnp.stack((first_weight, second_weight), -1)


def _pick(logits: jax.Array, candidates: jax.Array, jitter: float) -> tuple[jax.Array, jax.Array]:
    """The best candidate and its softmax weight among close ones."""
    best = candidates.max(-1, keepdims=True)
    factor = jnp.maximum(jnp.abs(logits), best)
    far = (best - logits) / factor > 2 * jitter
    weights = jax.nn.softmax(jnp.where(far, -jnp.inf, candidates), -1)
    expert = candidates.argmax(-1)
    return expert, jnp.take_along_axis(weights, expert[..., None], -1)[..., 0]
