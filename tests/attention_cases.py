"""Random inputs for the attention kernels' tests, and the same computations in float64 numpy."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of a latent attention; a case is `(arrays, options)` of `attend_latent`."""

    heads: int = 3
    nope: int = 16
    rope: int = 16
    value: int = 16
    rank: int = 32

    def case(self, batch, tokens, capacity, dtype=jnp.float32, *, lengths=None, window=0, seed=0):
        draw = _Draw(seed)
        arrays = (
            draw(batch, tokens, self.heads, self.nope + self.rope),
            draw(batch, tokens, self.rank + self.rope),
            1 + 0.1 * draw(self.rank),
            draw(self.heads, self.nope + self.value, self.rank) * self.rank**-0.5,
            *draw.angles(batch, tokens, self.rope // 2),
            draw(batch, capacity, self.rank).astype(dtype),
            draw(batch, capacity, self.rope).astype(dtype),
            draw.lengths(batch, tokens, capacity, lengths),
        )
        q, compressed, norm, up, *rest = arrays
        arrays = (*(part.astype(dtype) for part in (q, compressed, norm, up)), *rest)
        scale = (self.nope + self.rope) ** -0.5
        return arrays, _options(dtype, window, scale, interleaved=True) | {"eps": 1e-6}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouped:
    """Sizes of a grouped-query attention; a case is `(arrays, options)` of `attend_grouped`."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 16
    value: int = 16

    def case(self, batch, tokens, capacity, dtype=jnp.float32, *, lengths=None, window=0, seed=0):
        draw = _Draw(seed)
        new, cached = (batch, tokens), (batch, capacity)
        shapes = (
            (*new, self.heads, self.dim),
            (*new, self.kv_heads, self.dim),
            (*new, self.kv_heads, self.value),
        )
        arrays = (
            *(draw(*shape).astype(dtype) for shape in shapes),
            *draw.angles(batch, tokens, self.dim // 2),
            draw(*cached, self.kv_heads, self.dim).astype(dtype),
            draw(*cached, self.kv_heads, self.value).astype(dtype),
            draw.lengths(batch, tokens, capacity, lengths),
        )
        return arrays, _options(dtype, window, self.dim**-0.5, interleaved=False)


class _Draw:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __call__(self, *shape: int) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal(shape, np.float32))

    def angles(self, *shape: int) -> tuple[jax.Array, jax.Array]:
        angles = self.rng.uniform(0, 2 * np.pi, shape).astype(np.float32)
        return jnp.cos(angles), jnp.sin(angles)

    def lengths(self, batch, tokens, capacity, lengths) -> jax.Array:
        if lengths is None:
            lengths = self.rng.integers(0, capacity - tokens + 1, batch)
        return jnp.asarray(np.broadcast_to(lengths, batch), jnp.int32)


def _options(dtype, window: int, scale: float, *, interleaved: bool) -> dict[str, Any]:
    return dict(window=window, scale=scale, interleaved=interleaved, compute_dtype=dtype)


def error(value, expected) -> float:
    value, expected = (np.asarray(x, np.float64) for x in (value, expected))
    return float(np.linalg.norm(value - expected) / np.linalg.norm(expected))


_einsum = functools.partial(np.einsum, optimize=True)


def _rotate(x, cos, sin, interleaved):
    """x: [..., heads, dim]; cos, sin: [..., dim / 2]."""
    half = x.shape[-1] // 2
    first = slice(0, None, 2) if interleaved else slice(0, half)
    second = slice(1, None, 2) if interleaved else slice(half, None)
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated = np.empty_like(x)
    rotated[..., first] = x[..., first] * cos - x[..., second] * sin
    rotated[..., second] = x[..., second] * cos + x[..., first] * sin
    return rotated


def _attention(q, keys, values, lengths, window, scale):
    """q: [B, T, H, D]; keys: [B, S, H, D]; values: [B, S, H, V]."""
    entry = np.arange(keys.shape[1])
    position = np.asarray(lengths)[:, None, None] + np.arange(q.shape[1])[:, None]
    mask = (entry <= position) & (entry > position - (window or keys.shape[1] + 1))
    scores = _einsum("bthd,bshd->bhts", q, keys) * scale
    scores = np.where(mask[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return _einsum("bhts,bshv->bthv", weights, values)


def _append(entries, new, lengths):
    entries = entries.copy()
    for row, length in enumerate(np.asarray(lengths)):
        fitting = min(new.shape[1], entries.shape[1] - length)
        entries[row, length : length + fitting] = new[row, :fitting]
    return entries


def latent_float64(arrays, options):
    """The expanded form: every latent mapped to its heads' keys and values."""
    *floats, lengths = arrays
    q, compressed, norm, up, cos, sin, latent, rope = (np.asarray(x, np.float64) for x in floats)
    rank = latent.shape[-1]
    nope = q.shape[-1] - rope.shape[-1]
    turn = dict(interleaved=options["interleaved"])
    k_latent = compressed[..., :rank]
    k_latent = k_latent / np.sqrt((k_latent**2).mean(-1, keepdims=True) + options["eps"]) * norm
    k_rope = _rotate(compressed[..., None, rank:], cos, sin, **turn)[..., 0, :]
    latent, rope = _append(latent, k_latent, lengths), _append(rope, k_rope, lengths)
    q = np.concatenate([q[..., :nope], _rotate(q[..., nope:], cos, sin, **turn)], -1)
    keys = _einsum("bsr,hdr->bshd", latent, up[:, :nope])
    shared = np.broadcast_to(rope[:, :, None], (*keys.shape[:3], rope.shape[-1]))
    keys = np.concatenate([keys, shared], -1)
    values = _einsum("bsr,hvr->bshv", latent, up[:, nope:])
    attended = _attention(q, keys, values, lengths, options["window"], options["scale"])
    return attended, latent, rope


def grouped_float64(arrays, options):
    *floats, lengths = arrays
    q, k, v, cos, sin, keys, values = (np.asarray(x, np.float64) for x in floats)
    turn = dict(interleaved=options["interleaved"])
    keys = _append(keys, _rotate(k, cos, sin, **turn), lengths)
    values = _append(values, v, lengths)
    groups = q.shape[2] // keys.shape[2]
    attended = _attention(
        _rotate(q, cos, sin, **turn),
        np.repeat(keys, groups, 2),
        np.repeat(values, groups, 2),
        lengths,
        options["window"],
        options["scale"],
    )
    return attended, keys, values


def part(arrays, start: int, stop: int, cache) -> tuple:
    """The case of tokens start..stop-1 alone, on a cache that holds the earlier ones."""
    *new, _, _, lengths = arrays
    per_token = {0, 1, len(new) - 2, len(new) - 1} | ({2} if len(new) == 5 else set())
    new = [x[:, start:stop] if i in per_token else x for i, x in enumerate(new)]
    return (*new, *cache, lengths + start)


def row(arrays, index: int) -> tuple:
    """The case of one sequence alone."""
    shared = {2, 3} if len(arrays) == 9 else set()  # norm weights and projections
    return tuple(x if i in shared else x[index : index + 1] for i, x in enumerate(arrays))
