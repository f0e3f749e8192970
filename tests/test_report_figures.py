"""Figures of many models, formats, budgets and systems, and where their numbers come from."""

import json

import pytest

from specter_jax.report import SMALL
from specter_jax.report.evaluation import add_results
from specter_jax.report.figures_end_to_end import draw_end_to_end
from specter_jax.report.figures_prefill import draw_prefill
from specter_jax.report.figures_systems import draw_hit_rate
from specter_jax.report.figures_time import draw_depth
from specter_jax.report.page import render_page
from specter_jax.report.panels import budgets_of, by_experts, filled, place_name, system_of
from specter_jax.report.results import read_results
from specter_jax.report.sources import about, files_of, source_rows
from specter_jax.report.style import budget_order
from tests.report_cases import cell, made_up_report

PLACES = [
    ("big", "nested", 16),
    ("big", "nested", 24),
    ("big", "plain", 16),
    ("other", "nested", 48),
]
POLICIES = {"lookahead": 8, "sp-l": 8, "lru-s": 8, "sp-e": 8, "mo": 0, "lru": 0}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The directory of one result file that has some cells of several places."""
    cells = [
        cell(model=model, expert_format=name, budget_gib=budget, policy=policy, depth=depth)
        for model, name, budget in PLACES
        for policy, depth in POLICIES.items()
        # A partial list: no rival there.
        if budget != 48 or policy == "lookahead"
    ]
    cells += [
        cell(expert_format="nested", policy="lookahead", depth=0, commit="c0ffee1"),
        cell(expert_format="plain", policy="lookahead", depth=0, stats={"tpot_ms": 9.0}),
    ]
    library = cell(system="transformers", baseline=True, dataset="any", weights="random")
    library["stats"] |= {"tpot_ms": 900.0, "sequences": 3}
    prefill = [
        {
            "model": model,
            "expert_format": name,
            "budget_gib": budget,
            "system": system,
            "prompt_tokens": tokens,
            "ttft_ms": 1.0 * tokens,
            "peak_device_bytes": budget * 2**30,
        }
        for model, name, budget in PLACES
        for system in ("specter", "mo")
        for tokens in (128, 512)
    ]
    content = {
        "meta": {"date": "2001-02-03T04:05", "commit": "abc1234"},
        "cells": cells,
        "baseline": [library],
        "prefill": prefill,
    }
    folder = tmp_path_factory.mktemp("results")
    (folder / "gpu.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def records(results):
    return read_results(results)[1]


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


def test_budgets_are_ordered_by_their_numbers():
    names = ["all on the GPU", "16 GiB", "8 GiB", "1.5 GiB"]
    assert sorted(names, key=budget_order) == ["1.5 GiB", "8 GiB", "16 GiB", "all on the GPU"]
    shown = [{"budget": "a half"}, {"budget": "a quarter"}, {"budget": "24 GiB, plain"}]
    assert budgets_of(shown) == ["24 GiB", "a half", "a quarter"]


def test_what_has_no_format_stands_beside_every_format():
    both = [{"model": "m", "expert_format": name} for name in ("plain", "nested")]
    library = {"model": "m"}
    found = by_experts([*both, library, {"model": "n"}])
    assert [place_name(place) for place in found] == ["m, nested experts", "m, plain experts", "n"]
    assert all(library in found["m", name] for name in ("nested", "plain"))


def test_empty_columns_are_left_out():
    assert filled([{"a": 1, "b": None}, {"a": None, "b": None}]) == [{"a": 1}, {"a": None}]


def test_end_to_end_names_random_weights_formats_and_prompts(records):
    panel = draw_end_to_end(records["end_to_end"])
    (row,) = [row for row in panel.rows if "transformers" in row["system"]]
    assert row["system"] == "transformers (random weights)"
    assert (row["dataset"], row["prompts"], row["tokens"]) == ("any", 3, 21)
    assert {row["experts"] for row in panel.rows} == {"nested", "plain", None}
    assert {row["system"].partition(",")[2] for row in panel.rows} == {""}
    assert b"big, plain experts, 16 GiB" in panel.svg
    assert "transformers (random weights) 900.00 ms" in panel.sentence
    assert "transformers (random weights) 180.00 (2 cells)" in panel.sentence
    assert "1 to 3 prompts" in panel.sentence
    assert system_of({"system": "specter, plain"}) == "specter"


def test_a_format_is_compared_with_itself_only():
    def record(system, name, time):
        place = {"model": "m", "budget": "16 GiB", "dataset": "d", "expert_format": name}
        return {**place, "system": system, "tpot_ms": time}

    records = [record("specter", "plain", 1.0), record("mo", "nested", 2.0)]
    assert "no cell was run by all" in draw_end_to_end(records).sentence
    records.append(record("specter", "nested", 4.0))
    assert "mo 0.50 (1 cells)" in draw_end_to_end(records).sentence


def test_hit_rates_of_formats_have_their_own_panels(records):
    panel = draw_hit_rate(records["hit_rate"])
    for title in (b"big, nested experts", b"big, plain experts", b"other, nested experts"):
        assert title in panel.svg
    assert {row["budget"] for row in panel.rows} == {"16 GiB", "24 GiB", "48 GiB"}
    assert "(other, nested experts, 48 GiB)" in panel.sentence


def test_depth_names_the_format_of_every_curve(records):
    panel = draw_depth(records["depth"])
    assert b"16 GiB, nested experts" in panel.svg
    assert b"16 GiB, plain experts" in panel.svg
    assert {row["experts"] for row in panel.rows} == {"nested", "plain"}


def test_prefill_tells_budgets_formats_and_systems_apart(records):
    panel = draw_prefill(records["prefill"])
    for label in (b"mo, 16 GiB", b"specter, 48 GiB", b"big, plain experts"):
        assert label in panel.svg
    assert "512 ms (mo, 48 GiB)" in panel.sentence
    assert {row["budget"] for row in panel.rows} == {"16 GiB", "24 GiB", "48 GiB"}


def test_figures_say_file_and_commit(records):
    assert files_of(records["depth"]) == "From gpu.json (commit abc1234 and c0ffee1)."
    assert files_of([{"model": "old"}]) == ""
    assert about(records["hit_rate"]) == (
        "Shown: big (nested and plain experts; 16 and 24 GiB) and other (nested experts; 48 GiB)."
    )
    rows = source_rows("Figure 17", records["hit_rate"])
    assert rows[0] == {
        "figure": "Figure 17",
        "model": "big",
        "experts": "nested",
        "budget": "16 and 24 GiB",
        "file": "gpu.json",
        "commit": "abc1234",
        "measured on": "2001-02-03",
    }


def test_the_page_has_the_table_of_sources(results):
    report = made_up_report(SMALL)
    assert 'id="sources"' not in render_page(report)
    metas, records = read_results(results)
    add_results(report, records, metas)
    page = render_page(report)
    assert "From gpu.json (commit abc1234" in page
    table = page.split('<section id="sources">')[1]
    assert all(f"Figure {number}<" in table for number in (7, 10, 14, 17))
    assert "c0ffee1" in table
