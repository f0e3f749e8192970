"""The figures of a result file in which everything was measured, and of parts of it."""

import json
import re

import pytest

from specter_jax.report.catalogue import CATALOGUE
from specter_jax.report.figures_prefill import draw_prefill
from specter_jax.report.figures_time import draw_depth, draw_verification
from specter_jax.report.results import read_results
from specter_jax.report.sources import commits_of, files_of
from specter_jax.report.style import drawing, places
from tests.report_full import BATCHES, BUDGETS, DATASETS, FORMATS, full_results

SECTIONS = ("depth", "prefill", "draft", "verification")
SECTIONS += ("end_to_end", "batch", "hit_rate", "planner")
MAX_COLOURS = 8
DRAWN = {entry.section: entry.draw for entry in CATALOGUE}


def records_of(folder, content):
    (folder / "h200.json").write_text(json.dumps(content))
    return read_results(folder)[1]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    return records_of(tmp_path_factory.mktemp("full"), full_results())


@pytest.fixture(scope="module")
def panels(records):
    with drawing():
        return {section: DRAWN[section](found) for section, found in records.items()}


def texts_of(panel):
    """What is written in the picture; the SVG keeps each text as a comment."""
    return [text.strip() for text in re.findall(r"<!--(.*?)-->", panel.svg.decode(), re.DOTALL)]


def test_every_figure_has_every_model_and_format(records, panels):
    assert set(records) == set(SECTIONS)
    for section, panel in panels.items():
        assert {row["model"] for row in panel.rows} == set(BUDGETS), section
        if section not in ("draft", "verification"):
            assert {row["experts"] for row in panel.rows} >= set(FORMATS), section
        assert files_of(records[section]).startswith("From h200.json"), section
    for section in ("depth", "end_to_end", "batch", "hit_rate", "planner"):
        assert set(commits_of(records[section])) >= set(FORMATS.values()), section


def test_no_figure_has_more_colours_than_can_be_told_apart(panels):
    for section, panel in panels.items():
        colours = set(re.findall(rb"#[0-9a-f]{6}", panel.svg)) - {b"#ffffff", b"#dddddd"}
        assert len(colours) <= MAX_COLOURS, section


def test_figure_7_draws_the_sweeps_and_lists_the_rest(records, panels):
    panel = panels["depth"]
    curves = [text for text in texts_of(panel) if text.startswith("24 GiB, nested experts")]
    # Deepseek's and Qwen's, on the dataset of the sweep.
    assert len(curves) == 2
    assert not any(text.startswith("16 GiB") for text in texts_of(panel))
    assert {row["budget"] for row in panel.rows} == {"16 GiB", "24 GiB", "32 GiB", "48 GiB"}
    left_out = sum(len(record["points"]) == 2 for record in records["depth"])
    assert f" {left_out} places without a sweep are only in the numbers" in panel.sentence


def test_figure_7_claims_no_best_depth_of_two(records):
    two = [r for r in records["depth"] if len(r["points"]) == 2]
    assert "the least of these two" in draw_depth(two).sentence
    swept = [r for r in records["depth"] if len(r["points"]) > 2]
    assert "these two" not in draw_depth(swept).sentence


def test_figure_10_names_budget_commit_and_random_weights(panels):
    texts = texts_of(panels["prefill"])
    assert "deepseek-v2-lite, nested experts, 24 GiB" in texts
    assert "phi-3.5-moe, plain experts, 48 GiB" in texts
    assert {f"commit {commit}" for commit in FORMATS.values()} <= set(texts)
    # A colour for each system: no panel has two budgets.
    assert {"specter", "mo", "specmoeoff", "transformers (random weights)"} <= set(texts)
    assert "transformers" not in {row["system"] for row in panels["prefill"].rows}


def test_figure_10_names_the_commit_of_each_budget(records):
    here = [r for r in records["prefill"] if r["model"] == "deepseek-v2-lite"]
    here = [r for r in here if r.get("expert_format") == "nested"]
    older = [r | {"budget": "16 GiB", "sources": [{"commit": "old0000"}]} for r in here]
    texts = texts_of(draw_prefill(here + older))
    assert "specter, 16 GiB (old0000)" in texts
    assert "specter, 24 GiB (bbb2222)" in texts
    assert "deepseek-v2-lite, nested experts" in texts


def test_figure_12_says_nothing_of_a_comparison_that_was_not_made(records):
    found = [r for r in records["verification"] if r["order"] != "token-wise"]
    sentence = draw_verification(found).sentence
    assert "times as long" not in sentence
    assert sentence.startswith("One layer's experts, expert-wise, ")


def test_figure_14_has_every_system_everywhere(panels):
    rows = panels["end_to_end"].rows
    names = ("mo", "mo-sm", "sp-moe", "specmoeoff", "specter")
    for model, budgets in BUDGETS.items():
        found = [r for r in rows if r["model"] == model and r["experts"]]
        keys = {(r["experts"], r["budget"], r["dataset"], r["system"]) for r in found}
        assert len(keys) == len(FORMATS) * len(budgets) * len(DATASETS) * len(names)
    library = [row for row in rows if row["experts"] is None]
    assert {row["system"] for row in library} == {"transformers (random weights)"}
    assert len(library) == sum(map(len, BUDGETS.values()))
    # In its own colour, whatever stands behind the name.
    assert places(["x (odd)", "transformers (random weights)"])[library[0]["system"]] == 5


def test_figure_15_tells_formats_by_dashes(panels):
    texts = texts_of(panels["batch"])
    systems = ("specter", "specmoeoff", "sp-moe", "mo")
    assert {f"{name}, {form}" for name in systems for form in FORMATS} <= set(texts)
    rows = panels["batch"].rows
    assert len(rows) == len(BUDGETS) * len(FORMATS) * len(systems) * len(BATCHES)


def test_parts_of_it_are_drawn_as_well(tmp_path):
    full = full_results()

    def keep(name, model, budgets):
        return [
            entry
            for entry in full[name]
            if entry["model"] == model and entry["budget_gib"] in budgets
        ]

    parts = [
        {"cells": keep("cells", "phi-3.5-moe", (48,))},
        {"cells": keep("cells", "qwen1.5-moe-a2.7b", (16, 32))[:3]},
        {"baseline": full["baseline"][:1]},
        {"prefill": keep("prefill", "deepseek-v2-lite", (24,))[:1]},
        {"kernels": [row for row in full["kernels"] if row["kernel"] == "ffn"][:2]},
        {"kernels": [row for row in full["kernels"] if row.get("format")][:1]},
    ]
    with drawing():
        for part in parts:
            found = records_of(tmp_path, part)
            assert found
            for section, records in found.items():
                panel = DRAWN[section](records)
                assert panel.rows, section
                assert panel.sentence.endswith("."), section
