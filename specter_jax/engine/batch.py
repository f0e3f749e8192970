"""What is decoded together, and the shapes that follow from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from specter_jax.engine.program_types import Draws
from specter_jax.runtime_config import RuntimeConfig, kv_capacity, prefill_widths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """B prompts, int32 [length] each, and how many tokens each may gain.

    limits: the latter, one number a prompt, since what the context leaves differs.
    draws: sampling arguments, None for greedy. kv_dtype: "float32" or "bfloat16", which is also
    that of the computation.
    """

    prompts: Sequence[np.ndarray]
    limits: Sequence[int]
    draws: Draws | None
    kv_dtype: str

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(prompt) for prompt in self.prompts]

    def widths(self, runtime: RuntimeConfig) -> list[int]:
        """Padded width of each chunk of the prefill."""
        return prefill_widths(max(self.lengths), runtime.prefill_tokens)

    def capacity(self, runtime: RuntimeConfig) -> int:
        """KV entries per sequence."""
        longest = max(
            length + limit for length, limit in zip(self.lengths, self.limits, strict=True)
        )
        return kv_capacity(longest, runtime.max_context)
