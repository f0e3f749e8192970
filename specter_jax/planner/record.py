"""Records a routing trace from a loaded model: draft and target on the same text."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from specter_jax.errors import InvalidRequestError
from specter_jax.models import draft_step, init_kv, verify
from specter_jax.planner.traces import MIN_OUTPUTS, RoutingTrace
from specter_jax.text import encode_prompts, load_tokenizer

if TYPE_CHECKING:
    from specter_jax.model import Model


def record_trace(
    model: Model,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    source: str = "recorded",
) -> RoutingTrace:
    """Decodes greedily from every prompt, ends of sequence ignored, and keeps both routings.

    At each position the draft runs one step ahead of the target, on the target's KV. Prompts are
    cut to the last tokens of as many as the shortest has.

    Args:
        model: with a slot for every expert.
        source: what the trace says of where it comes from.

    Raises:
        InvalidRequestError: experts are missing, or the context does not hold the text.
        PromptError: a prompt is malformed.
    """
    if not model.pool.cache.resident.all():
        raise InvalidRequestError(
            "recording needs a slot for every expert: load the model without a budget"
        )
    prompt_ids = prompts_to_record(
        model.path,
        prompts,
        max_new_tokens=max_new_tokens,
        max_context=model.runtime.max_context,
    )
    width = len(prompt_ids[0])
    rows = [_record(model, prompt, max_new_tokens) for prompt in prompt_ids]
    target, draft, *argmax = (np.stack(part) for part in zip(*rows, strict=True))
    target_argmax, draft_argmax = (ids[:, width - 1 : -1].astype(np.uint32) for ids in argmax)
    narrow = np.uint8 if model.config.num_experts <= 256 else np.uint16
    return RoutingTrace(
        target_experts=target.transpose(2, 0, 1, 3).astype(narrow),
        draft_experts=draft.transpose(2, 0, 1, 3).astype(narrow),
        target_argmax=target_argmax,
        draft_argmax=draft_argmax,
        prompt_tokens=width,
        source=source,
        num_experts=model.config.num_experts,
    )


def prompts_to_record(
    path: str | os.PathLike[str],
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    max_context: int,
) -> list[np.ndarray]:
    """Token ids of the prompts, int32 of equal length: the last ones, as many as the shortest has.

    Needs the tokenizer alone, so that a request can be refused before the model is loaded. Raises
    as `record_trace` does.
    """
    ids = encode_prompts(load_tokenizer(path), prompts, chat=False)
    width = min(map(len, ids), default=0)
    if width < 1 or max_new_tokens < MIN_OUTPUTS or width + max_new_tokens > max_context:
        raise InvalidRequestError(
            f"prompts of {width} tokens and {max_new_tokens} new tokens: expected at least 1 and "
            f"{MIN_OUTPUTS}, and {max_context} together at most"
        )
    return [prompt[-width:] for prompt in ids]


def _record(model: Model, prompt: np.ndarray, new_tokens: int) -> tuple[np.ndarray, ...]:
    """One prompt: experts [positions, M, k] of target and draft, most likely next tokens of both.

    The last position is the last output's own: its routing is kept, what it yields is not.
    """
    config, params = model.config, model.params
    slots, table = model.pool.slots, model.pool.table()
    run_draft = jax.jit(draft_step, static_argnums=0, donate_argnums=2)
    run_target = jax.jit(verify, static_argnums=0, donate_argnums=2, static_argnames="keep_hidden")
    positions = len(prompt) + new_tokens
    # One entry more for the padding that a verification of one token has.
    kv = init_kv(config, 1, positions + 1, jnp.dtype(model.dtype))
    text = [int(token) for token in prompt]
    kept: list[tuple[np.ndarray, ...]] = []
    mask, active = np.array([[True, False]]), np.array([True])
    for position in range(positions):
        length = np.array([position], np.int32)
        token = np.array([text[position]], np.int32)
        logits, named, kv = run_draft(config, params, kv, token, length, active)
        pair = np.array([[text[position], 0]], np.int32)
        out, kv = run_target(
            config, params, kv, slots, table, pair, length, mask, keep_hidden=False
        )
        likely = np.asarray(out.logits[0, 0]).argmax()
        kept.append(
            (
                np.asarray(out.experts)[:, 0, 0],
                np.asarray(named)[:, 0],
                likely,
                np.asarray(logits[0]).argmax(),
            )
        )
        if position >= len(prompt) - 1:
            text.append(int(likely))
    return tuple(np.stack(part) for part in zip(*kept, strict=True))
