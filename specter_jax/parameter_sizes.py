"""Sizes of a model's parts in bytes, from shapes alone: nothing is loaded."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.draft_experts import DERIVED_BYTES
from specter_jax.checkpoint import Checkpoint
from specter_jax.config import ModelConfig
from specter_jax.models.kv import init_kv
from specter_jax.models.layer_modules import DenseBlock, MoEBlock
from specter_jax.models.outer import Outer

_SCALE_BYTES, _TABLE_BYTES, _CODES_PER_BYTE = 2, 4, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterSizes:
    """Bytes of the shared parameters, of all INT4 experts, and of one expert in its slot."""

    shared_bytes: int
    draft_bytes: int
    expert_bytes: int


def parameter_sizes(checkpoint: Checkpoint, itemsize: int) -> ParameterSizes:
    """Sizes on the device, shared parameters at `itemsize` bytes an element."""
    config = checkpoint.config
    groups = checkpoint.group_sizes
    width, inner = config.hidden_size, config.expert_intermediate_size
    codes = config.expert_elements // _CODES_PER_BYTE
    scales = (2 * inner * width // groups.gate_up + width * inner // groups.down) * _SCALE_BYTES
    tables = 3 * 8 * _TABLE_BYTES + DERIVED_BYTES
    return ParameterSizes(
        shared_bytes=num_shared_elements(config) * itemsize,
        draft_bytes=config.num_moe_layers * config.num_experts * (codes + scales + tables),
        expert_bytes=checkpoint.expert_bytes,
    )


def num_shared_elements(config: ModelConfig) -> int:
    """Elements of all parameters but the routed experts'."""
    key = jax.random.key(0)
    tokens = jnp.zeros((1, 1), jnp.int32)
    lengths = jnp.zeros((1,), jnp.int32)
    hidden = jax.ShapeDtypeStruct((1, 1, config.hidden_size), jnp.float32)
    total = _count(jax.eval_shape(Outer(config).init, key, tokens))
    kv = jax.eval_shape(lambda: init_kv(config, 1, 1))
    for layer in range(config.num_layers):
        block = (MoEBlock if config.is_moe(layer) else DenseBlock)(config, layer)
        total += _count(jax.eval_shape(block.init, key, hidden, kv[layer], lengths, tokens))
    return total


def _count(tree) -> int:
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(tree))
