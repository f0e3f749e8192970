"""Which expert is applied to which rows: a list of blocks, made without sorting.

A choice is one entry of `experts [rows, k]`, numbered `row * k + position`. A block is one expert
and up to `block_rows` of its choices, in order. Experts come in order of their ids, and after them
the choices that select nothing (no such expert, or not resident), so that their outputs can be
zeroed. Example with block_rows 2 and experts [[0, 2], [2, 0], [2, 9]] of 3: expert 0 has choices 0
and 3, expert 2 has 1, 2 and 4, so the blocks are (0: 0, 3), (2: 1, 2), (2: 4, none), (3: 5, none).

Here in plain JAX; `triton_grouping.py` does it in one kernel.
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

    block_expert: [num_blocks], num_experts where choices select nothing or no block is left.
    block_choices: [num_blocks, block_rows], number of choices where a place is empty.
    rank: [rows * k], the place of a choice in its row when sorted by expert id.
    misses: scalar, distinct experts that are chosen and not resident.
    """

    block_expert: jax.Array
    block_choices: jax.Array
    rank: jax.Array
    misses: jax.Array


def most_blocks(num_rows: int, top_k: int, num_experts: int, block_rows: int) -> int:
    """Blocks that `num_rows` rows can need at most: each expert's last one may be part full."""
    num_choices = num_rows * top_k
    return min(num_choices, num_experts + 1 + num_choices // block_rows)


def count_misses(experts: jax.Array, slot_row: jax.Array) -> jax.Array:
    """Distinct experts that are chosen and not resident, an int32 scalar.

    experts: int32 [..., k], an id of num_experts or more counts as nothing. slot_row: int32
    [num_experts].
    """
    ids = jnp.arange(slot_row.shape[0], dtype=experts.dtype)
    needed = (experts.reshape(-1, 1) == ids).any(0)
    return (needed & (slot_row == NOT_RESIDENT)).sum(dtype=jnp.int32)


def group_choices(experts: jax.Array, slot_row: jax.Array, block_rows: int) -> Grouping:
    """Groups choices by expert, those that select nothing last.

    experts: int32 [rows, k], an id of num_experts or more selects nothing. slot_row: int32
    [num_experts]. Counting instead of sorting: some ten small reductions on a GPU.
    """
    num_rows, top_k = experts.shape
    num_experts = slot_row.shape[0]
    num_choices = num_rows * top_k
    num_blocks = most_blocks(num_rows, top_k, num_experts, block_rows)
    flat = experts.reshape(-1)
    ids = jnp.arange(num_experts + 1, dtype=jnp.int32)
    numbers = jnp.arange(num_choices, dtype=jnp.int32)

    def count(mask: jax.Array) -> jax.Array:
        return mask.sum(-1, dtype=jnp.int32)

    resident = slot_row != NOT_RESIDENT
    valid = (flat < num_experts) & resident[jnp.minimum(flat, num_experts - 1)]
    group = jnp.where(valid, flat, num_experts)
    earlier = count((group[:, None] == group) & (numbers < numbers[:, None]))
    counts = count(ids[:, None] == group)
    blocks = (counts + block_rows - 1) // block_rows
    ends = jnp.where(ids <= ids[:, None], blocks, 0).sum(-1, dtype=jnp.int32)
    block_numbers = jnp.arange(num_blocks, dtype=jnp.int32)
    block_expert = count(ends[:num_experts] <= block_numbers[:, None])

    place = (ends - blocks)[group] * block_rows + earlier
    block_choices = jnp.full((num_blocks * block_rows,), num_choices, jnp.int32)
    block_choices = block_choices.at[place].set(numbers)

    left, right = experts[:, :, None], experts[:, None, :]
    position = jnp.arange(top_k, dtype=jnp.int32)
    before = (right < left) | ((right == left) & (position < position[:, None]))
    return Grouping(
        block_expert=block_expert,
        block_choices=block_choices.reshape(num_blocks, block_rows),
        rank=count(before).reshape(-1),
        misses=count_misses(experts, slot_row),
    )
