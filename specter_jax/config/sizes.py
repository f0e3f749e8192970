"""The sizes that every family's config.json has under the same names."""

from __future__ import annotations

from typing import Any

from specter_jax.config.fields import HfFields
from specter_jax.config.validation import MAX_LAYERS


def model_sizes(
    fields: HfFields, *, vocab: int, hidden: int, layers: int, context: int
) -> dict[str, Any]:
    """Fields of `ModelConfig`, with the family's defaults; raises UnsupportedModelError."""
    return {
        "vocab_size": fields.integer("vocab_size", vocab),
        "hidden_size": fields.integer("hidden_size", hidden),
        "num_layers": fields.integer("num_hidden_layers", layers, maximum=MAX_LAYERS),
        "max_context": fields.integer("max_position_embeddings", context),
    }
