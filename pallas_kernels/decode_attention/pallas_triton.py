"""Attention for decoding in Triton kernels: prepare, attend to each split, combine.

Latent attention adds the mapping to values, in the combining kernel where tokens are few. Arguments
and results are those of `reference.py`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention import triton_combine
from pallas_kernels.decode_attention.config import DecodeAttentionConfig
from pallas_kernels.decode_attention.triton_attend import attend_splits
from pallas_kernels.decode_attention.triton_prepare import prepare_grouped, prepare_latent

_OPTIONS = ("window", "scale", "interleaved", "compute_dtype", "config", "interpret")


# Jitted, so that the layers of a model are traced and lowered once.
@functools.partial(jax.jit, static_argnames=(*_OPTIONS, "eps"))
def attend_latent(
    q: jax.Array,
    compressed: jax.Array,
    norm_weight: jax.Array,
    kv_up: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    latent: jax.Array,
    rope: jax.Array,
    lengths: jax.Array,
    *,
    window: int,
    scale: float,
    interleaved: bool,
    eps: float,
    compute_dtype: jax.typing.DTypeLike,
    config: DecodeAttentionConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `reference.attend_latent`. interpret: run on any device, slowly."""
    batch, tokens, heads, head_dim = q.shape
    nope = head_dim - rope.shape[2]
    lengths = lengths.astype(jnp.int32)
    launch = dict(config=config, interpret=interpret)
    q_latent, q_rope, latent, rope = prepare_latent(
        q,
        compressed,
        norm_weight,
        kv_up,
        cos,
        sin,
        latent,
        rope,
        lengths,
        interleaved=interleaved,
        eps=eps,
        dtype=compute_dtype,
        **launch,
    )
    splits = dict(tokens=tokens, window=window, **launch)
    combining = dict(dtype=compute_dtype, capacity=latent.shape[1], **splits)
    attended = []
    for part in _parts(batch, tokens * heads * latent.shape[2], latent.shape[1], config):
        partials = attend_splits(
            (q_latent, q_rope),
            (latent[:, :, None], rope[:, :, None]),
            None,
            lengths,
            scale=scale,
            first_sequence=part.start,
            num_sequences=len(part),
            **splits,
        )
        if batch * tokens <= config.most_fused_rows:
            output = triton_combine.combine_and_map_values(
                partials, lengths, kv_up, nope=nope, **combining
            )
            return output.reshape(batch, tokens, heads, -1), latent, rope
        attended.append(
            triton_combine.combine(partials, lengths, first_sequence=part.start, **combining)
        )
    output = triton_combine.map_values(_joined(attended), kv_up, nope=nope, **launch)
    return output.reshape(batch, tokens, heads, -1), latent, rope


@functools.partial(jax.jit, static_argnames=_OPTIONS)
def attend_grouped(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    lengths: jax.Array,
    *,
    window: int,
    scale: float,
    interleaved: bool,
    compute_dtype: jax.typing.DTypeLike,
    config: DecodeAttentionConfig,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `reference.attend_grouped`. interpret: run on any device, slowly."""
    batch, tokens, heads, _ = q.shape
    lengths = lengths.astype(jnp.int32)
    launch = dict(config=config, interpret=interpret)
    rotated, keys, values = prepare_grouped(
        q,
        k,
        v,
        cos,
        sin,
        keys,
        values,
        lengths,
        interleaved=interleaved,
        dtype=compute_dtype,
        **launch,
    )
    splits = dict(tokens=tokens, window=window, **launch)
    attended = []
    for part in _parts(batch, tokens * heads * values.shape[3], values.shape[1], config):
        partials = attend_splits(
            (rotated,),
            (keys,),
            values,
            lengths,
            scale=scale,
            first_sequence=part.start,
            num_sequences=len(part),
            **splits,
        )
        attended.append(
            triton_combine.combine(
                partials,
                lengths,
                first_sequence=part.start,
                dtype=compute_dtype,
                capacity=keys.shape[1],
                **splits,
            )
        )
    return _joined(attended).reshape(batch, tokens, heads, -1), keys, values


def _parts(
    batch: int, sums_per_sequence: int, capacity: int, config: DecodeAttentionConfig
) -> list[range]:
    """Sequences of each launch, such that partial results stay within the config's bound."""
    size = sums_per_sequence * config.num_splits(capacity) * 4
    at_once = max(1, min(batch, config.most_partial_bytes // size))
    return [range(first, min(first + at_once, batch)) for first in range(0, batch, at_once)]


def _joined(parts: list[jax.Array]) -> jax.Array:
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
