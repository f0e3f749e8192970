"""What `cells.py` measures at each budget, in which order, and what the time left allows.

A budget is visited once: another one means other slots, for which every program compiles anew, and
the device's peak only belongs to the budget if no larger one came before. So what matters less is
left out early enough for what matters more at the budgets that follow. Depths and batches compile
for shapes of their own and are swept at one budget only.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specter_jax.controller import AUTO
from specter_jax.offload import DEFAULT_POLICY, get_policy
from specter_jax.report.result_records import system_name
from specter_jax.systems import get_system

EXPECTED_S = {"cell": 8.0, "exact": 8.0, "prefill": 6.0, "overlap": 10.0}
"""Seconds that an item is taken to last until one like it was timed; compiling not included."""

LEAST_TOKENS = 16
"""New tokens of a sequence below which a time per token says too little."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One thing to measure.

    kind: "cell" (time per token), "exact" (a cell against plain decoding), "prefill" of `tokens`
    prompt tokens, or "overlap" (a device profile). rank: how much it matters, 0 the most.
    """

    kind: str
    rank: int
    policy: str = DEFAULT_POLICY
    depth: int | str = 0
    dataset: str = ""
    batch: int = 1
    tokens: int = 0

    @property
    def about(self) -> tuple[Any, ...]:
        """What tells it from others at one budget."""
        return self.kind, self.policy, self.depth, self.dataset, self.batch, self.tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """Items of one budget, GiB, with memory set aside for batches of `max_batch`."""

    budget: int
    max_batch: int
    items: tuple[Item, ...]


def stages(args: argparse.Namespace) -> list[Stage]:
    """Everything asked for: a stage per budget in ascending order, and one for the batches."""
    found = []
    for budget in sorted(args.budgets):
        found.append(Stage(budget=budget, max_batch=1, items=_once(_items(args, budget))))
        batches = [batch for batch in args.batches if batch > 1]
        if batches and budget == args.sweep_at:
            items = _once(_batch_items(args, batches))
            found.append(Stage(budget=budget, max_batch=max(batches), items=items))
    return found


def _once(items: Iterator[Item]) -> tuple[Item, ...]:
    """By rank. A policy and a system that are the same configuration are measured once."""
    first: dict[tuple[Any, ...], Item] = {}
    for item in sorted(items, key=lambda item: item.rank):
        first.setdefault(item.about, item)
    return tuple(first.values())


def _items(args: argparse.Namespace, budget: int) -> Iterator[Item]:
    main, *others = args.datasets
    depth, *more = args.depths
    sweeps = budget == args.sweep_at
    if DEFAULT_POLICY in args.policies:
        ours = {"policy": DEFAULT_POLICY, "depth": depth}
        checked = not args.exact_at or budget in args.exact_at
        yield Item(kind="cell", rank=0, dataset=main, **ours)
        if checked:
            yield Item(kind="exact", rank=0, dataset=main, **ours)
        for dataset in others:
            yield Item(kind="cell", rank=1, dataset=dataset, **ours)
            if checked:
                yield Item(kind="exact", rank=8, dataset=dataset, **ours)
        for other in more:
            yield Item(kind="cell", rank=4, depth=other, dataset=main)
    if not args.policies_at or budget in args.policies_at:
        for policy in args.policies:
            yield _cell(2, policy, depth, main)
    for dataset in args.datasets:
        for name in args.systems:
            system = get_system(name)
            own = budget in args.auto_at if system.depth == AUTO else True
            yield _cell(3, system.policy, system.depth if own else depth, dataset)
    if not sweeps:
        return
    # Auto needs every depth's programs, after it the fixed ones have nothing to compile.
    for other in sorted(args.sweep_depths, key=lambda other: other != AUTO):
        yield Item(kind="cell", rank=4, depth=other, dataset=main)
    for policy in args.batch_policies if args.batches else ():
        # The first point of its curve.
        yield _cell(5, policy, depth, main)
    for length in args.prefill:
        for name in args.prefill_systems:
            yield Item(kind="prefill", rank=6, policy=get_system(name).policy, tokens=length)
    if args.overlap:
        yield Item(kind="overlap", rank=7, depth=depth, dataset=main)


def _batch_items(args: argparse.Namespace, batches: Sequence[int]) -> Iterator[Item]:
    for policy in args.batch_policies:
        for batch in sorted(batches):
            yield _cell(5, policy, args.depths[0], args.datasets[0], batch)


def missing(plan: Sequence[Stage], known: Mapping[str, Any], model: str, fmt: str) -> list[Stage]:
    """The stages without what a result file (`results_file.py`) has of this model and format.

    Exactness is compared with a cell of the same run: where it is wanted and no cell has it, the
    cell is measured again. Stages with nothing left are gone.
    """
    mine = {"model": model, "expert_format": fmt}
    cells, prefills = (
        [e for e in known.get(name) or [] if all(e.get(k) == v for k, v in mine.items())]
        for name in ("cells", "prefill")
    )
    fields = ("budget_gib", "policy", "depth", "dataset", "batch")
    done = {tuple(cell.get(name) for name in fields): cell for cell in cells}
    prompts = {(e["budget_gib"], e.get("system"), e["prompt_tokens"]) for e in prefills}

    def wanted(stage: Stage) -> set[tuple[Any, ...]]:
        return {item.about for item in stage.items}

    def is_known(stage: Stage, item: Item) -> bool:
        if item.kind == "prefill":
            return (stage.budget, system_name({"policy": item.policy}), item.tokens) in prompts
        if item.kind == "overlap":
            return f"{model} {fmt}" in (known.get("overlap") or {})
        cell = done.get((stage.budget, item.policy, item.depth, item.dataset, item.batch))
        checked = dataclasses.replace(item, kind="exact").about in wanted(stage)
        return cell is not None and ("plain" in cell or not checked)

    left = (
        dataclasses.replace(stage, items=tuple(i for i in stage.items if not is_known(stage, i)))
        for stage in plan
    )
    return [stage for stage in left if stage.items]


def _cell(rank: int, policy: str, depth: int | str, dataset: str, batch: int = 1) -> Item:
    """A cell at that depth, at 0 if the policy does not speculate."""
    depth = depth if get_policy(policy).speculative else 0
    return Item(kind="cell", rank=rank, policy=policy, depth=depth, dataset=dataset, batch=batch)


class Timetable:
    """Knows how long items took, and from that whether another one still fits."""

    def __init__(self, plan: Sequence[Stage], limit_s: float) -> None:
        self._plan = plan
        self._limit_s = limit_s
        self._took: dict[tuple[Any, ...], float] = {}

    def expected_s(self, item: Item) -> float:
        """As long as the last item like it, at whatever budget and on whatever text."""
        return self._took.get(_like(item), EXPECTED_S[item.kind])

    def took(self, item: Item, seconds: float) -> None:
        """Notes how long an item lasted, what it had to compile included."""
        self._took[_like(item)] = seconds

    def fits(self, stage: int, item: Item, elapsed_s: float) -> bool:
        """Whether there is time for it and for all that matters more in later stages."""
        later = [other for later in self._plan[stage + 1 :] for other in later.items]
        kept = sum(self.expected_s(other) for other in later if other.rank < item.rank)
        return elapsed_s + self.expected_s(item) + kept <= self._limit_s


def _like(item: Item) -> tuple[Any, ...]:
    return item.kind, item.policy, item.depth, item.batch, item.tokens


def affordable(
    prompts: int,
    new_tokens: int,
    *,
    slow_prompts: int,
    ttft_ms: float,
    tpot_ms: float,
    cell_s: float,
) -> tuple[int, int]:
    """Prompts and new tokens of each that take `cell_s` seconds at most, one after the other.

    Slow ones get `slow_prompts` prompts, and fewer tokens if that is not enough, `LEAST_TOKENS` at
    least.
    """

    def seconds(count: int) -> float:
        return count * (ttft_ms + new_tokens * tpot_ms) / 1e3

    if seconds(prompts) <= cell_s:
        return prompts, new_tokens
    prompts = min(prompts, slow_prompts)
    if seconds(prompts) <= cell_s:
        return prompts, new_tokens
    tokens = int((cell_s * 1e3 / prompts - ttft_ms) / tpot_ms)
    return prompts, min(new_tokens, max(LEAST_TOKENS, tokens))


def compared(tokens: Sequence[Sequence[int]], longer: Sequence[Sequence[int]]) -> dict[str, Any]:
    """How many outputs begin the other's output, of how many, and where each first differs."""
    pairs = [(one, other[: len(one)]) for one, other in zip(tokens, longer, strict=False)]
    return {
        "identical": sum(list(one) == list(other) for one, other in pairs),
        "of": len(pairs),
        "first_difference": [
            next((i for i, (x, y) in enumerate(zip(*pair, strict=True)) if x != y), None)
            for pair in pairs
        ],
    }
