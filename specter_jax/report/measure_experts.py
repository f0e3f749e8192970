"""Formats of the draft's experts, and ways to verify: figures 11 and 12.

Both time programs of their own, with everything on the device, so that nothing but arithmetic and
memory traffic counts. On a GPU the runtime's kernels run, elsewhere their plain JAX references.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier

from pallas_kernels.draft_experts import draft_experts
from pallas_kernels.expert_ffn import expert_ffn
from pallas_kernels.int4.layout import decode
from specter_jax.models import close_layer, dense_layer, embed, head, init_kv, layer_name
from specter_jax.models.decoder import route_layer
from specter_jax.report import SMALL
from specter_jax.report.measure_routing import Recorder
from specter_jax.report.prompts import Task, mixed, token_ids
from specter_jax.report.settings import Settings

if TYPE_CHECKING:
    from specter_jax.model import Model

Progress = Callable[[str], None]
Record = dict[str, Any]

FULL_PRECISION, INT4, FUSED_INT4 = "full precision", "INT4, decoded first", "INT4, fused"
FORMATS = (FULL_PRECISION, INT4, FUSED_INT4)
TOKEN_WISE, EXPERT_WISE = "token-wise", "expert-wise"
MOST_VERIFICATIONS = 3
SEED = 0


def measure_draft_formats(
    model: Model, name: str, settings: Settings, progress: Progress
) -> list[Record]:
    """Figure 11: a whole draft step with each format of the routed experts.

    model: with a slot for every expert.
    """
    config, dtype = model.config, jnp.dtype(model.dtype)
    weights = (model.params, *plain_experts(model))
    records = []
    for batch in settings.draft_batches:
        kv = init_kv(config, batch=batch, capacity=settings.context, dtype=dtype)
        tokens = np.arange(batch, dtype=np.int32) + 1
        lengths = np.full(batch, settings.prompt_tokens, np.int32)
        for variant in FORMATS:
            progress(f"{name}: draft, {variant}, batch {batch}")
            step = jax.jit(functools.partial(_draft_step, config, variant))
            timed = functools.partial(step, weights, kv, tokens, lengths)
            ms = least_ms(timed, settings.repeats)
            records.append(
                {
                    "model": name,
                    "setting": SMALL,
                    "format": variant,
                    "batch": batch,
                    "tpot_ms": ms,
                    "tokens_per_s": batch / ms * 1e3,
                }
            )
    return records


def _draft_step(config, variant, weights, kv, tokens, lengths):
    """float32 [B, V]: logits of one draft step with the routed experts in one of `FORMATS`."""
    params, slots, table = weights
    shared, mask = params["shared"], jnp.ones((tokens.shape[0], 1), bool)
    hidden = embed(config, shared, tokens[:, None], jax.tree.leaves(kv)[0].dtype)
    for layer in range(config.num_layers):
        args = (config, layer, shared[layer_name(layer)], kv[layer], hidden, lengths, mask)
        if not config.is_moe(layer):
            hidden, _ = dense_layer(*args)
            continue
        routed, _ = route_layer(*args)
        x, chosen, gates = routed.moe_input[:, 0], routed.experts[:, 0], routed.weights[:, 0]
        if variant == FULL_PRECISION:
            row = table[config.moe_index(layer)]
            total = expert_ffn(x, chosen, gates, slots, row, compute_dtype=x.dtype)
        else:
            compute = draft_experts if variant == FUSED_INT4 else decoded_experts
            total = compute(x, chosen, gates, params["draft"][layer_name(layer)])
        hidden = close_layer(config, args[2], routed, total[:, None])
    return head(config, shared, hidden)[:, 0]


def decoded_experts(
    x: jax.Array, experts: jax.Array, weights: jax.Array, layer: dict[str, jax.Array]
) -> jax.Array:
    """What `draft_experts` computes, each chosen expert first written out at full precision.

    Arguments and result as of `pallas_kernels.draft_experts.draft_experts`.
    """
    inner = layer["gate_up_codes"].shape[1] // 2

    def matrices(expert: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        part = {name: jnp.take(array, expert, axis=0) for name, array in layer.items()}
        codes, scales, tables = part["gate_up_codes"], part["gate_up_scales"], part["tables"]
        return (
            decode(codes[:inner], scales[:inner], tables[0]),
            decode(codes[inner:], scales[inner:], tables[1]),
            decode(part["down_codes"], part["down_scales"], tables[2]),
        )

    gate, up, down = optimization_barrier(jax.vmap(jax.vmap(matrices))(experts))
    x = x.astype(jnp.float32)
    active = jax.nn.silu(jnp.einsum("rkfh,rh->rkf", gate, x)) * jnp.einsum("rkfh,rh->rkf", up, x)
    return jnp.einsum("rkhf,rkf,rk->rh", down, active, weights.astype(jnp.float32))


def measure_verification(
    model: Model, name: str, tasks: Sequence[Task], settings: Settings, progress: Progress
) -> list[Record]:
    """Figure 12: the experts of one layer for all positions of a verification, in two orders.

    Routing is real: choices recorded at each depth, averaged over a few verifications; weights are
    the middle MoE layer's. model: with a slot for every expert.
    """
    config, dtype = model.config, jnp.dtype(model.dtype)
    layer = config.num_moe_layers // 2
    slots, table = plain_experts(model)
    row = table[layer]
    record = Recorder(model, settings.context)
    prompt = token_ids(model.path, mixed(tasks, 1), settings.prompt_tokens)[0]
    records = []
    for depth in settings.depths:
        progress(f"{name}: verification at depth {depth}")
        iterations = record(prompt, depth, settings.new_tokens)[:MOST_VERIFICATIONS]
        chosen = [jnp.asarray(it.target[layer]) for it in iterations]
        x = jax.random.normal(jax.random.key(SEED), (depth + 1, config.hidden_size), dtype)
        gates = jnp.full((depth + 1, config.top_k), 1 / config.top_k, jnp.float32)
        for order in (TOKEN_WISE, EXPERT_WISE):
            program = jax.jit(token_wise if order == TOKEN_WISE else _expert_wise)
            times = [
                least_ms(
                    functools.partial(program, x, experts, gates, slots, row), settings.repeats
                )
                for experts in chosen
            ]
            records.append(
                {
                    "model": name,
                    "setting": SMALL,
                    "order": order,
                    "positions": depth + 1,
                    "layer_ms": float(np.mean(times)),
                    "choices": int(chosen[0].size),
                    "distinct": float(np.mean([len(np.unique(experts)) for experts in chosen])),
                }
            )
    return records


def _expert_wise(x, experts, weights, slots, row):
    return expert_ffn(x, experts, weights, slots, row, compute_dtype=x.dtype)


def token_wise(
    x: jax.Array, experts: jax.Array, weights: jax.Array, slots: jax.Array, row: jax.Array
) -> jax.Array:
    """`expert_ffn` of one position after the other, each reading all of its experts.

    Arguments and result as of `pallas_kernels.expert_ffn.expert_ffn`, without `accumulate`.
    """

    def one(position: tuple[jax.Array, ...]) -> jax.Array:
        x, experts, weights = (array[None] for array in position)
        return expert_ffn(x, experts, weights, slots, row, compute_dtype=x.dtype)[0]

    return jax.lax.map(one, (x, experts, weights))


def plain_experts(model: Model) -> tuple[jax.Array, jax.Array]:
    """All experts as plain arrays, whatever format the slots hold.

    Returns slots [experts of all layers, 3 * inner * hidden] and a slot table, int32 [M, E].
    """
    slots, table = model.pool.slots, jnp.asarray(model.pool.table())
    if not jnp.issubdtype(slots.dtype, jnp.integer):
        return slots, table
    from pallas_kernels.nested.codec import decode as decode_nested

    config, names = model.config, ("gate_up_codes", "gate_up_scales", "down_codes", "down_scales")
    decode_one = jax.jit(decode_nested)
    plain = [
        decode_one(slots[table[m, e]], *(model.params["draft"][name][n][e] for n in names))
        for m, name in enumerate(layer_name(layer) for layer in config.moe_layers)
        for e in range(config.num_experts)
    ]
    return jnp.stack(plain), jnp.arange(len(plain), dtype=jnp.int32).reshape(table.shape)


def least_ms(call: Callable[[], Any], repeats: int) -> float:
    """Time of a call until its result is there, ms: the least, after one call that compiles.

    Nothing is random here but what else the machine does, and that only adds.
    """
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append((time.perf_counter() - begin) * 1e3)
    return min(times)
