"""Running a layer over fixed-size blocks of tokens, so that rounding ignores the token count.

XLA's CPU backend picks loop orders and library kernels by shape: the same row of a matrix product,
a softmax or a norm gets other bits among 9 rows than among 2. Verification must yield the bits
that decoding one by one yields, so on the CPU every per-token computation runs on blocks of
`TOKEN_BLOCK` tokens, padded, in a loop whose trip count is data: one compiled body for all lengths.
Other backends have kernels that keep a row's order of summation themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

TOKEN_BLOCK = 4

BlockBody = Callable[[jax.Array, Any, Any], tuple[Any, Any]]


def run_over_tokens(
    body: BlockBody, state: Any, inputs: Any, token_mask: jax.Array, *, at_once: bool = False
) -> tuple[Any, Any]:
    """`over_token_blocks` where rounding would depend on the token count, else one call of `body`.

    at_once: the caller does not need stable bits (a prompt is computed in the same pass however
    generation goes on). A single token never runs in blocks either: drafting needs no stable bits.
    """
    if jax.default_backend() != "cpu" or at_once or token_mask.shape[1] == 1:
        return body(jnp.int32(0), state, inputs)
    return over_token_blocks(body, state, inputs, token_mask)


def over_token_blocks(
    body: BlockBody, state: Any, inputs: Any, token_mask: jax.Array
) -> tuple[Any, Any]:
    """Runs `body` on consecutive blocks of tokens, up to the last unmasked token.

    body: `(offset, state, block of inputs) -> (state, block of outputs)`, offset int32. inputs:
    tree of arrays [batch, tokens, ...]. token_mask: bool [batch, tokens]. Returns the last state
    and the outputs, a tree of arrays [batch, tokens, ...], zero after the last block that ran.
    """
    num_tokens = token_mask.shape[1]
    # At least two blocks: XLA would simplify the slicing of a single one and fuse differently.
    padded = max(-(-num_tokens // TOKEN_BLOCK), 2) * TOKEN_BLOCK
    inputs = jax.tree.map(lambda x: _pad(x, padded), inputs)

    def block_of(offset: jax.Array) -> Any:
        return jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, offset, TOKEN_BLOCK, axis=1), inputs
        )

    shapes = jax.eval_shape(body, jnp.int32(0), state, jax.eval_shape(block_of, jnp.int32(0)))[1]
    outputs = jax.tree.map(lambda s: jnp.zeros((s.shape[0], padded, *s.shape[2:]), s.dtype), shapes)

    def step(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        state, outputs = carry
        offset = i * TOKEN_BLOCK
        state, new = body(offset, state, block_of(offset))
        outputs = jax.tree.map(
            lambda all_, block: lax.dynamic_update_slice_in_dim(all_, block, offset, axis=1),
            outputs,
            new,
        )
        return state, outputs

    index = jnp.arange(1, num_tokens + 1, dtype=jnp.int32)
    last = jnp.where(token_mask.any(0), index, 0).max()
    num_blocks = (last + TOKEN_BLOCK - 1) // TOKEN_BLOCK
    state, outputs = lax.fori_loop(0, num_blocks, step, (state, outputs))
    return state, jax.tree.map(lambda x: x[:, :num_tokens], outputs)


def _pad(x: jax.Array, num_tokens: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, num_tokens - x.shape[1])
    return jnp.pad(x, widths)
