"""How much is measured: the full evaluation, a quick one, and what they share."""

from __future__ import annotations

import dataclasses

from specter_jax.runtime_config import MAX_DEPTH


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Sizes of every measurement.

    task_prompts: prompts of each task for routing diversity; end_to_end_prompts: for time per
        token; mixed_prompts: for all else, spread evenly over the tasks.
    prompt_tokens: prompts are cut to their first tokens; new_tokens: every output is this long.
    depths: tokens drafted per verification; depth: where one depth has to do; diversity_depth: of
        the routing diversity of tasks.
    shares: memory budgets, as shares of all experts that have a slot; share: where one has to do.
    batches, routing_batches: sequences decoded together, for time and for routing; batch_depth: of
        the former, since `auto` would compile six depths for every batch size.
    prefill_tokens: prompt lengths. draft_batches: of the draft's expert formats.
    passes: times that a generation is timed, of which the fastest counts.
    repeats: calls of a program that is timed alone, of which the fastest counts.
    dtype: of computation, "float32" or "bfloat16".
    """

    task_prompts: int = 6
    end_to_end_prompts: int = 1
    mixed_prompts: int = 8
    prompt_tokens: int = 96
    new_tokens: int = 40
    depths: tuple[int, ...] = (1, 2, 4, 8, 16)
    depth: int = 8
    diversity_depth: int = MAX_DEPTH
    shares: tuple[float, ...] = (0.25, 0.5, 0.75)
    share: float = 0.25
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    batch_depth: int = 4
    routing_batches: tuple[int, ...] = (1, 2, 4, 8)
    prefill_tokens: tuple[int, ...] = (32, 128, 512, 1024)
    draft_batches: tuple[int, ...] = (1, 4, 16)
    passes: int = 2
    repeats: int = 20
    dtype: str = "float32"

    @property
    def context(self) -> int:
        """Tokens of the longest prompt and output of a generation."""
        return self.prompt_tokens + self.new_tokens


FULL = Settings()

QUICK = Settings(
    task_prompts=2,
    mixed_prompts=3,
    new_tokens=24,
    depths=(1, 4, 16),
    depth=4,
    shares=(0.25,),
    batches=(1, 2),
    routing_batches=(1, 2),
    prefill_tokens=(32, 128),
    draft_batches=(1,),
    passes=1,
    repeats=7,
)
"""Minutes, not a quarter of an hour; the same figures from fewer prompts, budgets and batches."""
