"""The target's whole-model functions, pure and jit-able: state in, outputs and new state out.

`config` is static. The dtype of the cache (`kv.init_kv`) is the dtype of activations. Layers are
kept apart by optimization barriers, so that every layer computes the same bits here as when
`decoder.py`'s functions run one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.lax import optimization_barrier

from pallas_kernels.expert_ffn import grouping
from pallas_kernels.expert_ffn.slot_rows import slot_rows
from specter_jax.config import ModelConfig, layer_name
from specter_jax.models.decoder import (
    accumulate_experts,
    choose_and_group,
    close_layer,
    dense_layer,
    grouped_rows,
    route_layer,
)
from specter_jax.models.kv import KV, compute_dtype
from specter_jax.models.outer import embed, head

Params = Mapping[str, Any]


@flax.struct.dataclass
class VerifyOutputs:
    """What one pass of the target yields.

    logits: float32 [batch, tokens, vocab], or [batch, vocab] from `prefill`. experts: int32
    [moe_layers, batch, tokens, k], `config.no_expert` where masked. hidden: [moe_layers, batch,
    tokens, hidden], the state entering each MoE layer, or None if not asked for. misses: int32
    [moe_layers], distinct chosen experts that were not resident; the outputs of such a layer and
    of all later ones are not valid.
    """

    logits: jax.Array
    experts: jax.Array
    hidden: jax.Array | None
    misses: jax.Array


def count_misses(config: ModelConfig, experts: jax.Array, slot_row: jax.Array) -> jax.Array:
    """Distinct experts chosen and not resident.

    experts: int32 [..., k], `config.no_expert` counts as nothing. slot_row: int32 [num_experts].
    Returns int32, a scalar.
    """
    return grouping.count_misses(experts, slot_row[: config.num_experts])


def verify(
    config: ModelConfig,
    params: Params,
    kv: KV,
    slots: jax.Array,
    slot_table: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    token_mask: jax.Array,
    *,
    keep_hidden: bool = True,
) -> tuple[VerifyOutputs, KV]:
    """The target's logits for several tokens of each sequence, all layers in one program.

    A token's bits do not depend on how many tokens or sequences come with it, provided tokens >= 2
    (pad with a masked token).

    params: {"shared": ..., "draft": ...}; draft is used where slots hold nested words only.
    slots: [num_slots, expert elements], or nested words int32 [num_slots, words]. slot_table:
    int32 [moe_layers, num_experts], a slot or `NOT_RESIDENT`. tokens: int32 [batch, tokens]; token
    t of row b stands at position lengths[b] + t. lengths: int32 [batch], with lengths + tokens at
    most the cache's capacity. token_mask: bool [batch, tokens].
    """
    hidden, outputs, kv = _target(
        config, params, kv, slots, slot_table, tokens, lengths, token_mask, prompt=False
    )
    return outputs.replace(
        logits=head(config, params["shared"], hidden, token_mask),
        hidden=outputs.hidden if keep_hidden else None,
    ), kv


def prefill(
    config: ModelConfig,
    params: Params,
    kv: KV,
    slots: jax.Array,
    slot_table: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    token_mask: jax.Array,
    last: jax.Array,
    *,
    keep_hidden: bool = True,
) -> tuple[VerifyOutputs, KV]:
    """Like `verify`, for a prompt: the head runs on one position of each row only.

    last: int32 [batch], index into tokens of each row's last real token. Outputs' logits are
    float32 [batch, vocab].
    """
    hidden, outputs, kv = _target(
        config, params, kv, slots, slot_table, tokens, lengths, token_mask, prompt=True
    )
    return outputs.replace(
        logits=last_logits(config, params["shared"], hidden, last),
        hidden=outputs.hidden if keep_hidden else None,
    ), kv


def last_logits(
    config: ModelConfig, shared: Mapping[str, Any], hidden: jax.Array, last: jax.Array
) -> jax.Array:
    """The head on one position of each row.

    hidden: [batch, tokens, hidden]. last: int32 [batch]. Returns float32 [batch, vocab].
    """
    picked = jnp.take_along_axis(hidden, last[:, None, None].astype(jnp.int32), axis=1)
    # A second, masked token: a single one would not take the path that `verify` takes.
    picked = jnp.concatenate((picked, picked), axis=1)
    mask = jnp.broadcast_to(jnp.array([True, False]), picked.shape[:2])
    return head(config, shared, picked, mask)[:, 0]


def _target(
    config: ModelConfig,
    params: Params,
    kv: KV,
    slots: jax.Array,
    slot_table: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    token_mask: jax.Array,
    *,
    prompt: bool,
) -> tuple[jax.Array, VerifyOutputs, KV]:
    """All layers at full precision: the last hidden state, outputs without logits, the cache."""
    shared = params["shared"]
    hidden = optimization_barrier(embed(config, shared, tokens, compute_dtype(kv)))
    layers, entering, experts, misses = list(kv), [], [], []
    rows = slot_rows(slot_table)
    for layer, kind in enumerate(config.representatives):
        weights = shared[layer_name(layer)]
        state = (kv[layer], hidden, lengths, token_mask)
        if not config.is_moe(layer):
            hidden, layers[layer] = _target_dense(config, kind, weights, *state, prompt=prompt)
            continue
        entering.append(hidden)
        draft = params["draft"][layer_name(layer)] if slots.dtype == jnp.int32 else None
        slot_row = rows[config.moe_index(layer)]
        hidden, layers[layer], chosen, missing = _target_moe(
            config, kind, weights, draft, slots, slot_row, *state, prompt=prompt
        )
        experts.append(chosen)
        misses.append(missing)
    outputs = VerifyOutputs(
        logits=None,
        experts=jnp.stack(experts),
        hidden=jnp.stack(entering),
        misses=jnp.stack(misses),
    )
    return hidden, outputs, tuple(layers)


def target_layers(
    config: ModelConfig,
    kinds: tuple[int, ...],
    weights: tuple[Any, ...],
    drafts: tuple[Any, ...],
    kv: tuple[Any, ...],
    hidden: jax.Array,
    slots: jax.Array,
    slot_table: jax.Array,
    lengths: jax.Array,
    token_mask: jax.Array,
    *,
    prompt: bool = False,
) -> tuple[jax.Array, VerifyOutputs, tuple[Any, ...]]:
    """n consecutive MoE layers of the target, with the bits that `verify` gives.

    kinds: static, `config.representatives` of the layers. weights, drafts, kv: one entry a layer;
    a draft is None where slots hold plain experts. hidden: [batch, tokens, hidden]. slot_table:
    int32 [n, num_experts]. The rest as in `verify`, or as in `prefill` with `prompt`. Returns the
    state after them, outputs without logits (n in the place of moe_layers; no `hidden` of a
    prompt), and the layers' KV.
    """
    layers, entering, experts, misses = [], [], [], []
    rows = slot_rows(slot_table)
    for i, kind in enumerate(kinds):
        entering.append(hidden)
        hidden, kv_layer, chosen, missing = _target_moe(
            config,
            kind,
            weights[i],
            drafts[i],
            slots,
            rows[i],
            kv[i],
            hidden,
            lengths,
            token_mask,
            prompt=prompt,
        )
        layers.append(kv_layer)
        experts.append(chosen)
        misses.append(missing)
    outputs = VerifyOutputs(
        logits=None,
        experts=jnp.stack(experts),
        hidden=None if prompt else jnp.stack(entering),
        misses=jnp.stack(misses),
    )
    return hidden, outputs, tuple(layers)


# Layers of one kind are traced and lowered once: each is a call of the same inner function.
_target_layer = functools.partial(jax.jit, static_argnames=("config", "kind", "prompt"))


@_target_layer
def _target_dense(config, kind, weights, kv_layer, hidden, lengths, token_mask, *, prompt):
    """A layer without routed experts: hidden state and KV."""
    args = (config, kind, weights, kv_layer, hidden, lengths, token_mask)
    return optimization_barrier(dense_layer(*args, prompt=prompt))


@_target_layer
def _target_moe(
    config, kind, weights, draft, slots, slot_row, kv_layer, hidden, lengths, token_mask, *, prompt
):
    """An MoE layer: hidden state, KV, choices, number of missing experts."""
    args = (config, kind, weights, kv_layer, hidden, lengths, token_mask)
    block_rows = grouped_rows(config, hidden, slots, token_mask)
    routed, kv_layer = optimization_barrier(
        route_layer(*args, prompt=prompt, choose=block_rows is None)
    )
    if block_rows is not None:
        routed = choose_and_group(config, routed, slot_row, token_mask, block_rows)
    total, misses = accumulate_experts(
        config, routed, slots, slot_row, draft=draft, with_misses=True, summed=False
    )
    total = optimization_barrier(total)
    hidden = optimization_barrier(close_layer(config, weights, routed, total))
    return hidden, kv_layer, routed.experts, misses
