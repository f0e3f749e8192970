"""Draft experts: one signature, and the choice of who computes it."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from pallas_kernels import tuning
from pallas_kernels.choice import Implementation, takes_kernels
from pallas_kernels.draft_experts import arithmetic, pallas_triton, reference
from pallas_kernels.draft_experts.config import config_for, unsupported_reason
from pallas_kernels.routing import RoutingRule, compares

DERIVED_BYTES = 36
"""Bytes an expert of what `prepare_draft_layer` adds."""


def draft_experts(
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    layer: Mapping[str, jax.Array],
    *,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Weighted sum of each row's chosen INT4 experts; arrays as in `reference.draft_experts`.

    `layer` may come from `prepare_draft_layer`; the kernels then derive nothing. implementation:
    None takes the kernels on an NVIDIA GPU where they support the sizes, and the reference
    otherwise.

    Raises:
        NotImplementedError: `implementation="pallas"` cannot run this; the text says why.
        ValueError: unknown implementation.
    """
    if not takes_kernels("draft_experts", implementation, _unsupported(x, layer)):
        return reference.draft_experts(x, experts, weights, layer_arrays(layer))
    hidden, inner = _sizes(x, layer)
    config = config_for(hidden, inner, tuning.device_kind())
    return pallas_triton.draft_experts(x, experts, weights, layer, config=config)


def routes(x: jax.Array, layer: Mapping[str, jax.Array], rule: RoutingRule) -> bool:
    """Whether `draft_routed` takes these; otherwise choose experts and call `draft_experts`."""
    supported = tuning.is_cuda_gpu() and not _unsupported(x, layer)
    return supported and compares(rule, layer["tables"].shape[0])


def draft_routed(
    x: jax.Array,
    logits: jax.Array,
    mask: jax.Array,
    layer: Mapping[str, jax.Array],
    rule: RoutingRule,
) -> tuple[jax.Array, jax.Array]:
    """Routing and `draft_experts` in one kernel less: only where it `routes`.

    x: [rows, hidden]. logits: float32 [rows, num_experts], the router's. mask: bool [rows], where
    false no expert is chosen. layer: as in `draft_experts`. Returns float32 [rows, hidden] and the
    experts, int32 [rows, k].
    """
    config = config_for(*_sizes(x, layer), tuning.device_kind())
    return pallas_triton.draft_routed(x, logits, mask, layer, rule=rule, config=config)


def prepare_draft_layer(layer: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """`layer` with what the kernels would derive from it in every call.

    To be called once, when a layer is loaded. The codes and scales are the same arrays.
    """
    return {**layer, **arithmetic.pack_tables(layer["tables"])}


def layer_arrays(layer: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The arrays of the draft format, without those derived for the kernels."""
    return {name: value for name, value in layer.items() if not name.startswith("table_")}


def _sizes(x: jax.Array, layer: Mapping[str, jax.Array]) -> tuple[int, int]:
    return x.shape[1], layer["gate_up_codes"].shape[1] // 2


def _unsupported(x: jax.Array, layer: Mapping[str, jax.Array]) -> str | None:
    hidden, inner = _sizes(x, layer)
    hidden_group = hidden // layer["gate_up_scales"].shape[2]
    inner_group = inner // layer["down_scales"].shape[2]
    return unsupported_reason(hidden, inner, hidden_group, inner_group)
