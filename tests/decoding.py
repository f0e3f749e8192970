"""Runs the target on a token sequence the way a decoder would: a prompt, then token by token."""

from __future__ import annotations

from inspect import signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specter_jax.config import ModelConfig
from specter_jax.models import init_kv, prefill, verify

jit_prefill = jax.jit(prefill, static_argnums=0, static_argnames="keep_hidden")
jit_verify = jax.jit(verify, static_argnums=0, static_argnames="keep_hidden")


def decode_logits(
    config: ModelConfig,
    shared: dict[str, Any],
    slots: np.ndarray,
    slot_table: np.ndarray,
    tokens: np.ndarray,
    prompt_length: int,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> np.ndarray:
    """Logits at the prompt's last position and at each later token, one cached step each.

    tokens: int32 [length]. Returns float32 [length - prompt_length + 1, vocab].
    """
    params = jax.device_put({"shared": shared})
    slots, slot_table = jnp.asarray(slots), jnp.asarray(slot_table)
    kv = init_kv(config, 1, len(tokens) + 2, dtype)
    prompt = tokens[None, :prompt_length].astype(np.int32)
    mask, zero = np.ones(prompt.shape, bool), np.zeros(1, np.int32)
    last = np.array([prompt_length - 1], np.int32)
    outputs, kv = jit_prefill(
        config, params, kv, slots, slot_table, prompt, zero, mask, last, keep_hidden=False
    )
    logits = [np.asarray(outputs.logits[0])]
    mask = np.array([[True, False]])
    for position in range(prompt_length, len(tokens)):
        step = np.array([[tokens[position], 0]], np.int32)
        length = np.array([position], np.int32)
        outputs, kv = jit_verify(
            config, params, kv, slots, slot_table, step, length, mask, keep_hidden=False
        )
        logits.append(np.asarray(outputs.logits[0, 0]))
    return np.stack(logits)


def transformers_logits(model: Any, tokens: np.ndarray, prompt_length: int) -> np.ndarray:
    """The same from a transformers model, with its own cache."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    # The argument's name differs between releases.
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    ids = torch.tensor(tokens[None].astype(np.int64))
    with torch.no_grad():
        logits = [model(ids[:, :prompt_length], **{name: cache}).logits[0, -1]]
        for i in range(prompt_length, len(tokens)):
            logits.append(model(ids[:, i : i + 1], **{name: cache}).logits[0, -1])
    return torch.stack(logits).float().numpy()


def relative_error(value: np.ndarray, reference: np.ndarray) -> float:
    """max|difference| / max|reference|."""
    return float(np.abs(value - reference).max() / np.abs(reference).max())
