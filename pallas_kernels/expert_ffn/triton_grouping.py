"""Grouping of choices in one Triton kernel; a program places some choices and fills some blocks.

Each program counts all choices by itself, so that none waits for another: up to 64 choices, which
is one program, and a few thousand the same way. For few rows it also chooses the experts first.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import tuning
from pallas_kernels.constants import NOT_RESIDENT
from pallas_kernels.early_launch import let_next_start, supports_early_launch
from pallas_kernels.expert_ffn import grouping
from pallas_kernels.routing import RoutingRule, store_choices

_MOST_CHOICES = 1 << 14
_MOST_EXPERTS = 512
_MOST_WORK = 1 << 20  # comparisons of a program; plain reductions are as quick beyond
_TILE = 4096  # comparisons at once, in registers
_CHOICES = 64  # of a program, fewer where there are many experts
_MOST_ROUTED = 32  # rows whose experts every program chooses
_NO_EXPERT = -1  # beyond the last choice


def supported(num_choices: int, num_experts: int) -> bool:
    """Whether the kernel takes these sizes."""
    return (
        0 < num_choices <= _MOST_CHOICES
        and num_experts <= _MOST_EXPERTS
        and num_choices * num_experts <= _MOST_WORK
    )


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _count(mask, axis):
    return jnp.sum(mask.astype(jnp.int32), axis=axis)


def _route_kernel(
    logits_ref, used_ref, slot_row_ref, experts_ref, weights_ref, *out_refs, rule, rows, **options
):
    """Every program chooses for all rows, writes what the others write, and groups its share."""
    top_k, interpret = rule.top_k, options.pop("interpret")
    store_choices(logits_ref, used_ref, experts_ref, weights_ref, 0, rows, rule)
    if not interpret:
        plgpu.debug_barrier()  # its threads read each other's choices below

    _kernel(experts_ref, slot_row_ref, *out_refs, top_k=top_k, **options)


def _kernel(
    experts_ref,
    slot_row_ref,
    block_expert_ref,
    block_choices_ref,
    rank_ref,
    misses_ref,
    *,
    top_k,
    block_rows,
    choices_each,
    blocks_each,
    early_launch,
):
    """experts_ref: [rows, k]. block_choices_ref: [num_blocks * block_rows]."""
    num_choices, num_experts = rank_ref.shape[0], slot_row_ref.shape[0]
    num_blocks = block_expert_ref.shape[0]
    program = let_next_start(pl.program_id(0), early_launch)
    start = program * choices_each
    width = max(_power_of_two(num_experts), 16)
    ids = lax.broadcasted_iota(jnp.int32, (width,), 0)

    def experts_at(numbers):
        places = (numbers // top_k, numbers % top_k)
        return plgpu.load(experts_ref.at[places], mask=numbers < num_choices, other=_NO_EXPERT)

    slots = plgpu.load(slot_row_ref.at[ids], mask=ids < num_experts, other=NOT_RESIDENT)
    resident = slots != NOT_RESIDENT

    # How many choices each expert has, in all and before this program's.
    step = min(max(_TILE // width, 16), max(_power_of_two(num_choices), 16))

    def add(i, sums):
        numbers = i * step + lax.broadcasted_iota(jnp.int32, (step,), 0)
        match = (ids[:, None] == experts_at(numbers)[None]).astype(jnp.int32)
        total, before = sums
        return total + match, before + match * (numbers < start).astype(jnp.int32)[None]

    zeros = jnp.zeros((width, step), jnp.int32)
    total, before = lax.fori_loop(0, -(-num_choices // step), add, (zeros, zeros))
    total, before = jnp.sum(total, axis=1), jnp.sum(before, axis=1)
    counts, before = jnp.where(resident, total, 0), jnp.where(resident, before, 0)
    blocks = (counts + block_rows - 1) // block_rows
    ends = lax.cumsum(blocks)
    starts = ends - blocks
    num_full = jnp.sum(blocks)  # blocks of experts; choices that select nothing come after
    num_nothing = num_choices - jnp.sum(counts)

    # Where this program's choices stand.
    numbers = start + lax.broadcasted_iota(jnp.int32, (choices_each,), 0)
    inside = numbers < num_choices
    experts = experts_at(numbers)
    match = (ids[None] == experts[:, None]) & resident[None]
    valid = _count(match, 1) > 0
    place = jnp.sum(jnp.where(match, (starts * block_rows + before)[None], 0), axis=1)
    place = jnp.where(valid, place, num_full * block_rows + start - jnp.sum(before))
    group = jnp.where(valid, experts, num_experts)
    place += _count((group[None] == group[:, None]) & (numbers[None] < numbers[:, None]), 1)
    plgpu.store(block_choices_ref.at[place], numbers, mask=inside)

    row, position = numbers // top_k, numbers % top_k
    rank = jnp.zeros_like(numbers)
    for other in range(top_k):
        expert = experts_at(row * top_k + other)
        rank += ((expert < experts) | ((expert == experts) & (other < position))).astype(jnp.int32)
    plgpu.store(rank_ref.at[numbers], rank, mask=inside)

    # This program's share of blocks: their experts, and their empty places.
    block = program * blocks_each + lax.broadcasted_iota(jnp.int32, (blocks_each,), 0)
    real = (ids < num_experts)[None]
    expert = _count((ends[None] <= block[:, None]) & real, 1)
    plgpu.store(block_expert_ref.at[block], expert, mask=block < num_blocks)
    mine = (ids[None] == expert[:, None]) & real
    past = expert == num_experts
    first = jnp.where(past, num_full, jnp.sum(jnp.where(mine, starts[None], 0), axis=1))
    count = jnp.where(past, num_nothing, jnp.sum(jnp.where(mine, counts[None], 0), axis=1))
    used = count - (block - first) * block_rows
    shape = (blocks_each, block_rows)
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    plgpu.store(
        block_choices_ref.at[block[:, None] * block_rows + column],
        jnp.full(shape, num_choices, jnp.int32),
        mask=(column >= used[:, None]) & (block < num_blocks)[:, None],
    )

    @pl.when(program == 0)
    def _():
        missing = (total > 0) & ~resident & (ids < num_experts)
        plgpu.store(misses_ref.at[pl.ds(0, 1)], jnp.full((1,), _count(missing, 0), jnp.int32))


def group_choices(
    experts: jax.Array, slot_row: jax.Array, block_rows: int, *, interpret: bool = False
) -> grouping.Grouping:
    """As `grouping.group_choices`, which takes over for sizes that are not `supported`.

    block_rows: a power of two. interpret: run the kernel's arithmetic on any device, slowly.
    """
    if not supported(experts.size, slot_row.shape[0]):
        return grouping.group_choices(experts, slot_row, block_rows)
    options, outputs = _plan(experts.shape, slot_row.shape[0], block_rows, interpret)
    return _grouping(
        pl.pallas_call(
            functools.partial(_kernel, top_k=experts.shape[1], **options),
            out_shape=outputs,
            compiler_params=_PARAMS,
            name="group_choices",
            **_calling(experts.size, options, interpret),
        )(experts.astype(jnp.int32), slot_row.astype(jnp.int32)),
        block_rows,
    )


def routes(num_rows: int, num_experts: int, top_k: int) -> bool:
    """Whether `route_and_group` takes these sizes."""
    width = max(_power_of_two(num_experts), 16)
    few = num_rows <= _MOST_ROUTED and _power_of_two(num_rows) * width <= _TILE
    return few and supported(num_rows * top_k, num_experts)


def route_and_group(
    logits: jax.Array,
    mask: jax.Array,
    slot_row: jax.Array,
    rule: RoutingRule,
    block_rows: int,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, grouping.Grouping]:
    """`routing.choose_experts` and `group_choices` in one kernel, with the same bits.

    logits: float32 [rows, num_experts], sizes that it `routes`. mask: bool [rows]. Returns experts
    int32 and weights float32, [rows, k], and their grouping.
    """
    shape = (logits.shape[0], rule.top_k)
    options, outputs = _plan(shape, slot_row.shape[0], block_rows, interpret)
    experts, weights, *groups = pl.pallas_call(
        functools.partial(
            _route_kernel,
            rule=rule,
            rows=_power_of_two(logits.shape[0]),
            interpret=interpret,
            **options,
        ),
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.int32),
            jax.ShapeDtypeStruct(shape, jnp.float32),
            *outputs,
        ],
        compiler_params=_PARAMS,
        name="route_and_group",
        **_calling(shape[0] * shape[1], options, interpret),
    )(logits, mask.astype(jnp.int32), slot_row.astype(jnp.int32))
    return experts, weights, _grouping(groups, block_rows)


_PARAMS = plgpu.CompilerParams(num_warps=8, num_stages=1)


def _plan(shape, num_experts, block_rows, interpret):
    """The kernel's static arguments for experts of `shape`, and its outputs' shapes."""
    num_choices = shape[0] * shape[1]
    num_blocks = grouping.most_blocks(*shape, num_experts, block_rows)
    width = max(_power_of_two(num_experts), 16)
    choices_each = max(min(_CHOICES, 2 * _TILE // width), 16)
    num_programs = -(-num_choices // choices_each)
    options = dict(
        block_rows=block_rows,
        choices_each=choices_each,
        blocks_each=_power_of_two(-(-num_blocks // num_programs)),
        early_launch=not interpret and supports_early_launch(tuning.device_kind()),
    )
    sizes = (num_blocks, num_blocks * block_rows, num_choices, 1)
    return options, [jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes]


def _calling(num_choices, options, interpret):
    return dict(grid=(-(-num_choices // options["choices_each"]),), interpret=interpret)


def _grouping(outputs, block_rows):
    block_expert, block_choices, rank, misses = outputs
    return grouping.Grouping(
        block_expert=block_expert,
        block_choices=block_choices.reshape(-1, block_rows),
        rank=rank,
        misses=misses[0],
    )
