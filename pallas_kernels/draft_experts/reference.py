"""Plain JAX: gather each row's chosen experts, decode them to float32, multiply."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.draft_experts.arithmetic import finite
from pallas_kernels.int4.layout import decode


def draft_experts(
    x: jax.Array, experts: jax.Array, weights: jax.Array, layer: Mapping[str, jax.Array]
) -> jax.Array:
    """Weighted sum of each row's chosen INT4 gated (silu) experts.

    x: [rows, hidden]. experts: int32 [rows, k], an id of num_experts or more contributes nothing.
    weights: float32 [rows, k]. layer: gate_up_codes int32 [num_experts, 2 * inner, hidden / 8],
    gate_up_scales bfloat16 [num_experts, 2 * inner, hidden / group], down_codes int32
    [num_experts, hidden, inner / 8], down_scales bfloat16 [num_experts, hidden, inner / group],
    tables float32 [num_experts, 3, 8] (gate, up, down). Returns float32 [rows, hidden].
    """
    num_experts = layer["tables"].shape[0]
    inner = layer["gate_up_codes"].shape[1] // 2
    weights = jnp.where(experts < num_experts, weights.astype(jnp.float32), 0.0)
    experts = jnp.minimum(experts, num_experts - 1)

    def one_expert(row: jax.Array, expert: jax.Array) -> jax.Array:
        part = {
            name: lax.dynamic_index_in_dim(array, expert, keepdims=False)
            for name, array in layer.items()
        }
        codes, scales, tables = part["gate_up_codes"], part["gate_up_scales"], part["tables"]
        gate = _product(decode(codes[:inner], scales[:inner], tables[0]), row)
        up = _product(decode(codes[inner:], scales[inner:], tables[1]), row)
        down = decode(part["down_codes"], part["down_scales"], tables[2])
        return _product(down, jax.nn.silu(gate) * up)

    outputs = jax.vmap(jax.vmap(one_expert, in_axes=(None, 0)))(x.astype(jnp.float32), experts)
    return finite(jnp.einsum("rkh,rk->rh", outputs, weights, precision=lax.Precision.HIGHEST))


def _product(weight: jax.Array, row: jax.Array) -> jax.Array:
    """[out, in] x [in] -> [out], float32."""
    return jnp.matmul(weight, row, precision=lax.Precision.HIGHEST)
