"""Small dense products: one signature, and the choice of who computes it.

On an NVIDIA GPU the kernels take calls of at most `MOST_TOKENS` tokens a sequence, whatever the
number of sequences; longer ones are prompts, which XLA multiplies well. A single token of a single
sequence is a draft's (verification has two at least) and takes a kernel of its own, whose bits are
not those of the others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.small_dense import pallas_triton, reference
from pallas_kernels.small_dense.config import config_for, unsupported_reason
from pallas_kernels.small_dense.operands import Dense, Norm

Implementation = Literal["vector", "rows", "reference"]
MOST_TOKENS = 32
"""Tokens of a sequence up to which the kernels are taken; depth 16 verifies 17."""


@dataclasses.dataclass(frozen=True)
class Normalized:
    """The norm of a stream, not computed yet: `products` applies it while it reads weights.

    stream: [..., in]. Converts itself to an array wherever one is wanted.
    """

    stream: jax.Array
    norm: Norm

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the stream."""
        return self.stream.shape

    @property
    def ndim(self) -> int:
        """That of the stream."""
        return self.stream.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """That of the stream."""
        return self.stream.dtype

    def __jax_array__(self) -> jax.Array:
        return normalize(self.stream, self.norm)


def normalize(
    x: jax.Array, norm: Norm, *, implementation: Literal["rows", "reference"] | None = None
) -> jax.Array:
    """x: [..., in] -> its norm, the same shape and dtype.

    implementation: None takes the kernel where `products` would take one.

    Raises:
        NotImplementedError: `implementation="rows"` cannot run this; the text says why.
    """
    reason = _why_not_pallas(x, [norm.weight])
    if implementation is None:
        implementation = "reference" if reason or _is_prompt(x) else "rows"
    if implementation == "reference":
        return reference.normalize(x, norm)
    if reason:
        raise NotImplementedError(f"normalize by Pallas: {reason}")
    config = config_for(x.shape[-1], 0, x.dtype.name, tuning.device_kind())
    flat = x.reshape(-1, x.shape[-1])
    return pallas_triton.normalize(flat, norm, config=config).reshape(x.shape)


def normalized(x: jax.Array, norm: Norm) -> jax.Array | Normalized:
    """The norm of x [..., in]; deferred where `products` normalizes at no cost."""
    if _is_single_row(x) and not _why_not_pallas(x, [norm.weight]):
        return Normalized(x, norm)
    return normalize(x, norm)


def products(
    x: jax.Array | Normalized,
    parts: Sequence[Dense],
    *,
    keep_input: bool = False,
    implementation: Implementation | None = None,
) -> list[jax.Array]:
    """Several products of the same input, in one kernel where there is one.

    x: [..., in]. parts: see `Dense`. keep_input: also return x as an array, normalized, last.
    implementation: None takes the kernels on an NVIDIA GPU for few tokens, see above. Returns
    [..., out] of every part.

    Raises:
        NotImplementedError: a kernel was asked for and cannot run this; the text says why.
        ValueError: unknown implementation, or "vector" for more than one row.
    """
    weights = [side for part in parts for side in (part.weight, part.up) if side is not None]
    reason = _why_not_pallas(x, weights)
    if implementation is None:
        implementation = _choose(x, reason)
    if implementation not in ("vector", "rows", "reference"):
        raise ValueError(
            f'implementation must be "vector", "rows", "reference" or None, got {implementation!r}'
        )
    if implementation == "vector" and not _is_single_row(x):
        raise ValueError(f'"vector" takes a single row, got x of shape {x.shape}')
    if implementation == "reference":
        x = _array(x)
        outputs = reference.products(x, parts)
        return [*outputs, x] if keep_input else outputs
    if reason:
        raise NotImplementedError(f"products by Pallas: {reason}")
    num_out = sum(weight.shape[0] for weight in weights)
    config = config_for(x.shape[-1], num_out, x.dtype.name, tuning.device_kind())
    flat = [_flat_part(part) for part in parts]
    if implementation == "vector":
        stream, norm = (x.stream, x.norm) if isinstance(x, Normalized) else (x, None)
        keep = keep_input and norm is not None
        outputs = pallas_triton.vector(_flat(stream), flat, norm, keep_normed=keep, config=config)
        outputs = outputs if keep or not keep_input else [*outputs, stream]
    else:
        x = _array(x)
        outputs = pallas_triton.rows(_flat(x), flat, config=config)
        outputs = [*outputs, x] if keep_input else outputs
    return [output.reshape(*x.shape[:-1], output.shape[-1]) for output in outputs]


def runs_in_kernels(x: jax.Array) -> bool:
    """Whether `products` of x [..., in] take kernels, for weights of x's dtype."""
    return _choose(x, _why_not_pallas(x, [])) != "reference"


def _array(x: jax.Array | Normalized) -> jax.Array:
    return normalize(x.stream, x.norm) if isinstance(x, Normalized) else x


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _flat_part(part: Dense) -> Dense:
    scale = None if part.scale is None else _flat(part.scale)
    terms = None if part.terms is None else part.terms.reshape(-1, *part.terms.shape[-2:])
    add = tuple(_flat(term) for term in part.add)
    return dataclasses.replace(part, scale=scale, terms=terms, add=add)


def _is_single_row(x: jax.Array | Normalized) -> bool:
    return math.prod(x.shape[:-1]) == 1


def _is_prompt(x: jax.Array | Normalized) -> bool:
    return x.ndim > 1 and x.shape[-2] > MOST_TOKENS


def _choose(x: jax.Array | Normalized, reason: str | None) -> Implementation:
    if reason or _is_prompt(x):
        return "reference"
    return "vector" if _is_single_row(x) else "rows"


def _why_not_pallas(x: jax.Array | Normalized, weights: Sequence[jax.Array]) -> str | None:
    if not tuning.is_cuda_gpu():
        return f"needs an NVIDIA GPU, the default device is {tuning.device_kind()}"
    names = {x.dtype.name, *(weight.dtype.name for weight in weights)}
    return unsupported_reason(x.shape[-1], names)
