"""Routed experts in INT4, for drafting: few rows, each with its own experts."""

from pallas_kernels.draft_experts.api import draft_experts, prepare_draft_layer

__all__ = ["draft_experts", "prepare_draft_layer"]
