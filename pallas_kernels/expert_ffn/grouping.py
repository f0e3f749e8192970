"""Which expert is applied to which rows: a list of blocks, made without sorting.

A choice is one entry of `experts [rows, k]`, numbered `row * k + position`. A block is one expert
and up to `block_rows` of its choices, in order. Experts come in order of their ids. Example with
block_rows 2 and experts [[0, 2], [2, 0], [2, 9]] of 3: expert 0 has choices 0 and 3, expert 2 has
1, 2 and 4, so the blocks are (0: 0, 3), (2: 1, 2), (2: 4, none).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.constants import NOT_RESIDENT


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouping:
    """Blocks of choices; all int32, sizes static.

    block_expert: [num_blocks], num_experts where no block is left.
    block_choices: [num_blocks, block_rows], number of choices where a place is empty.
    rank: [rows, k], the place of a choice in its row when sorted by expert id.
    valid: bool [rows, k], choices of resident experts.
    """

    block_expert: jax.Array
    block_choices: jax.Array
    rank: jax.Array
    valid: jax.Array


def most_blocks(num_rows: int, top_k: int, num_experts: int, block_rows: int) -> int:
    """Blocks that `num_rows` rows can need at most: each expert's last one may be part full."""
    num_choices = num_rows * top_k
    return min(num_choices, num_experts + num_choices // block_rows)


def group_choices(experts: jax.Array, slot_row: jax.Array, block_rows: int) -> Grouping:
    """Groups choices by expert, leaving out experts that are not resident.

    experts: int32 [rows, k], an id of num_experts or more selects nothing. slot_row: int32
    [num_experts]. Counting instead of sorting: a few small fused reductions on a GPU.
    """
    num_rows, top_k = experts.shape
    num_experts = slot_row.shape[0]
    num_choices = num_rows * top_k
    num_blocks = most_blocks(num_rows, top_k, num_experts, block_rows)
    flat = experts.reshape(-1)
    ids = jnp.arange(num_experts, dtype=jnp.int32)
    numbers = jnp.arange(num_choices, dtype=jnp.int32)

    def count(mask: jax.Array) -> jax.Array:
        return mask.sum(-1, dtype=jnp.int32)

    resident = slot_row != NOT_RESIDENT
    safe = jnp.minimum(flat, num_experts - 1)
    valid = (flat < num_experts) & resident[safe]
    earlier = count((flat[:, None] == flat) & (numbers < numbers[:, None]))
    counts = count(ids[:, None] == flat) * resident
    blocks = (counts + block_rows - 1) // block_rows
    ends = jnp.where(ids <= ids[:, None], blocks, 0).sum(-1, dtype=jnp.int32)
    block_numbers = jnp.arange(num_blocks, dtype=jnp.int32)
    block_expert = count(ends <= block_numbers[:, None])

    place = (ends - blocks)[safe] * block_rows + earlier
    place = jnp.where(valid, place, num_blocks * block_rows)
    block_choices = jnp.full((num_blocks * block_rows,), num_choices, jnp.int32)
    block_choices = block_choices.at[place].set(numbers, mode="drop")

    left, right = experts[:, :, None], experts[:, None, :]
    position = jnp.arange(top_k, dtype=jnp.int32)
    before = (right < left) | ((right == left) & (position < position[:, None]))
    return Grouping(
        block_expert=block_expert,
        block_choices=block_choices.reshape(num_blocks, block_rows),
        rank=count(before),
        valid=valid.reshape(num_rows, top_k),
    )
