"""Result files of other machines become records of the report."""

import json

import pytest

from specter_jax.errors import InvalidRequestError
from specter_jax.report import TRUE_SIZE
from specter_jax.report.figures_timeline import draw_timeline
from specter_jax.report.result_records import records_of
from specter_jax.report.results import read_results
from specter_jax.report.style import places
from specter_jax.trace import Trace
from tests.report_cases import cell


def test_a_gpu_run_becomes_records():
    cells = [
        cell(policy="lookahead", depth=4, stats={"tpot_ms": 6.0}),
        cell(policy="lookahead", depth=8),
        cell(policy="lookahead", depth="auto"),
        cell(system="transformers", baseline=True, stats={"tpot_ms": 200.0}),
        cell(policy="lookahead", depth=8, batch=4, stats={"sequences": 4}),
        {"model": "broken"},
    ]
    kernels = [
        {"kernel": "ffn", "shape": "big", "num_rows": 9, "us": 100.0},
        {"kernel": "ffn", "shape": "qwen1.5-moe", "num_rows": 9, "us": 50.0},
        {"kernel": "unheard of", "shape": "big", "num_rows": 9, "us": 1.0},
    ]
    prefill = [{"model": "big", "budget_gib": 16, "tokens": 512, "ttft_ms": 80.0}]
    records = records_of({"cells": cells, "kernels": kernels, "prefill": prefill})
    (depth,) = records["depth"]
    assert [point["depth"] for point in depth["points"]] == [4, 8]
    assert depth["auto"] == {"depth": 8, "tpot_ms": 5.0}
    assert {record["batch"] for record in records["batch"]} == {1, 4}
    # At the depth that most policies share, which is not auto's.
    assert {record["depth"] for record in records["hit_rate"]} == {4}
    assert records["hit_rate"][0]["resident"] == 0.4
    times = {record["system"]: record["tpot_ms"] for record in records["end_to_end"]}
    # Specter's own depth is auto.
    assert times == {"specter": 5.0, "transformers": 200.0}
    assert records["verification"][0]["layer_ms"] == 0.1
    # As cells call it.
    assert [r["model"] for r in records["verification"]] == ["big", "qwen1.5-moe-a2.7b"]
    assert records["prefill"][0]["prefill_ms"] == 80.0
    assert all(r["setting"] == TRUE_SIZE for found in records.values() for r in found)


def test_a_later_file_replaces_the_same_cells(tmp_path):
    for name, day, time in (("b.json", "2001-01-02", 7.0), ("c.json", "2001-01-01", 9.0)):
        content = {"meta": {"date": day, "gpu": "G"}, "cells": [cell(stats={"tpot_ms": time})]}
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "other.json").write_text('{"tuning": 1}')
    metas, records = read_results(tmp_path)
    assert [meta["file"] for meta in metas] == ["c.json", "b.json"]
    assert [record["tpot_ms"] for record in records["end_to_end"]] == [7.0]
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(InvalidRequestError, match=r"bad\.json"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bad.json", {"cells": 5}),
        ("bad.json", {"cells": [1]}),
        ("bad.json", {"kernels": [{"kernel": "ffn", "num_rows": "many", "us": 1.0}]}),
        ("bad.json", {"cells": [], "meta": "today"}),
        ("bad.json", {"kind": "predicted", "cells": [{}]}),
        ("bad.timeline.json", {"traceEvents": [{"name": "draft"}]}),
    ],
)
def test_entries_of_another_kind_are_refused_with_their_file(tmp_path, name, content):
    (tmp_path / "good.json").write_text(json.dumps({"cells": [cell(policy="mo", depth=0)]}))
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(InvalidRequestError, match=r"bad\.(timeline\.)?json: its entries"):
        read_results(tmp_path)


def test_formats_of_experts_stay_apart(tmp_path):
    cells = [
        cell(policy="lookahead", depth=8, expert_format="plain", plain={"tpot_ms": 20.0}),
        cell(policy="lookahead", depth=8, expert_format="nested", stats={"tpot_ms": 3.0}),
    ]
    records = records_of({"cells": cells})
    names = [record["system"] for record in records["end_to_end"]]
    assert names == ["specter, plain", "specter, nested"]
    assert [record["budget"] for record in records["hit_rate"]] == [
        "16 GiB, plain",
        "16 GiB, nested",
    ]
    (depth,) = records["depth"]
    assert [point["tpot_ms"] for point in depth["points"]] == [20.0, 5.0]
    assert places(names) == {"specter, plain": 0, "specter, nested": 1}


def test_a_time_of_any_text_stands_beside_every_dataset():
    cells = [
        cell(policy="lookahead", depth=8, dataset="qa"),
        cell(policy="lookahead", depth=8, dataset="code"),
        cell(policy="lookahead", depth=8, dataset="code", budget_gib=24),
        cell(system="transformers", baseline=True, dataset="any"),
        cell(system="transformers", baseline=True, dataset="any", budget_gib=48),
    ]
    found = records_of({"cells": cells})["end_to_end"]
    others = [(r["budget"], r["dataset"]) for r in found if r["system"] == "transformers"]
    assert others == [("16 GiB", "qa"), ("16 GiB", "code"), ("48 GiB", "any")]


def test_policies_that_are_no_system_have_only_their_own_figure():
    policies = ("lookahead", "sp-l", "sp-e", "lru-s", "specmoeoff", "mo-sm")
    cells = [cell(policy=policy, depth=8) for policy in policies]
    cells += [cell(policy="mo", depth=0), cell(policy="lru", depth=0)]
    records = records_of({"cells": cells})
    systems = {record["system"] for record in records["end_to_end"]}
    assert systems == {"specter", "sp-moe", "specmoeoff", "mo-sm", "mo"}
    rates = {record["policy"] for record in records["hit_rate"]}
    assert rates == {"lookahead", "sp-l", "sp-e", "lru-s", "lru"}


def test_policies_are_compared_on_texts_that_all_of_them_ran_on():
    cells = [
        cell(policy="lookahead", depth=8, dataset="qa"),
        cell(policy="lookahead", depth=8, dataset="code"),
        cell(policy="lru-s", depth=8, dataset="qa"),
        cell(policy="lru-s", depth=8, dataset="code", budget_gib=24),
        cell(policy="lookahead", depth=8, dataset="qa", budget_gib=24),
    ]
    found = records_of({"cells": cells})["hit_rate"]
    places = [(r["budget"], r["policy"], r["dataset"]) for r in found]
    assert places == [
        ("16 GiB", "lookahead", "qa"),
        ("16 GiB", "lru-s", "qa"),
        # No text in common: both are shown.
        ("24 GiB", "lru-s", "code"),
        ("24 GiB", "lookahead", "qa"),
    ]


def test_a_timeline_says_what_it_is_of(tmp_path):
    trace = Trace()
    with trace.span("draft", "chunk", first=0):
        pass
    about = {"model": "big", "budget_gib": 16, "depth": 8, "expert_format": "nested"}
    content = trace.to_dict() | {"otherData": about}
    (tmp_path / "big.timeline.json").write_text(json.dumps(content))
    (tmp_path / "other.timeline.json").write_text(json.dumps(trace.to_dict()))
    (tmp_path / "h200.json").write_text(json.dumps({"cells": [cell(policy="mo", depth=0)]}))
    first, second = read_results(tmp_path)[1]["timeline"]
    shown = (first["model"], first["budget"], first["depth"], first["expert_format"])
    assert shown == ("big", "16 GiB", 8, "nested")
    assert (second["model"], second["budget"], second["depth"]) == ("other", "", None)
    assert draw_timeline([first, second]).rows


def test_predictions_meet_the_cells_they_are_for(tmp_path):
    plan = {
        "kind": "predicted",
        "model": "/somewhere/big",
        "policy": "lookahead",
        "cells": [{"gpu_memory_bytes": 16 * 2**30, "depth": 8, "predicted_tpot_ms": 4.5}],
    }
    cells = [
        cell(system="specter", depth=8),
        cell(policy="lru", depth=8),
        cell(policy="lookahead", depth=8, budget_gib=24),
        cell(policy="lru", depth=0, predicted_tpot_ms=6.0),
    ]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "run.json").write_text(json.dumps({"cells": cells}))
    metas, records = read_results(tmp_path)
    assert [meta["file"] for meta in metas] == ["run.json"]
    assert {record["depth"] for record in records["planner"]} == {8, 0}
    pairs = [
        (r["system"], r["predicted_tpot_ms"], r["measured_tpot_ms"]) for r in records["planner"]
    ]
    assert pairs == [("specter", 4.5, 5.0), ("lru", 6.0, 5.0)]
    row = {"model": "big", "policy": "lru", "predicted_tpot_ms": 1.0, "measured_tpot_ms": 2.0}
    (tmp_path / "rows.json").write_text(json.dumps({"planner": [row]}))
    (pair,) = read_results(tmp_path)[1]["planner"]
    assert (pair["system"], pair["predicted_tpot_ms"]) == ("lru", 1.0)
