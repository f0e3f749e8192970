"""Routed experts in INT4, for drafting: few rows, each with its own experts."""

from pallas_kernels.draft_experts.api import (
    DERIVED_BYTES,
    draft_experts,
    draft_routed,
    prepare_draft_layer,
    routes,
)

__all__ = ["DERIVED_BYTES", "draft_experts", "draft_routed", "prepare_draft_layer", "routes"]
