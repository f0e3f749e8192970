"""Configurations, traces and costs for the planner's tests, with numbers easy to add up."""

from __future__ import annotations

import dataclasses
import json

import numpy as np

from specter_jax.config import ModelConfig
from specter_jax.planner.calibration import Calibration, load_calibration
from specter_jax.planner.timing import Hardware, ModelBytes, Timing
from specter_jax.planner.traces import RoutingTrace
from tests.conftest import TINY_SOURCE

CONFIG = ModelConfig.from_hf(json.loads((TINY_SOURCE / "config.json").read_text()))
"""Six layers, five of them MoE, with 32 experts of which a token chooses 4."""
LAYERS, EXPERTS, TOP_K = CONFIG.num_moe_layers, CONFIG.num_experts, CONFIG.top_k

FREE = dataclasses.replace(
    load_calibration(),
    **{
        field.name: 1.0 if field.name.endswith("_efficiency") else 0.0
        for field in dataclasses.fields(Calibration)
        if field.name.endswith(("_efficiency", "_us"))
    },
)
"""Nothing but bytes takes time."""

MODEL = ModelBytes(
    num_layers=CONFIG.num_layers, layer=6e6, head=8e6, draft_expert=1e6, expert=4e6, expert_read=4e6
)
HARDWARE = Hardware(bandwidth=1e12, link=20e9)
"""A millisecond for 1 GB of memory and 20 MB of the link."""


def timing(calibration: Calibration = FREE, **hardware: float) -> Timing:
    """The model above on the hardware above, some of it changed."""
    return Timing(
        model=MODEL,
        hardware=dataclasses.replace(HARDWARE, **hardware),
        calibration=calibration,
    )


def trace_of(
    target: np.ndarray, draft: np.ndarray, agree: np.ndarray, prompt_tokens: int
) -> RoutingTrace:
    """A trace whose two argmax are equal where `agree`, bool [P, outputs]."""
    return RoutingTrace(
        target_experts=target,
        draft_experts=draft,
        target_argmax=np.zeros(agree.shape, np.int32),
        draft_argmax=np.where(agree, 0, 1),
        prompt_tokens=prompt_tokens,
        source="made up",
    )


def random_trace(
    seed: int, *, prompts: int = 2, prompt_tokens: int = 1, outputs: int = 24, hot: float = 0.0
) -> RoutingTrace:
    """Target and draft choose alike, at random; `hot` draws choices to the first experts."""
    rng = np.random.default_rng(seed)
    shape = (LAYERS, prompts, prompt_tokens + outputs)
    taste = rng.gumbel(size=(*shape, EXPERTS)) - hot * np.arange(EXPERTS)
    experts = np.argsort(-taste, axis=-1)[..., :TOP_K]
    agree = rng.random((prompts, outputs)) < 0.9
    return trace_of(experts, experts.copy(), agree, prompt_tokens)
