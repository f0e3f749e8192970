"""Choosing experts from router logits in one kernel, one program a row.

The rules are those of `specter_jax/models/router.py`, which is the reference; XLA makes six to ten
small kernels of them, a sort among them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning
from pallas_kernels.early_launch import let_next_start, supports_early_launch

MOST_ROWS = 1024
_MOST_EXPERTS = 1024
_MOST_COMPARED = 64  # experts that `choice_at` compares with each other in registers


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingRule:
    """kind: "softmax", "group_limited" or "sparse_mixer"; the rest as in `ModelConfig`."""

    kind: Literal["softmax", "group_limited", "sparse_mixer"]
    top_k: int
    num_groups: int = 1
    top_groups: int = 1
    normalize_weights: bool = False
    scaling_factor: float = 1.0
    jitter: float = 0.0


def supported(logits: jax.Array) -> bool:
    """Whether the kernel takes logits [..., num_experts]: an NVIDIA GPU and not too many rows."""
    experts = logits.shape[-1]
    rows = logits.size // experts
    return tuning.is_cuda_gpu() and 0 < rows <= MOST_ROWS and experts <= _MOST_EXPERTS


def _tree_sum(values):
    """Sum over the last axis, a power of two, in pairs of neighbours.

    The order is the same wherever the compiler puts the values, so that a row has the same bits
    alone and among others.
    """
    while values.shape[-1] > 1:
        values = jnp.sum(values.reshape(*values.shape[:-1], -1, 2), axis=-1)
    return values


def _best(candidates, ids):
    """Largest candidate of each row and the lowest id that has it, [rows, 1].

    Integers that are ordered as the floats are: a warp finds the largest in one instruction.
    """
    bits = lax.bitcast_convert_type(candidates, jnp.int32)
    keys = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    best = jnp.max(keys, axis=1)[:, None]
    expert = jnp.min(jnp.where(keys == best, ids, ids.shape[1] - 1), axis=1)[:, None]
    bits = jnp.where(best < 0, best ^ 0x7FFFFFFF, best)
    return lax.bitcast_convert_type(bits, jnp.float32), expert


def _softmax_choices(logits, ids, num_experts, rule):
    """Lists of k ids and k weights, [rows, 1]."""
    exponentials = jnp.exp(logits - jnp.max(logits, axis=1)[:, None])
    scores = exponentials / _tree_sum(exponentials)
    real = ids < num_experts
    if rule.kind == "group_limited":
        group_size = num_experts // rule.num_groups
        remaining = jnp.where(real, scores, -1.0)
        keep = ids < 0
        for _ in range(rule.top_groups):
            _, winner = _best(remaining, ids)
            member = ids // group_size == winner // group_size
            keep = keep | member
            remaining = jnp.where(member, -1.0, remaining)
        scores = jnp.where(keep, scores, 0.0)
    candidates = jnp.where(real, scores, -1.0)
    chosen, weights = [], []
    for _ in range(rule.top_k):
        weight, expert = _best(candidates, ids)
        candidates = jnp.where(ids == expert, -1.0, candidates)
        chosen.append(expert)
        weights.append(weight)
    return chosen, weights


def _sparse_mixer_choices(logits, ids, rule):
    chosen, weights, candidates = [], [], logits
    for _ in range(rule.top_k):
        best, expert = _best(candidates, ids)
        far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * rule.jitter
        close = jnp.where(far, 0.0, jnp.exp(candidates - best))
        chosen.append(expert)
        weights.append(1 / _tree_sum(close))
        candidates = jnp.where(ids == expert, -jnp.inf, candidates)
    return chosen, weights


def store_choices(logits_ref, used_ref, experts_ref, weights_ref, first, num_rows, rule):
    """Chooses for `num_rows` rows from row `first` on and writes experts and weights.

    logits_ref: float32 [rows, num_experts]. used_ref: int32 [rows]. experts_ref, weights_ref: out,
    [rows, k]. num_rows: a power of two, may reach beyond the last row.
    """
    all_rows, num_experts = logits_ref.shape
    shape = (num_rows, max(16, 1 << (num_experts - 1).bit_length()))
    ids = lax.broadcasted_iota(jnp.int32, shape, 1)
    line = first + lax.broadcasted_iota(jnp.int32, shape, 0)
    mask = (ids < num_experts) & (line < all_rows)
    logits = plgpu.load(logits_ref.at[line, ids], mask=mask, other=-jnp.inf)
    if rule.kind == "sparse_mixer":
        chosen, weights = _sparse_mixer_choices(logits, ids, rule)
    else:
        chosen, weights = _softmax_choices(logits, ids, num_experts, rule)
    if rule.normalize_weights:
        total = sum(weights)
        weights = [weight / total for weight in weights]
    if rule.scaling_factor != 1.0:
        weights = [weight * rule.scaling_factor for weight in weights]
    shape = (num_rows, 1 << (rule.top_k - 1).bit_length())
    place = lax.broadcasted_iota(jnp.int32, shape, 1)
    line = first + lax.broadcasted_iota(jnp.int32, shape, 0)
    ids_out, weights_out = jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)
    for number, (expert, weight) in enumerate(zip(chosen, weights, strict=True)):
        ids_out = jnp.where(place == number, expert, ids_out)
        weights_out = jnp.where(place == number, weight, weights_out)
    inside = line < all_rows
    used = plgpu.load(used_ref.at[line], mask=inside, other=0)
    ids_out = jnp.where(used != 0, ids_out, num_experts)
    mask = inside & (place < rule.top_k)
    plgpu.store(experts_ref.at[line, place], ids_out, mask=mask)
    plgpu.store(weights_ref.at[line, place], weights_out, mask=mask)


def compares(rule: RoutingRule, num_experts: int) -> bool:
    """Whether `choice_at` knows this rule and takes so many experts."""
    known = rule.kind == "softmax" or (rule.kind == "sparse_mixer" and not rule.normalize_weights)
    return known and num_experts <= _MOST_COMPARED


def choice_at(logits_ref, row, place, rule):
    """One row's choice number `place`, for kernels that need no other: expert, weight, scalars.

    Every logit is compared with every other, so that nothing waits for the choices before. As the
    kernel below, but for rounding: scores that round to the same value are no ties here.
    logits_ref: float32 [rows, num_experts]; row, place: int32 scalars.
    """
    num_experts = logits_ref.shape[1]
    width = max(16, 1 << (num_experts - 1).bit_length())
    ids = lax.broadcasted_iota(jnp.int32, (width,), 0)
    line = jnp.full((width,), row, jnp.int32)
    logits = plgpu.load(logits_ref.at[line, ids], mask=ids < num_experts, other=-jnp.inf)
    mine, others = logits[:, None], logits[None]
    before = jnp.where(ids[None] < ids[:, None], others >= mine, others > mine)
    rank = jnp.sum(before.astype(jnp.int32), axis=1)
    expert = jnp.sum(jnp.where(rank == place, ids, 0))
    logit = jnp.sum(jnp.where(rank == place, logits, 0.0))
    exponentials = jnp.exp(logits - logit)  # relative to the chosen one
    if rule.kind == "sparse_mixer":
        far = (logit - logits) / jnp.maximum(jnp.abs(logits), logit) > 2 * rule.jitter
        exponentials = jnp.where(far | (rank < place), 0.0, exponentials)
    elif rule.normalize_weights:
        exponentials = jnp.where(rank < rule.top_k, exponentials, 0.0)
    weight = 1 / jnp.sum(exponentials)
    if rule.scaling_factor != 1.0:
        weight = weight * rule.scaling_factor
    return expert, weight


def _kernel(logits_ref, used_ref, experts_ref, weights_ref, *, rule, early_launch):
    row = let_next_start(pl.program_id(0), early_launch)
    store_choices(logits_ref, used_ref, experts_ref, weights_ref, row, 1, rule)


def choose_experts(
    logits: jax.Array, mask: jax.Array, rule: RoutingRule, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """logits: float32 [..., num_experts] -> experts int32 and weights float32, [..., k].

    mask: bool [...]; a row that is false chooses the id num_experts, of no expert. Ties go to the
    lower id. A row's bits do not depend on the other rows. interpret: run the kernel's arithmetic
    on any device, slowly.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    early_launch = not interpret and supports_early_launch(tuning.device_kind())
    shape = (flat.shape[0], rule.top_k)
    experts, weights = pl.pallas_call(
        functools.partial(_kernel, rule=rule, early_launch=early_launch),
        grid=(flat.shape[0],),
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="choose_experts",
    )(flat, mask.reshape(-1).astype(jnp.int32))
    out = (*logits.shape[:-1], rule.top_k)
    return experts.reshape(out), weights.reshape(out)
