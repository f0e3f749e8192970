"""Predicting measured cells: which can be, with what, and how the errors come out."""

import pytest

from specter_jax.errors import InvalidRequestError
from specter_jax.planner.model import model_of_config
from specter_jax.planner.replay import replay
from specter_jax.planner.timing import Timing
from specter_jax.planner.validate import (
    errors,
    is_predictable,
    predict_measured,
    split_fitted,
    with_plain_decoding,
)
from tests.planner_cases import CONFIG, FREE, HARDWARE, random_trace

MODELS = {("tiny", form): model_of_config(CONFIG, FREE, form) for form in ("nested", "plain")}
TRACE = random_trace(11, outputs=16)


def cell(**changes):
    measured = {
        "model": "tiny",
        "expert_format": "plain",
        "budget_gib": 1,
        "policy": "lru-s",
        "depth": 2,
        "dataset": "stories",
        "batch": 1,
        "slots": 60,
        "stats": {"tpot_ms": 2.0},
    }
    return measured | changes


def test_guesses_of_the_next_layer_and_batches_are_not_predictable():
    assert is_predictable(cell())
    assert is_predictable(cell(policy="specmoeoff", depth="auto"))
    assert not is_predictable(cell(policy="mo"))
    assert not is_predictable(cell(policy="sp-e"))
    assert not is_predictable(cell(batch=4))


def test_rows_are_what_a_replay_gives_and_errors_follow():
    cells = [
        cell(),
        cell(dataset="code", stats={"tpot_ms": 4.0}),
        cell(expert_format="nested", slots=90),
        cell(policy="mo"),
    ]
    told = []
    rows = predict_measured(cells, MODELS, {"tiny": TRACE}, HARDWARE, FREE, told.append)
    assert told == rows
    assert [row["dataset"] for row in rows] == ["stories", "code", "stories"]
    for row, slots, form in zip(rows, (60, 60, 90), ("plain", "plain", "nested"), strict=True):
        model = MODELS["tiny", form]
        timing = Timing(model=model.read_bytes(), hardware=HARDWARE, calibration=FREE)
        stats = replay(
            CONFIG,
            TRACE,
            timing,
            num_slots=slots,
            max_in_flight=model.max_in_flight,
            depth=2,
            policy="lru-s",
        )
        assert row["predicted_tpot_ms"] == stats.tpot_ms
        assert row["predicted_hit_rate"] == stats.hit_rate
    times = [row["predicted_tpot_ms"] for row in rows]
    expected = [times[0] / 2 - 1, times[1] / 4 - 1, times[2] / 2 - 1]
    result = errors(rows)
    assert [c["error"] for c in result.cells] == pytest.approx(expected)
    assert result.mean_error == pytest.approx(sum(map(abs, expected)) / 3)


def test_plain_decoding_beside_a_cell_is_a_cell_of_depth_0():
    stats = {"tpot_ms": 2.0, "new_tokens": 20, "sequences": 2}
    beside = cell(stats=stats, plain={"tpot_ms": 5.0, "identical": 1})
    cells = with_plain_decoding([cell(), beside])
    assert cells[:2] == [cell(), beside]
    assert [(c["depth"], c["slots"], c["policy"]) for c in cells[2:]] == [(0, 60, "lru-s")]
    rows = predict_measured(cells, MODELS, {"tiny": TRACE}, HARDWARE, FREE)
    assert [row["measured_tpot_ms"] for row in rows] == [2.0, 2.0, 5.0]
    # Outputs of ten tokens, as measured, are not the trace's sixteen.
    timing = Timing(model=MODELS["tiny", "plain"].read_bytes(), hardware=HARDWARE, calibration=FREE)
    options = dict(num_slots=60, max_in_flight=MODELS["tiny", "plain"].max_in_flight)
    short = TRACE.select(TRACE.num_prompts, 10)
    for row, trace, depth in zip(rows, (TRACE, short, short), (2, 2, 0), strict=True):
        stats = replay(CONFIG, trace, timing, depth=depth, policy="lru-s", **options)
        assert row["predicted_tpot_ms"] == stats.tpot_ms


def test_cells_that_costs_were_fitted_to_are_told_apart():
    rows = [cell(depth=depth, budget_gib=size) for depth in (0, 2) for size in (1, 2)]
    unseen, seen = split_fitted(rows, [{"depth": 0, "budget_gib": 2}, {"depth": 2, "model": "x"}])
    assert seen == [cell(depth=0, budget_gib=2)]
    assert unseen == [row for row in rows if row not in seen]
    assert split_fitted(rows, []) == (rows, [])


def test_a_cell_without_its_model_or_trace_is_an_error():
    with pytest.raises(InvalidRequestError, match="no model or no trace for other, plain"):
        predict_measured([cell(model="other")], MODELS, {"tiny": TRACE}, HARDWARE, FREE)
    with pytest.raises(InvalidRequestError, match="no model or no trace for tiny, plain"):
        predict_measured([cell()], MODELS, {}, HARDWARE, FREE)
