"""Attention for decoding: one signature for each kind of cache, and who computes it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.choice import Implementation, takes_kernels
from pallas_kernels.decode_attention import pallas_triton, reference
from pallas_kernels.decode_attention.config import config_for, unsupported_reason


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
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention over latents; arguments and results as in `reference.attend_latent`.

    implementation: None takes the kernels on an NVIDIA GPU where they support the sizes, and the
    reference otherwise. The kernels update the cache in place where it is donated.

    Raises:
        NotImplementedError: `implementation="pallas"` cannot run this; the text says why.
        ValueError: unknown implementation.
    """
    arrays = (q, compressed, norm_weight, kv_up, cos, sin, latent, rope, lengths)
    options = dict(
        window=window, scale=scale, interleaved=interleaved, eps=eps, compute_dtype=compute_dtype
    )
    batch, tokens, heads, head_dim = q.shape
    rank, rope_dim = latent.shape[-1], rope.shape[-1]
    nope = head_dim - rope_dim
    dtype_name = jnp.dtype(compute_dtype).name
    reason = unsupported_reason(
        tokens,
        dtype_name,
        rank=rank,
        key_size=nope,
        rotated_size=rope_dim,
        value_size=kv_up.shape[1] - nope,
    )
    if not takes_kernels("attend_latent", implementation, reason):
        return reference.attend_latent(*arrays, **options)
    config = config_for(
        key_dim=rank + rope_dim,
        value_dim=rank,
        group=heads,
        num_tokens=tokens,
        batch=batch,
        dtype_name=dtype_name,
        device_kind=tuning.device_kind(),
    )
    return pallas_triton.attend_latent(*arrays, **options, config=config)


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
    implementation: Implementation | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention over keys and values; arguments and results as in `reference.attend_grouped`.

    implementation and errors: see `attend_latent`.
    """
    arrays = (q, k, v, cos, sin, keys, values, lengths)
    options = dict(window=window, scale=scale, interleaved=interleaved, compute_dtype=compute_dtype)
    batch, tokens, heads, head_dim = q.shape
    dtype_name = jnp.dtype(compute_dtype).name
    value_dim = values.shape[-1]
    reason = unsupported_reason(tokens, dtype_name, head_size=head_dim, value_size=value_dim)
    if not takes_kernels("attend_grouped", implementation, reason):
        return reference.attend_grouped(*arrays, **options)
    config = config_for(
        key_dim=head_dim,
        value_dim=value_dim,
        group=heads // keys.shape[2],
        num_tokens=tokens,
        batch=batch,
        dtype_name=dtype_name,
        device_kind=tuning.device_kind(),
    )
    return pallas_triton.attend_grouped(*arrays, **options, config=config)
