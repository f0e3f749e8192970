"""What the true-size bench measures, in which order, and what it leaves out when time is short."""

import argparse

import pytest

from scripts.bench import bench_tasks, cell_options, cell_plan, h200
from scripts.bench.cell_plan import Item, Stage, Timetable

FULL = (
    "--budgets 32 16 24 --policies lookahead sp-l lru --systems mo sp-moe specter "
    "--datasets qa code --sweep-depths 4 auto --batches 1 4 8 --batch-policies lookahead mo sp-e "
    "--prefill 512 --overlap"
)


def plan(text):
    parser = argparse.ArgumentParser()
    cell_options.add_cell_options(parser)
    return cell_plan.stages(cell_options.with_defaults(parser.parse_args(text.split())))


def test_each_budget_is_visited_once_in_ascending_order():
    stages = plan(FULL)
    assert [(s.budget, s.max_batch) for s in stages] == [(16, 1), (24, 1), (24, 8), (32, 1)]
    for stage in stages:
        ranks = [item.rank for item in stage.items]
        assert ranks == sorted(ranks)
        about = [item.about for item in stage.items]
        assert len(about) == len(set(about))


def test_a_budget_away_from_the_sweep():
    first = plan(FULL)[0]
    assert [item.about for item in first.items] == [
        ("cell", "lookahead", 8, "qa", 1, 0),
        ("exact", "lookahead", 8, "qa", 1, 0),
        ("cell", "lookahead", 8, "code", 1, 0),
        # sp-moe is sp-l, specter is lookahead: at the fixed depth here, measured already.
        ("cell", "sp-l", 8, "qa", 1, 0),
        ("cell", "lru", 0, "qa", 1, 0),
        ("cell", "mo", 0, "qa", 1, 0),
        ("cell", "mo", 0, "code", 1, 0),
        ("cell", "sp-l", 8, "code", 1, 0),
        ("exact", "lookahead", 8, "code", 1, 0),
    ]


def test_sweeps_are_at_the_middle_budget_and_systems_choose_their_depth_there():
    _, middle, batches, _ = plan(FULL)
    cells = {item.about[1:4] for item in middle.items if item.kind == "cell"}
    assert {("lookahead", depth, "qa") for depth in (4, 8, "auto")} <= cells
    assert {
        (name, "auto", text) for name in ("sp-l", "lookahead") for text in ("qa", "code")
    } < cells
    assert ("lookahead", 4, "code") not in cells
    prefills = [item for item in middle.items if item.kind == "prefill"]
    assert [(item.policy, item.tokens) for item in prefills] == [
        ("lookahead", 512),
        ("specmoeoff", 512),
        ("mo", 512),
    ]
    assert [item.kind for item in middle.items].count("overlap") == 1
    assert [(item.policy, item.depth, item.batch) for item in batches.items] == [
        (policy, depth, batch)
        for policy, depth in (("lookahead", 8), ("mo", 0), ("sp-e", 8))
        for batch in (4, 8)
    ]
    # Each curve over the batch begins at one sequence.
    assert {("lookahead", 8, "qa"), ("mo", 0, "qa"), ("sp-e", 8, "qa")} <= cells
    (only,) = plan("--budgets 16 --auto-at --systems specter --datasets qa")
    assert [item.depth for item in only.items if item.kind == "cell"] == [8]


def test_budgets_of_exactness_and_policies_can_be_chosen():
    text = "--budgets 16 24 --exact-at 24 --policies lookahead lru --policies-at 16"
    first, second = plan(text)
    assert [item.policy for item in first.items] == ["lookahead", "lru"]
    assert [item.kind for item in second.items] == ["cell", "exact"]


def test_time_is_kept_for_what_matters_more_later():
    ours, theirs = Item(kind="cell", rank=0), Item(kind="cell", rank=2, policy="lru")
    stages = [Stage(budget=b, max_batch=1, items=(ours, theirs)) for b in (16, 24)]
    times = Timetable(stages, limit_s=100.0)
    assert times.fits(0, theirs, elapsed_s=80.0)
    times.took(ours, 30.0)
    # What matters most waits for nothing; the rest leaves 30 s for it.
    assert times.fits(0, ours, elapsed_s=65.0)
    assert not times.fits(0, ours, elapsed_s=75.0)
    assert not times.fits(0, theirs, elapsed_s=65.0)
    assert times.fits(0, theirs, elapsed_s=60.0)
    assert times.fits(1, theirs, elapsed_s=90.0)
    times.took(theirs, 15.0)
    assert not times.fits(1, theirs, elapsed_s=90.0)
    assert Timetable(stages, float("inf")).fits(0, theirs, elapsed_s=1e9)


@pytest.mark.parametrize(
    ("tpot_ms", "expected"),
    [
        (10.0, (3, 128)),
        (60.0, (1, 128)),
        (300.0, (1, 48)),
        # Never so few that they say nothing.
        (5000.0, (1, 16)),
    ],
)
def test_slow_policies_get_fewer_prompts_and_then_fewer_tokens(tpot_ms, expected):
    options = {"slow_prompts": 1, "ttft_ms": 600.0, "cell_s": 15.0}
    assert cell_plan.affordable(3, 128, tpot_ms=tpot_ms, **options) == expected


def test_short_requests_do_not_grow():
    options = {"slow_prompts": 1, "ttft_ms": 0.0, "cell_s": 0.001}
    assert cell_plan.affordable(1, 4, tpot_ms=1.0, **options) == (1, 4)


def test_outputs_are_compared_as_far_as_the_shorter_goes():
    found = cell_plan.compared([[1, 2], [1, 5]], [[1, 2, 3], [1, 4, 3], [9, 9, 9]])
    assert found == {"identical": 1, "of": 2, "first_difference": [None, 1]}


def known_cell(item, stage, **more):
    own = {"policy": item.policy, "depth": item.depth, "dataset": item.dataset, "batch": item.batch}
    about = {"model": "m", "expert_format": "nested", "budget_gib": stage.budget}
    return about | own | more


def test_what_a_result_file_has_is_not_measured_again():
    full = plan(FULL)
    cells = [
        known_cell(item, stage, plain={"identical": 1})
        for stage in full
        for item in stage.items
        if item.kind == "cell"
    ]
    prompts = [
        {"model": "m", "expert_format": "nested", "budget_gib": 24, "prompt_tokens": 512} | system
        for system in ({"system": "specter"}, {"system": "specmoeoff"}, {"system": "mo"})
    ]
    known = {"cells": cells, "prefill": prompts, "overlap": {"m nested": {}}}
    assert cell_plan.missing(full, known, "m", "nested") == []
    assert cell_plan.missing(full, {}, "m", "nested") == full
    # Another format, model or file is nothing of this one's.
    assert cell_plan.missing(full, known, "m", "plain") == full
    assert cell_plan.missing(full, known, "n", "nested") == full
    # One budget's batches, one prompt and the profile are left.
    part = {"cells": [c for c in cells if c["batch"] == 1], "prefill": prompts[:2]}
    middle, batches = cell_plan.missing(full, part, "m", "nested")
    assert [item.about for item in middle.items] == [
        ("prefill", "mo", 0, "", 1, 512),
        ("overlap", "lookahead", 8, "qa", 1, 0),
    ]
    assert batches == full[2]


def test_a_cell_not_compared_with_plain_decoding_is_measured_with_it():
    (stage,) = plan("--budgets 16 --policies lookahead lru --datasets qa")
    known = {"cells": [known_cell(i, stage) for i in stage.items if i.kind == "cell"]}
    (left,) = cell_plan.missing([stage], known, "m", "nested")
    assert [(item.kind, item.policy) for item in left.items] == [
        ("cell", "lookahead"),
        ("exact", "lookahead"),
    ]
    (stage,) = plan("--budgets 16 --exact-at 24 --policies lookahead lru --datasets qa")
    assert cell_plan.missing([stage], known, "m", "nested") == []


def test_the_parts_that_take_long_are_told_what_is_known(tmp_path):
    given = ["--data", "d", "--out", str(tmp_path), "--parts", "cells", "baseline", "kernels"]
    for more, expected in (
        ([], None),
        (["--missing"], str(tmp_path / "h200.json")),
        (["--missing", "other.json"], "other.json"),
    ):
        for task in bench_tasks.tasks(h200.parse([*given, *more])):
            has = "--missing" in task.arguments
            assert has == (expected is not None and task.part != "kernels")
            assert not has or task.arguments[-1] == expected


@pytest.mark.parametrize("more", [[], ["--quick"]])
def test_what_h200_asks_for_are_options_of_cells(more):
    given = ["--data", "d", "--parts", "cells", "--cells-options", "--cell-s 3", *more]
    args = h200.parse(given)
    (task, *_) = bench_tasks.tasks(args)
    parser = argparse.ArgumentParser()
    cell_options.add_cell_options(parser)
    options = task.arguments[task.arguments.index("--policies") :]
    parsed = parser.parse_args([*options, "--budgets", "16"])
    assert parsed.cell_s == 3
    assert cell_plan.stages(cell_options.with_defaults(parsed))
