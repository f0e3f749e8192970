"""One decoder layer at a time, split where the routed experts come in.

An MoE layer runs as `route_layer` (attention, norm, router), then `accumulate_experts` once or
several times, then `close_layer`; `finish_layer` is the latter two in one. So the host can fetch
experts between routing and computing. `verify` in `target.py` chains the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import expert_ffn, nested_ffn
from pallas_kernels.constants import NOT_RESIDENT
from pallas_kernels.expert_ffn import triton_grouping
from pallas_kernels.small_dense import runs_in_kernels
from specter_jax.config import ModelConfig
from specter_jax.models.blocks import run_over_tokens
from specter_jax.models.kv import KVLayer, token_positions
from specter_jax.models.layer_modules import DenseBlock, MoEBlock, Routed
from specter_jax.models.router import routing_rule

LayerParams = Mapping[str, Any]


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
    summed: bool = True,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Adds the chosen and resident experts among `group_mask` to `accumulated`.

    The result has the same bits as one pass over all experts when groups are disjoint and come in
    ascending order of expert id. slots: [num_slots, 3 * inner * hidden], or nested words int32
    [num_slots, words]. slot_row: int32 [num_experts], this layer's row of the slot table.
    group_mask: bool [num_experts] or None for all. accumulated: float32 [batch, tokens, hidden] or
    None for zeros. draft: this layer's draft experts, needed where slots hold nested words.
    with_misses: also return the number of distinct chosen experts that are not resident or not in
    the group, int32. summed: false to leave the sum over a row's choices to `close_layer`, where
    kernels run and nothing is accumulated. Returns the like of accumulated, or float32
    [batch, tokens, k, hidden].
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
        summed=summed,
        groups=routed.groups if group_mask is None else None,
    )
    if slots.dtype == jnp.int32:
        total, misses = nested_ffn.nested_ffn(*rows, draft, **options)
    else:
        total, misses = expert_ffn.expert_ffn(*rows, **options)
    total = total.reshape(*routed.moe_input.shape[:2], *total.shape[1:])
    return (total, misses) if with_misses else total


def close_layer(
    config: ModelConfig,
    layer_params: LayerParams,
    routed: Routed,
    accumulated: jax.Array,
) -> jax.Array:
    """The part of an MoE layer after its experts: shared expert and residual.

    accumulated: float32 [batch, tokens, hidden], or [batch, tokens, k, hidden] to be summed over k.
    Returns the next layer's hidden state.
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
