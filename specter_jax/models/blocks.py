"""Running a layer over fixed-size blocks of tokens, so that rounding ignores the token count.

XLA's CPU backend picks loop orders and library kernels by shape: the same row of a matrix product,
a softmax or a norm gets other bits among 9 rows than among 2. Verification must yield the bits
that decoding one by one yields, so on the CPU every per-token computation runs on blocks of
`TOKEN_BLOCK` tokens of one sequence, in a loop whose trip count is data: one compiled body for all
numbers of tokens and sequences. Other backends have kernels that keep a row's order of summation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

TOKEN_BLOCK = 4

Body = Callable[[jax.Array, Any, Any], tuple[Any, Any]]


def run_over_tokens(
    body: Body, state: Any, inputs: Any, lengths: jax.Array, token_mask: jax.Array
) -> tuple[Any, Any]:
    """`body` over token blocks on the CPU, else (or for a single token) in one call.

    A single token never runs in blocks: drafting needs no stable bits.

    body: `(start, state, inputs) -> (state, outputs)`, start int32 [batch], the position of the
    first token given. state: tree of arrays [batch, ...]. inputs: tree of arrays [batch, tokens,
    ...]. lengths: int32 [batch]. token_mask: bool [batch, tokens]. Returns the last state and the
    outputs, a tree of arrays [batch, tokens, ...], zero in blocks after the last unmasked token.
    """
    batch, num_tokens = token_mask.shape
    if jax.default_backend() != "cpu" or num_tokens == 1:
        return body(lengths, state, inputs)
    # At least two blocks: XLA would simplify the slicing of a single one and fuse differently.
    padded = max(-(-num_tokens // TOKEN_BLOCK), 2) * TOKEN_BLOCK
    inputs = jax.tree.map(lambda x: _pad(x, padded), inputs)
    index = jnp.arange(1, num_tokens + 1, dtype=jnp.int32)
    last = jnp.where(token_mask, index, 0).max(-1)
    row = (lengths[:1], _row(state, 0), _row(inputs, 0))
    blank = _blank_outputs(body, *row, padded)

    def run_row(i: Any, state: Any, outputs: Any) -> tuple[Any, Any]:
        start, end = _row((lengths, last), i)
        row_state, row_outputs = _over_blocks(
            body, start, end[0], _row(state, i), _row(inputs, i), blank
        )
        return _set(state, row_state, i, 0), _set(outputs, row_outputs, i, 0)

    if batch == 1:
        state, outputs = _over_blocks(body, lengths, last[0], state, inputs, blank)
    else:
        outputs = jax.tree.map(lambda x: jnp.zeros((batch, *x.shape[1:]), x.dtype), blank)
        state, outputs = lax.fori_loop(
            0, batch, lambda i, carry: run_row(i, *carry), (state, outputs)
        )
    return state, jax.tree.map(lambda x: x[:, :num_tokens], outputs)


def _over_blocks(
    body: Body, start: jax.Array, last: jax.Array, state: Any, inputs: Any, outputs: Any
) -> tuple[Any, Any]:
    """One sequence up to its `last` real token; arrays are [1, ...] and [1, padded, ...]."""

    def step(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        state, outputs = carry
        offset = i * TOKEN_BLOCK
        state, new = body(start + offset, state, _block(inputs, offset))
        return state, _set(outputs, new, offset, 1)

    num_blocks = (last + TOKEN_BLOCK - 1) // TOKEN_BLOCK
    return lax.fori_loop(0, num_blocks, step, (state, outputs))


def _blank_outputs(body: Body, start: Any, state: Any, inputs: Any, padded: int) -> Any:
    """Zeros of the shape that `body`'s outputs for all blocks of one sequence have."""
    shapes = jax.eval_shape(body, start, state, jax.eval_shape(_block, inputs, 0))[1]
    return jax.tree.map(lambda s: jnp.zeros((1, padded, *s.shape[2:]), s.dtype), shapes)


def _block(tree: Any, offset: Any) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, offset, TOKEN_BLOCK, axis=1), tree)


def _row(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index, 1, axis=0), tree)


def _set(tree: Any, part: Any, index: Any, axis: int) -> Any:
    return jax.tree.map(
        lambda x, y: lax.dynamic_update_slice_in_dim(x, y, index, axis=axis), tree, part
    )


def _pad(x: jax.Array, num_tokens: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, num_tokens - x.shape[1])
    return jnp.pad(x, widths)
