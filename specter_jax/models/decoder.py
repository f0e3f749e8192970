"""One decoder layer at a time, split where the routed experts come in.

An MoE layer runs as `route_layer` (attention, norm, router), then `accumulate_experts` once or
several times, then `close_layer`; `finish_layer` is the latter two in one. So the host can fetch
experts between routing and computing. `verify` in `functions.py` chains the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from pallas_kernels import expert_ffn, nested_ffn
from pallas_kernels.constants import NOT_RESIDENT
from pallas_kernels.expert_ffn import triton_grouping
from pallas_kernels.expert_ffn.grouping import Grouping
from pallas_kernels.small_dense import Dense, products, runs_in_kernels
from specter_jax.config import ModelConfig
from specter_jax.models.attention_gqa import GroupedQueryAttention
from specter_jax.models.attention_mla import LatentAttention
from specter_jax.models.blocks import run_over_tokens
from specter_jax.models.kv import KVLayer, token_positions
from specter_jax.models.linear import Linear
from specter_jax.models.mlp import GatedMLP
from specter_jax.models.norms import make_norm
from specter_jax.models.router import Router, choose_experts, routing_rule

LayerParams = Mapping[str, Any]


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
        """Adds the shared expert and the residual to the routed experts' sum."""
        stream = routed.residual
        if not self.config.shared_intermediate_size:
            return _add(stream, accumulated)
        active, *gate = routed.shared or products(
            routed.moe_input, self._shared_parts(stream.dtype)
        )
        return self.shared_expert.down(
            active, gate[0] if gate else None, (accumulated, stream), stream.dtype
        )

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


def lengths_seen(
    config: ModelConfig, lengths: jax.Array, token_mask: jax.Array, *, prompt: bool
) -> jax.Array:
    """Sequence length that each token's rotation goes by: int32 [batch, tokens].

    Its own position plus one; in a prompt, that of the prompt's last token (see `rope.py`).
    """
    own = token_positions(lengths, token_mask.shape[1]) + 1
    if not (prompt and config.rope.depends_on_length):
        return own
    return jnp.where(token_mask, own, 0).max(-1, keepdims=True) + jnp.zeros_like(own)


def route_layer(
    config: ModelConfig,
    layer: int,
    layer_params: LayerParams,
    kv_layer: KVLayer,
    hidden: jax.Array,
    lengths: jax.Array,
    token_mask: jax.Array,
    next_router: LayerParams | None = None,
    *,
    prompt: bool = False,
    choose: bool = True,
) -> tuple[Routed, KVLayer]:
    """The part of MoE decoder layer `layer` before its experts.

    layer_params: `params["shared"]["layers_XX"]` of this layer. kv_layer: see `kv.init_kv`;
    entries lengths[b]..lengths[b]+tokens-1 are overwritten. hidden: [batch, tokens, hidden].
    lengths: int32 [batch]. token_mask: bool [batch, tokens], false for padding. next_router: the
    next MoE layer's parameters, to predict its choice, or None. prompt: static, true where the
    tokens are a prompt; see `lengths_seen`. choose: static, false to leave the choice of experts to
    a kernel that takes logits.
    """
    seen = lengths_seen(config, lengths, token_mask, prompt=prompt)

    # Kernels take all tokens at once and the mask with them; it comes after blocks otherwise.
    whole = runs_in_kernels(hidden)

    def body(start: jax.Array, kv: KVLayer, block: Any) -> tuple[KVLayer, Routed]:
        hidden, seen = block
        moe = MoEBlock(config, layer)
        variables = {"params": layer_params}
        block_mask = token_mask if whole else None
        routed, kv = moe.apply(
            variables, hidden, kv, start, seen, block_mask, choose, method="route"
        )
        if next_router is not None:
            variables = {"params": next_router}
            predicted = moe.apply(variables, routed.residual, method="predict")
            routed = routed.replace(next_experts=predicted)
        return kv, routed

    kv_layer, routed = run_over_tokens(body, kv_layer, (hidden, seen), lengths, token_mask)
    mask = token_mask[..., None]
    if not whole and choose:
        routed = routed.replace(experts=jnp.where(mask, routed.experts, config.no_expert))
    if next_router is not None:
        predicted = jnp.where(mask, routed.next_experts, config.no_expert)
        routed = routed.replace(next_experts=predicted)
    return routed, kv_layer


def grouped_rows(
    config: ModelConfig, hidden: jax.Array, slots: jax.Array, token_mask: jax.Array
) -> int | None:
    """Rows of a block where `choose_and_group` serves this many tokens, None where it does not.

    Arguments as in `route_layer`, slots as in `accumulate_experts`.
    """
    if not triton_grouping.routes(token_mask.size, config.num_experts, config.top_k):
        return None
    kernels = nested_ffn if slots.dtype == jnp.int32 else expert_ffn
    return kernels.block_rows(
        config.hidden_size,
        config.expert_intermediate_size,
        hidden.dtype,
        num_choices=token_mask.size * config.top_k,
        num_experts=config.num_experts,
    )


def choose_and_group(
    config: ModelConfig,
    routed: Routed,
    slot_row: jax.Array,
    token_mask: jax.Array,
    block_rows: int,
) -> Routed:
    """Chooses experts for what `route_layer(choose=False)` left, and groups them, in one kernel.

    slot_row: int32 [num_experts]. token_mask: bool [batch, tokens]. block_rows: of `grouped_rows`.
    """
    experts, weights, groups = triton_grouping.route_and_group(
        routed.logits.reshape(-1, config.num_experts),
        token_mask.reshape(-1),
        slot_row,
        routing_rule(config),
        block_rows,
    )
    shape = (*token_mask.shape, config.top_k)
    return routed.replace(
        experts=experts.reshape(shape), weights=weights.reshape(shape), logits=None, groups=groups
    )


def accumulate_experts(
    config: ModelConfig,
    routed: Routed,
    slots: jax.Array,
    slot_row: jax.Array,
    group_mask: jax.Array | None = None,
    accumulated: jax.Array | None = None,
    draft: LayerParams | None = None,
    *,
    with_misses: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Adds the chosen and resident experts among `group_mask` to `accumulated`.

    The result has the same bits as one pass over all experts when groups are disjoint and come in
    ascending order of expert id. slots: [num_slots, 3 * inner * hidden], or nested words int32
    [num_slots, words]. slot_row: int32 [num_experts], this layer's row of the slot table.
    group_mask: bool [num_experts] or None for all. accumulated: float32 [batch, tokens, hidden] or
    None for zeros. draft: this layer's draft experts, needed where slots hold nested words.
    with_misses: also return the number of distinct chosen experts that are not resident or not in
    the group, int32. Returns the like of accumulated.
    """
    hidden = routed.moe_input.shape[-1]
    if group_mask is not None:
        slot_row = jnp.where(group_mask, slot_row, NOT_RESIDENT)
    rows = (
        routed.moe_input.reshape(-1, hidden),
        routed.experts.reshape(-1, config.top_k),
        routed.weights.reshape(-1, config.top_k),
        slots,
        slot_row,
    )
    options = dict(
        accumulate=None if accumulated is None else accumulated.reshape(-1, hidden),
        compute_dtype=routed.moe_input.dtype,
        with_misses=True,
        groups=routed.groups if group_mask is None else None,
    )
    if slots.dtype == jnp.int32:
        total, misses = nested_ffn.nested_ffn(*rows, draft, **options)
    else:
        total, misses = expert_ffn.expert_ffn(*rows, **options)
    total = total.reshape(routed.moe_input.shape)
    return (total, misses) if with_misses else total


def close_layer(
    config: ModelConfig,
    layer_params: LayerParams,
    routed: Routed,
    accumulated: jax.Array,
) -> jax.Array:
    """The part of an MoE layer after its experts: shared expert and residual.

    accumulated: float32 [batch, tokens, hidden]. Returns the next layer's hidden state.
    """
    moe = MoEBlock(config, config.moe_layers[0])

    def body(_: jax.Array, state: None, block: Any) -> tuple[None, jax.Array]:
        return state, moe.apply({"params": layer_params}, *block, method="close")

    token_mask = (routed.experts != config.no_expert).any(-1)
    lengths = jnp.zeros(token_mask.shape[0], jnp.int32)
    routed = routed.replace(next_experts=None, groups=None)
    return run_over_tokens(body, None, (routed, accumulated), lengths, token_mask)[1]


def finish_layer(
    config: ModelConfig,
    layer_params: LayerParams,
    routed: Routed,
    slots: jax.Array,
    slot_row: jax.Array,
    draft: LayerParams | None = None,
) -> jax.Array:
    """Routed experts, shared expert and residual: `close_layer` of `accumulate_experts`.

    Products take the dtype of the hidden state. Returns the next layer's hidden state.
    """
    accumulated = accumulate_experts(config, routed, slots, slot_row, draft=draft)
    accumulated = jax.lax.optimization_barrier(accumulated)
    return close_layer(config, layer_params, routed, accumulated)


def dense_layer(
    config: ModelConfig,
    layer: int,
    layer_params: LayerParams,
    kv_layer: KVLayer,
    hidden: jax.Array,
    lengths: jax.Array,
    token_mask: jax.Array,
    *,
    prompt: bool = False,
) -> tuple[jax.Array, KVLayer]:
    """Decoder layer `layer`, which has no routed experts. Arguments as in `route_layer`."""
    seen = lengths_seen(config, lengths, token_mask, prompt=prompt)

    def body(start: jax.Array, kv: KVLayer, block: Any) -> tuple[KVLayer, jax.Array]:
        hidden, seen = block
        dense = DenseBlock(config, layer)
        hidden, kv = dense.apply({"params": layer_params}, hidden, kv, start, seen)
        return kv, hidden

    kv_layer, hidden = run_over_tokens(body, kv_layer, (hidden, seen), lengths, token_mask)
    return hidden, kv_layer
