"""A slot table's rows as arrays of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning


def slot_rows(slot_table: jax.Array, *, interpret: bool = False) -> list[jax.Array]:
    """int32 [layers, num_experts] -> int32 [num_experts] of each layer.

    On an NVIDIA GPU one kernel copies all; XLA would launch one for every layer. interpret: run the
    kernel on any device.
    """
    if not (interpret or tuning.is_cuda_gpu()):
        return list(slot_table)
    num_layers, num_experts = slot_table.shape
    return pl.pallas_call(
        _kernel,
        out_shape=[jax.ShapeDtypeStruct((num_experts,), slot_table.dtype)] * num_layers,
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="slot_rows",
    )(slot_table)


def _kernel(table_ref, *row_refs):
    num_experts = table_ref.shape[1]
    ids = lax.broadcasted_iota(jnp.int32, (1 << (num_experts - 1).bit_length(),), 0)
    mask = ids < num_experts
    for layer, row_ref in enumerate(row_refs):
        row = plgpu.load(table_ref.at[jnp.full_like(ids, layer), ids], mask=mask)
        plgpu.store(row_ref.at[ids], row, mask=mask)
