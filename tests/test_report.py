"""The report's figures and page, and the command that draws them."""

import json
import re

import pytest

from specter_jax.cli import session
from specter_jax.cli.main import main
from specter_jax.errors import InvalidRequestError
from specter_jax.report import SECTIONS, SMALL, TRUE_SIZE
from specter_jax.report.catalogue import CATALOGUE
from specter_jax.report.evaluation import add_results
from specter_jax.report.page import draw_all, render_page
from specter_jax.report.storage import read_report, write_report
from tests.report_cases import MODELS, cell, made_up_records, made_up_report


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
