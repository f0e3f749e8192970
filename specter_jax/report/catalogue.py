"""The figures of the page in order: what each is called, which records it needs, who draws it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from specter_jax.report.figures_end_to_end import draw_end_to_end
from specter_jax.report.figures_prefill import draw_prefill
from specter_jax.report.figures_routing import (
    draw_batch_experts,
    draw_distinct,
    draw_diversity,
    draw_match,
)
from specter_jax.report.figures_systems import (
    draw_batch,
    draw_hit_rate,
    draw_planner,
)
from specter_jax.report.figures_time import (
    draw_depth,
    draw_draft_formats,
    draw_verification,
)
from specter_jax.report.figures_timeline import draw_timeline
from specter_jax.report.style import Panel

Draw = Callable[[list[dict[str, Any]]], Panel | None]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One figure: the section of the records, the paper's number, its title, and how it was got.

    draw: the records of one setting, at least one, to a panel; None if they do not suffice.
    """

    section: str
    number: str
    title: str
    method: str
    draw: Draw


CATALOGUE = (
    Entry(
        "match",
        "Figure 2",
        "Expert match between draft and target",
        "Draft and target route the same drafted positions; an observation is one position in one "
        "layer.",
        draw_match,
    ),
    Entry(
        "distinct",
        "Figures 3 and 4",
        "Distinct experts over depth",
        "Experts that the target chose in one layer for all positions of one verification, counted "
        "once each.",
        draw_distinct,
    ),
    Entry(
        "depth",
        "Figure 7",
        "Time per token over depth",
        "The lookahead policy, one sequence. Auto has tried the depths in a pass before. The "
        "fastest of several passes counts, here and in figures 14 and 15.",
        draw_depth,
    ),
    Entry(
        "timeline",
        "Figure 9",
        "One iteration as it ran",
        "From the runtime's own trace, on the host's clock: the iteration of median length of one "
        "generation. The dashed line is the begin of verification.",
        draw_timeline,
    ),
    Entry(
        "prefill",
        "Figure 10",
        "Prefill latency and memory",
        "Median time of the prompt's pass through the target, and the most device memory in use. "
        "On a CPU the latter is the bytes of all arrays at the end.",
        draw_prefill,
    ),
    Entry(
        "draft",
        "Figure 11",
        "Formats of the draft's experts",
        "The draft's arithmetic alone, nothing offloaded: routed experts at full precision, in "
        "INT4 written out before they are multiplied, and in INT4 decoded within the product; the "
        "fastest of several calls. On a CPU plain JAX stands in for the kernels, and its times say "
        "little about a GPU's.",
        draw_draft_formats,
    ),
    Entry(
        "verification",
        "Figure 12",
        "Token-wise and expert-wise verification",
        "The routed experts of one layer with recorded routing, everything resident; the fastest "
        "of several calls.",
        draw_verification,
    ),
    Entry(
        "diversity",
        "Figure 13",
        "Routing diversity of data sets",
        "Greedy text, first tokens of each prompt. Distances are between the tasks' shares of "
        "choices per expert, base 2, averaged over layers.",
        draw_diversity,
    ),
    Entry(
        "end_to_end",
        "Figure 14",
        "Time per token end to end",
        "One sequence at a time. Systems are configurations of this runtime with the same kernels, "
        "see the table of systems; only transformers is its own library. Where a system was not "
        "run at its own depth, its fastest fixed depth stands for it. With random weights only the "
        "time means anything, not the text. On a CPU transfers cost next "
        "to nothing, so that times there differ by the work of the host, not by waiting.",
        draw_end_to_end,
    ),
    Entry(
        "batch",
        "Figure 15",
        "Batches",
        "Different prompts decoded together, of one of the models.",
        draw_batch,
    ),
    Entry(
        "batch_experts",
        "Figure 16",
        "Distinct experts over batch size",
        "As figures 3 and 4, for all sequences of a batch together.",
        draw_batch_experts,
    ),
    Entry(
        "hit_rate",
        "Figure 17",
        "Hit rates of the policies",
        "One use is one distinct expert of one layer and verification. On a CPU a transfer is a "
        "copy of microseconds, so that whatever was issued is in time.",
        draw_hit_rate,
    ),
    Entry(
        "planner",
        "Planner",
        "Predicted and measured time per token",
        "What specter plan predicts from recorded routing for the measured cells of figure 14.",
        draw_planner,
    ),
)
