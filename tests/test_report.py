"""The report's parts that measure nothing: statistics, readers, figures, the page."""

import json
import re

import numpy as np
import pytest
from report_cases import MODELS, made_up_records, made_up_report

from specter_jax.cli import session
from specter_jax.cli.main import main
from specter_jax.errors import InvalidRequestError, PromptError
from specter_jax.report import SECTIONS, SMALL, TRUE_SIZE
from specter_jax.report.catalogue import CATALOGUE
from specter_jax.report.evaluation import add_results
from specter_jax.report.figures_systems import draw_end_to_end
from specter_jax.report.figures_timeline import draw_timeline
from specter_jax.report.measure_timeline import median_iteration
from specter_jax.report.page import draw_all, render_page
from specter_jax.report.prompts import BUILT_IN, mixed, read_tasks, spread
from specter_jax.report.result_records import records_of
from specter_jax.report.results import read_results
from specter_jax.report.routing import (
    Iteration,
    batched_distinct,
    distinct_experts,
    diversity_record,
    jensen_shannon,
    match_record,
)
from specter_jax.report.settings import FULL
from specter_jax.report.storage import read_report, write_report
from specter_jax.report.style import places
from specter_jax.report.traces import iterations, trace_records
from specter_jax.trace import Trace


def one_layer(draft, target, num_new=1):
    """An iteration of one MoE layer, choices given by position."""
    return Iteration(draft=np.array([draft]), target=np.array([target]), num_new=num_new)


def test_matches_do_not_depend_on_the_order_of_choices():
    first = one_layer(draft=[[1, 2], [3, 4]], target=[[2, 1], [3, 9], [7, 8]])
    record = match_record([[first], [one_layer(draft=[[5, 6]], target=[[7, 8], [0, 1]])]])
    # Positions that the draft did not run are not observed.
    assert record["observations"] == 3
    assert record["matched_counts"] == [1, 1, 1]
    assert record["per_request"] == [0.75, 0.0]
    assert record["mean"] == 0.5


def test_distinct_experts_count_once_each():
    counts = distinct_experts([[one_layer([[0, 1]], [[0, 1], [1, 2]])]], num_experts=4)
    assert counts["mean"] == counts["max"] == 3
    assert counts["verifications"] == 1


def test_a_batch_joins_its_sequences_and_stops_with_the_first():
    short = [one_layer([[0, 1]], [[0, 1]])]
    long = [one_layer([[2, 3]], [[2, 3]])] * 2
    assert batched_distinct([short, long], 2, 8) | {"per_layer": None} == {
        "mean": 4.0,
        "p10": 4.0,
        "p90": 4.0,
        "min": 4,
        "max": 4,
        "verifications": 1,
        "per_layer": None,
    }
    assert batched_distinct([short, long], 3, 8) is None


def test_jensen_shannon_is_a_distance_from_0_to_1():
    first, second = np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])
    assert jensen_shannon(first, first) == 0
    assert jensen_shannon(first, second) == pytest.approx(1)
    middle = np.array([[0.5, 0.5]])
    assert jensen_shannon(first, middle) == pytest.approx(0.558, abs=1e-3)
    assert jensen_shannon(first, middle) == jensen_shannon(middle, first)


def test_diversity_counts_committed_tokens_only():
    # The second position was refused: its expert 3 must not make the tasks differ.
    kept = one_layer([[0]], [[0], [3]], num_new=1)
    same = one_layer([[0]], [[0], [0]], num_new=2)
    record = diversity_record({"a": [[kept]], "b": [[same], [same]]}, num_experts=4)
    assert record["distances"] == [[0, 0], [0, 0]]
    assert record["halves"] == [None, 0.0]
    assert [task["requests"] for task in record["tasks"]] == [1, 2]


def test_a_trace_is_cut_where_the_models_disagree(tmp_path):
    rng = np.random.default_rng(0)
    target = rng.integers(0, 8, (2, 30, 2))
    agree = np.array([True, True, False, True, True, True, True, True])
    cut = iterations(target, target, agree, first_output=10, depth=3)
    assert [it.num_new for it in cut] == [3, 4]
    np.testing.assert_array_equal(cut[0].target, target[:, 9:13])
    np.testing.assert_array_equal(cut[1].draft, target[:, 12:15])
    with pytest.raises(InvalidRequestError, match="traces there"):
        trace_records(tmp_path, FULL)


def test_the_median_iteration_begins_at_its_first_chunk():
    clock = iter(range(0, 10**9, 1000))
    trace = Trace(clock_ns=lambda: next(clock))
    for length in (1, 5, 3, 1, 9):
        for first in (0, 2):
            with trace.span("draft", "chunk", first=first):
                flight = trace.async_span("transfers", "expert")
                for _ in range(length):
                    trace.instant("host", "tick")
        flight.end()
    spans = median_iteration(trace.to_dict()["traceEvents"])
    assert [span["track"] for span in spans].count("draft") == 2
    assert spans[0]["begin_us"] == 0
    # The first and the last are left out; 3 is the median of the rest.
    assert spans[0]["end_us"] == 5
    assert any(span.get("in_flight") for span in spans)


def test_prompts_are_read_by_task(tmp_path):
    lines = [
        {"category": "writing", "turns": ["Tell me", "More"]},
        {"category": "math_reasoning", "turns": ["1 + 1"]},
        {"category": "coding", "prompt": "def f"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (tmp_path / "plain.jsonl").write_text('{"prompt": "p"}\n', encoding="utf-8")
    tasks = {task.name: task.prompts for task in read_tasks(tmp_path)}
    assert tasks == {
        "mt_bench": ("Tell me", "def f"),
        "math_reasoning": ("1 + 1",),
        "plain": ("p",),
    }
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\n', encoding="utf-8")
    with pytest.raises(PromptError, match=r"bad\.jsonl"):
        read_tasks(tmp_path)


def test_prompts_are_spread_over_the_tasks():
    assert spread(range(10), 3) == [0, 3, 6]
    chosen = mixed(BUILT_IN, 4)
    assert len(chosen) == len(set(chosen)) == 4
    assert {task.name for task in BUILT_IN for prompt in chosen if prompt in task.prompts} == {
        task.name for task in BUILT_IN
    }


def cell(**fields):
    stats = {
        "tpot_ms": 5.0,
        "hit_rate": 0.9,
        "resident_hits": 4,
        "prefetch_hits": 5,
        "demand_misses": 1,
        "depths": {"8": 3, "4": 1},
        "decode_ms": 100.0,
        "new_tokens": 21,
        "sequences": 1,
    }
    common = {"model": "big", "budget_gib": 16, "batch": 1, "dataset": "qa", "baseline": False}
    return {**common, "stats": stats | fields.pop("stats", {}), **fields}


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
    assert len(records["verification"]) == 1
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


def test_systems_that_never_met_are_left_aside():
    def record(system, budget, tpot_ms):
        place = {"model": "m", "budget": budget, "dataset": "d"}
        return {**place, "system": system, "tpot_ms": tpot_ms}

    records = [
        *(record(name, budget, 2.0) for name in ("specter", "mo") for budget in ("a", "b")),
        record("lonely", "a", 1.0),
        record("late", "b", 1.0),
    ]
    sentence = draw_end_to_end(records).sentence
    assert sentence.startswith("Geometric mean over the 1 cells that these 3 systems ran in: ")
    assert "specter 2.00 ms" in sentence
    assert "late 1.00 ms" in sentence or "lonely 1.00 ms" in sentence


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


def test_every_section_has_its_figure():
    assert {entry.section for entry in CATALOGUE} == set(SECTIONS)


@pytest.fixture(scope="module")
def panels():
    """Every panel of made-up records in both settings."""
    report = made_up_report(SMALL)
    add_results(report, made_up_records(TRUE_SIZE), [])
    return draw_all(report)


@pytest.fixture(scope="module")
def page():
    """The page of made-up records, those of one section missing."""
    report = made_up_report(SMALL)
    report["records"]["prefill"] = []
    report["records"]["planner"] = []
    return render_page(report)


def test_every_figure_is_drawn_with_a_sentence_and_numbers(panels):
    both = {(section, setting) for section in SECTIONS for setting in (SMALL, TRUE_SIZE)}
    assert both - set(panels) == {("planner", SMALL)}
    for (section, _), panel in panels.items():
        assert panel.svg.lstrip().startswith(b"<?xml"), section
        assert panel.rows, section
        assert panel.sentence.endswith("."), section
    assert "94.5% (alpha)" in panels["match", SMALL].sentence
    assert "1.50 (alpha, 5 positions)" in panels["verification", TRUE_SIZE].sentence


def test_predictions_are_marked_as_such(panels):
    panel = panels["planner", TRUE_SIZE]
    assert "predicted" in panel.sentence
    assert "10%" in panel.sentence
    assert "predicted TPOT, ms" in panel.rows[0]


def test_the_page_needs_no_other_file(page):
    sources = re.findall(r"""(?:src|href)=["']([^"']*)""", page)
    assert sources
    assert all(source.startswith(("data:", "#")) for source in sources)
    assert "url(" not in page
    assert "@import" not in page
    assert "abacus" in page
    assert all(model in page for model in MODELS)


def test_what_was_not_measured_is_said_to_be_so(page):
    # The prefill's figure and the planner's; true sizes are no topic without any results.
    assert page.count("Not measured.") == 2
    section = page.split('<section id="prefill">')[1].split("</section>")[0]
    assert "<img" not in section


def test_results_replace_only_their_own_sections():
    report = made_up_report(SMALL)
    report["records"]["match"] += made_up_records(TRUE_SIZE)["match"]
    add_results(report, {"depth": made_up_records(TRUE_SIZE)["depth"]}, [{"file": "x"}])
    assert len(report["records"]["match"]) == 4
    assert len(report["records"]["depth"]) == 4
    add_results(report, {"depth": []})
    assert len(report["records"]["depth"]) == 2
    assert report["results"] == [{"file": "x"}]


def test_a_report_is_written_and_read_again(tmp_path):
    report = made_up_report(SMALL)
    page = write_report(report, tmp_path / "new" / "folder")
    assert page.name == "index.html"
    assert read_report(page.with_name("report.json")) == report
    for text in ("{}", "[", '{"schema": 0, "records": {}}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(InvalidRequestError, match=r"x\.json"):
            read_report(tmp_path / "x.json")


def test_the_command_draws_an_earlier_report_with_new_results(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(session, "ENVIRONMENT", {})
    report = made_up_report(SMALL)
    for section in set(SECTIONS) - {"depth"}:
        report["records"][section] = []
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(report))
    (tmp_path / "results").mkdir()
    content = {"meta": {"gpu": "G9"}, "cells": [cell(policy="mo", depth=0)]}
    (tmp_path / "results" / "run.json").write_text(json.dumps(content))
    out = tmp_path / "out"
    options = ["--redraw", str(earlier), "--results", str(tmp_path / "results")]
    assert main(["report", "--out", str(out), *options]) == 0
    assert capsys.readouterr().out.strip() == str(out / "index.html")
    records = json.loads((out / "report.json").read_text())["records"]
    assert [record["setting"] for record in records["end_to_end"]] == [TRUE_SIZE]
    assert "True size, G9" in (out / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--models", "/nowhere"], "/nowhere: no such directory"),
        (["--redraw", "x.json", "--quick"], "--redraw measures nothing"),
        (["--out", "/dev/null/x"], "not a directory"),
        (["--redraw", "/nowhere.json"], "No such file"),
    ],
)
def test_bad_options_are_refused_in_one_line(tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.setattr(session, "ENVIRONMENT", {})
    assert main(["report", "--out", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
