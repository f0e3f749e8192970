"""The modules of a decoder layer, without its routed experts, which are passed in, not held."""

from __future__ import annotations

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels.expert_ffn.grouping import Grouping
from pallas_kernels.expert_ffn.pallas_triton import sum_choices
from pallas_kernels.small_dense import Dense, products, runs_in_kernels
from specter_jax.config import ModelConfig
from specter_jax.models.attention_gqa import GroupedQueryAttention
from specter_jax.models.attention_mla import LatentAttention
from specter_jax.models.kv import KVLayer
from specter_jax.models.linear import Linear
from specter_jax.models.mlp import GatedMLP
from specter_jax.models.norms import make_norm
from specter_jax.models.router import Router, choose_experts


@flax.struct.dataclass
class Routed:
    """State of an MoE layer between its router and its experts.

    residual: [batch, tokens, hidden], the stream after attention. moe_input: the same shape,
    normalized. experts: int32 [batch, tokens, k], `config.no_expert` where the token is masked.
    weights: float32 [batch, tokens, k]. logits: float32 [batch, tokens, num_experts] where
    `route` was not to choose; experts and weights are None then. next_experts: like experts, what
    the next MoE layer's router says of `residual` (a prediction), or None. shared: what the
    shared expert's down projection takes, [batch, tokens, inner], and the logit of its gate,
    [batch, tokens, 1], if it has one; empty where `close` computes them. groups: of the chosen
    experts, where `choose_and_group` chose them.
    """

    residual: jax.Array
    moe_input: jax.Array
    experts: jax.Array | None
    weights: jax.Array | None
    logits: jax.Array | None = None
    next_experts: jax.Array | None = None
    shared: tuple[jax.Array, ...] = ()
    groups: Grouping | None = None


class MoEBlock(nn.Module):
    """A decoder layer with routed experts, which are passed in, not held."""

    config: ModelConfig
    layer: int

    def setup(self) -> None:
        c = self.config
        self.input_norm = make_norm(c.norm, c.hidden_size, c.norm_eps)
        self.attention = _attention(c, self.layer)
        self.post_norm = make_norm(c.norm, c.hidden_size, c.norm_eps)
        self.router = Router(c)
        if c.shared_intermediate_size:
            self.shared_expert = GatedMLP(c.hidden_size, c.shared_intermediate_size, c.mlp_bias)
            if c.shared_expert_gate:
                self.shared_expert_gate = Linear(c.hidden_size, 1)

    def route(
        self,
        hidden: jax.Array,
        kv: KVLayer,
        lengths: jax.Array,
        lengths_seen: jax.Array,
        token_mask: jax.Array | None = None,
        choose: bool = True,
    ) -> tuple[Routed, KVLayer]:
        """Attention, residual, norm and router.

        token_mask: bool [batch, tokens], None for all. choose: see `route_layer`.
        """
        x = self.input_norm.deferred(hidden)
        residual, kv = self.attention(x, kv, lengths, lengths_seen, residual=hidden)
        # One kernel for all that takes this input, where there are kernels.
        shared = self._shared_parts(residual.dtype) if runs_in_kernels(residual) else []
        logits, *shared, moe_input = products(
            self.post_norm.deferred(residual), [self.router.dense(), *shared], keep_input=True
        )
        shared = tuple(shared)
        if not choose:
            return Routed(residual, moe_input, None, None, logits, shared=shared), kv
        experts, weights = choose_experts(self.config, logits, token_mask)
        return Routed(residual, moe_input, experts, weights, shared=shared), kv

    def _shared_parts(self, dtype: jax.typing.DTypeLike) -> list[Dense]:
        """Those products of the shared expert that take the normalized stream."""
        if not self.config.shared_intermediate_size:
            return []
        parts = [self.shared_expert.gate_up(dtype)]
        if self.config.shared_expert_gate:
            parts.append(self.shared_expert_gate.dense())
        return parts

    def predict(self, residual: jax.Array) -> jax.Array:
        """This layer's choice for another layer's residual stream: int32 [batch, tokens, k]."""
        return self.router(self.post_norm.deferred(residual))[0]

    def close(self, routed: Routed, accumulated: jax.Array) -> jax.Array:
        """Adds the shared expert and the residual to the routed experts' sum, or to its terms."""
        stream = routed.residual
        terms = accumulated if accumulated.ndim > stream.ndim else None
        if not self.config.shared_intermediate_size:
            return _add(stream, accumulated if terms is None else sum_choices(terms))
        active, *gate = routed.shared or products(
            routed.moe_input, self._shared_parts(stream.dtype)
        )
        add = (accumulated, stream) if terms is None else (stream,)
        return self.shared_expert.down(active, gate[0] if gate else None, add, stream.dtype, terms)

    def __call__(
        self, hidden: jax.Array, kv: KVLayer, lengths: jax.Array, lengths_seen: jax.Array
    ) -> tuple[jax.Array, KVLayer]:
        """The layer without its routed experts; touches every parameter (for shapes)."""
        routed, kv = self.route(hidden, kv, lengths, lengths_seen)
        return self.close(routed, jnp.zeros(hidden.shape, jnp.float32)), kv


class DenseBlock(nn.Module):
    """A decoder layer whose MLP is an ordinary one."""

    config: ModelConfig
    layer: int

    def setup(self) -> None:
        c = self.config
        self.input_norm = make_norm(c.norm, c.hidden_size, c.norm_eps)
        self.attention = _attention(c, self.layer)
        self.post_norm = make_norm(c.norm, c.hidden_size, c.norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.dense_intermediate_size, c.mlp_bias)

    def __call__(
        self, hidden: jax.Array, kv: KVLayer, lengths: jax.Array, lengths_seen: jax.Array
    ) -> tuple[jax.Array, KVLayer]:
        """hidden: [batch, tokens, hidden] -> the same, and the updated cache layer."""
        x = self.input_norm.deferred(hidden)
        hidden, kv = self.attention(x, kv, lengths, lengths_seen, residual=hidden)
        [active] = products(self.post_norm.deferred(hidden), [self.mlp.gate_up(hidden.dtype)])
        return self.mlp.down(active, add=(hidden,), dtype=hidden.dtype), kv


def _attention(config: ModelConfig, layer: int) -> nn.Module:
    kind = {"gqa": GroupedQueryAttention, "mla": LatentAttention}[config.attention]
    return kind(config, config.windows[layer])


def _add(stream: jax.Array, update: jax.Array) -> jax.Array:
    """Adds a float32 update and rounds once, to the stream's dtype."""
    return (stream.astype(jnp.float32) + update).astype(stream.dtype)
