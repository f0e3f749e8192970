"""What goes into the device programs and comes out of them, as trees of arrays."""

from __future__ import annotations

import flax.struct
import jax

from specter_jax.runtime_config import MAX_DEPTH


@flax.struct.dataclass
class Draws:
    """Sampling arguments that are traced, so that changing them compiles nothing.

    keys: typed PRNG keys [B], one per row; temperature, top_p: float32; top_k: int32 scalars.
    """

    keys: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array


MAX_STEPS = MAX_DEPTH + 1
"""Most draft steps of an iteration: the greatest depth, and one for the last position's routing."""


@flax.struct.dataclass
class DraftStart:
    """Where a draft begins, on the device: made by the host, or by the verification before it.

    last: int32 [B], the last committed tokens; lengths: int32 [B], KV entries below them; go: int32
    scalar, 1, or 0 where that verification lacked an expert: then no step runs.
    """

    last: jax.Array
    lengths: jax.Array
    go: jax.Array


@flax.struct.dataclass
class DraftChunk:
    """What some draft steps give; rows past the number of steps mean nothing.

    tokens: int32 [MAX_STEPS, B], host; experts: int32 [MAX_STEPS, M, B, k], host;
    last: int32 [B], device, the last step's tokens, the input of the next chunk;
    drafted: int32 [MAX_STEPS, B], device, the tokens once more.
    """

    tokens: jax.Array
    experts: jax.Array
    last: jax.Array
    drafted: jax.Array


@flax.struct.dataclass
class Verified:
    """What a verification of T positions gives; all but `hidden` and `start` in host memory.

    tokens: int32 [B, T], of which num_accepted + 1 count; num_accepted: int32 [B];
    experts: int32 [M, B, T, k]; misses: int32 [M]; hidden: [M, B, T, H] entering each MoE layer;
    start: where the next draft begins.
    """

    tokens: jax.Array
    num_accepted: jax.Array
    experts: jax.Array
    misses: jax.Array
    hidden: jax.Array
    start: DraftStart


@flax.struct.dataclass
class Stretch:
    """What n consecutive MoE layers give; valid before the first that missed an expert.

    hidden: [B, T, H]; entering: [n, B, T, H], the state before each layer, None of a prompt;
    experts: int32 [n, B, T, k], host, valid up to that layer; misses: int32 [n], host.
    """

    hidden: jax.Array
    entering: jax.Array
    experts: jax.Array
    misses: jax.Array
