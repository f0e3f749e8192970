"""Rotary position embedding: frequencies and angles (the rotation itself is part of attention).

Frequencies follow `modeling_rope_utils.py` of transformers 5.24, which implements RoPE (Su et al.,
2104.09864), linear scaling, YaRN (Peng et al., 2309.00071), LongRoPE (Ding et al., 2402.13753) and
the Llama 3.1 rule. "dynamic" (NTK) equals "default" up to `max_context`, beyond which this
package does not go.

LongRoPE has two sets of frequencies. transformers picks one per call, by the largest position in
it. Decoding token by token that means: by the token's own position. A prompt, one call, takes all
its frequencies by its last position. We do exactly that, so verifying several tokens at once gives
each the rotation it would have had alone. (`generate` of transformers' phimoe also recomputes the
cache when a sequence first crosses the boundary; we do not, like its plain cached forward call.)
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from specter_jax.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, long: bool = False) -> np.ndarray:
    """Radians per token of each channel pair, float32 [dim / 2].

    long: the set for lengths beyond `rope.original_max` (longrope only).
    """
    exponents = np.arange(0, rope.dim, 2, dtype=np.float64) / rope.dim
    periods = rope.theta**exponents
    if rope.kind == "linear":
        frequencies = 1.0 / periods / rope.factor
    elif rope.kind == "yarn":
        frequencies = _yarn(rope, periods)
    elif rope.kind == "longrope":
        use_long = long and rope.long_frequencies
        factors = np.asarray(rope.long_factor if use_long else rope.short_factor)
        frequencies = 1.0 / (factors * periods)
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, 1.0 / periods)
    else:
        frequencies = 1.0 / periods
    return frequencies.astype(np.float32)


def attention_factor(rope: RopeConfig, long: bool = False) -> float:
    """What cos and sin are multiplied by."""
    override = rope.long_mscale if long else rope.short_mscale
    if override is not None:
        return override
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind == "yarn":
        if rope.mscale and rope.mscale_all_dim:
            return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
        return _mscale(rope.factor, 1.0)
    if rope.kind == "longrope" and rope.factor > 1.0:
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max))
    return 1.0


def _mscale(scale: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(scale) + 1.0 if scale > 1 else 1.0


def _yarn(rope: RopeConfig, periods: np.ndarray) -> np.ndarray:
    """Fast channels keep their frequency, slow ones are divided by `factor`, a ramp between."""

    def channel(rotations: float) -> float:
        """The channel that turns `rotations` times within the original context."""
        turns = rope.original_max / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(rope.dim // 2) - low) / (high - low), 0, 1)
    return ramp / (rope.factor * periods) + (1 - ramp) / periods


def _llama3(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Long wavelengths are divided by `factor`, medium ones interpolated."""
    wavelengths = 2 * np.pi / frequencies
    turns = rope.original_max / wavelengths
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = np.clip(smooth, 0, 1)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def rotation(
    rope: RopeConfig, positions: jax.Array, lengths_seen: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """cos and sin for each token and channel pair.

    positions: int32 [batch, tokens]. lengths_seen: int32 [batch, tokens], the sequence length that
    decides between short and long factors. Returns float32 [batch, tokens, dim / 2] twice.
    """
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(rope)
    scale: jax.Array | float = attention_factor(rope)
    if rope.depends_on_length:
        is_long = (lengths_seen > rope.original_max)[..., None]
        long_angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(rope, True)
        angles = jnp.where(is_long, long_angles, angles)
        scale = jnp.where(is_long, attention_factor(rope, True), scale)
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale
