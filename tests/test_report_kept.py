"""`specter report` refuses what it cannot use before measuring, and keeps what it has measured."""

import dataclasses
import gzip
import json
import shutil

import pytest

from specter_jax.cli import session
from specter_jax.cli.main import main
from specter_jax.errors import CheckpointError, InvalidRequestError, SpecterError
from specter_jax.report import SMALL, TRUE_SIZE, evaluation, storage
from specter_jax.report.evaluation import measure, model_names
from specter_jax.report.prompts import Task
from specter_jax.report.settings import QUICK
from specter_jax.report.storage import read_report, write_report
from tests.report_cases import MODELS, cell, made_up_records, made_up_report

TASKS = (Task(name="one", prompts=("Once upon a time",)),)


@pytest.fixture
def two_models(tiny_directory, tmp_path):
    """Different directories whose own names are equal."""
    return [
        shutil.copytree(tiny_directory, tmp_path / parent / "converted") for parent in ("a", "b")
    ]


@pytest.fixture
def measured(monkeypatch):
    """Names of the models whose turn it was; records are made up, and nothing is loaded."""
    names = []

    def made_up(records, descriptions, experts, tasks, settings, progress):
        number = len(names)
        names.append(experts.name)
        descriptions.append({"model": experts.name, "setting": SMALL})
        for section, found in made_up_records(SMALL).items():
            ours = [record for record in found if record["model"] == MODELS[number]]
            records[section] += [record | {"model": experts.name} for record in ours]

    monkeypatch.setattr(session, "ENVIRONMENT", {})
    monkeypatch.setattr(evaluation, "_measure_model", made_up)
    return names


def fails_at(number, error, monkeypatch):
    """Makes the measurement of that model end so when it has its records."""
    before, calls = evaluation._measure_model, []

    def failing(*arguments):
        before(*arguments)
        calls.append(arguments)
        if len(calls) == number:
            raise error

    monkeypatch.setattr(evaluation, "_measure_model", failing)


def models_of(report):
    return [record["model"] for record in report["records"]["match"]]


@pytest.mark.parametrize(
    ("option", "name", "content", "message"),
    [
        ("--results", None, None, "no such directory"),
        ("--results", "x.json", b"{", "x.json: not JSON"),
        ("--results", "x.json", b"[" * 100_000, "x.json: nested too deeply"),
        ("--results", "x.json", b'{"cells": 5}', "x.json: its entries"),
        (
            "--results",
            "x.json",
            json.dumps({"cells": [cell(policy="mo", depth=0, stats={"tpot_ms": "fast"})]}).encode(),
            "files: its figures cannot be drawn",
        ),
        ("--traces", None, None, "no .npz traces there"),
        ("--traces", "x.npz", b"", "x.npz: is empty"),
        ("--traces", "x.npz", b"PK\3\4", "x.npz: is cut short or damaged"),
        ("--traces", "x.npz", b"\x93NUMPY", "x.npz: is no .npz file"),
        (
            "--datasets",
            "x.jsonl",
            b'{"prompt": "a"}\n\n{"prompt": ""}',
            "x.jsonl, line 3: the prompt",
        ),
        (
            "--datasets",
            "x.jsonl.gz",
            gzip.compress(b"{}", mtime=0)[:-9],
            "x.jsonl.gz: cannot be read",
        ),
        ("--datasets", "x.jsonl", b'{"prompt": "\\ud800"}', "x.jsonl, line 1: the prompt"),
    ],
)
def test_files_are_read_before_anything_is_measured(
    tmp_path, capsys, measured, tiny_directory, option, name, content, message
):
    folder = tmp_path / "files"
    if name is not None:
        folder.mkdir()
        (folder / name).write_bytes(content)
    options = ["--out", str(tmp_path / "out"), "--models", str(tiny_directory)]
    assert main(["report", *options, option, str(folder)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert measured == []


def test_every_model_is_opened_before_one_is_measured(tiny_directory, tmp_path, measured):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty: neither"):
        measure([tiny_directory, tmp_path / "empty"], TASKS, QUICK)
    damaged = shutil.copytree(tiny_directory, tmp_path / "damaged")
    next((damaged / "experts").iterdir()).unlink()
    with pytest.raises(SpecterError, match="no such file"):
        measure([tiny_directory, damaged], TASKS, QUICK)
    mute = shutil.copytree(tiny_directory, tmp_path / "mute")
    for file in mute.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(SpecterError, match="tokenizer"):
        measure([tiny_directory, mute], TASKS, QUICK)
    many = dataclasses.replace(QUICK, new_tokens=5000)
    with pytest.raises(InvalidRequestError, match="this model's context 2048"):
        measure([tiny_directory], TASKS, many)
    assert measured == []


def test_models_of_one_name_stay_apart(two_models, tmp_path, capsys, measured):
    out = tmp_path / "out"
    assert main(["report", "--out", str(out), "--models", *map(str, two_models)]) == 0
    assert models_of(read_report(out / "report.json")) == ["a/converted", "b/converted"]
    again = tmp_path / "a" / ".." / "a" / "converted"
    capsys.readouterr()
    options = ["--models", str(two_models[0]), str(again)]
    assert main(["report", "--out", str(out), *options]) == 2
    assert "given twice" in capsys.readouterr().err


def test_names_are_as_short_as_tells_them_apart():
    assert model_names(["/x/small", "/x/large"]) == ["small", "large"]
    assert model_names(["/x/y/m", "/z/y/m", "/z/n"]) == ["x/y/m", "z/y/m", "n"]
    assert len(set(model_names(["/m", "/x/m", "/x/x/m"]))) == 3
    with pytest.raises(InvalidRequestError, match="given twice"):
        model_names(["/x/m", "/x/y/../m"])


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (CheckpointError("gone"), 2)]
)
def test_an_end_before_time_keeps_what_was_measured(
    two_models, tmp_path, capsys, monkeypatch, measured, error, code
):
    results = tmp_path / "results"
    results.mkdir()
    content = {"meta": {"gpu": "G9"}, "cells": [cell(policy="mo", depth=0)]}
    (results / "run.json").write_text(json.dumps(content))
    fails_at(1, error, monkeypatch)
    out = tmp_path / "out"
    options = ["--models", *map(str, two_models), "--results", str(results)]
    assert main(["report", "--out", str(out), *options]) == code
    told = capsys.readouterr()
    assert f"note: {out / 'index.html'} has what was measured so far" in told.err
    assert told.out == ""
    report = read_report(out / "report.json")
    assert models_of(report) == measured == ["a/converted"]
    settings = [record["setting"] for record in report["records"]["end_to_end"]]
    assert settings.count(TRUE_SIZE) == 1
    assert "a/converted" in (out / "index.html").read_text(encoding="utf-8")


def test_the_report_is_kept_after_each_model(two_models, monkeypatch, measured):
    kept = []
    report = measure(two_models, TASKS, QUICK, keep=kept.append)
    assert [models_of(part) for part in kept] == [["a/converted"]]
    assert models_of(report) == measured
    # Another's additions to what was kept are not measured records.
    kept[0]["records"]["match"].clear()
    assert len(report["records"]["match"]) == 2


def test_nothing_is_kept_where_nothing_was_measured(tiny_directory, monkeypatch, measured):
    def failing(*_):
        raise CheckpointError("gone")

    kept = []
    monkeypatch.setattr(evaluation, "_measure_model", failing)
    with pytest.raises(CheckpointError, match="gone"):
        measure([tiny_directory], TASKS, QUICK, keep=kept.append)
    assert kept == []


def test_names_that_are_no_text_are_written_all_the_same(tmp_path):
    report = made_up_report(SMALL)
    report["models"][0]["provenance"] = "caf\udce9"
    page = write_report(report, tmp_path)
    assert read_report(tmp_path / "report.json") == report
    assert "caf?" in page.read_text(encoding="utf-8")


def test_no_earlier_page_stays_beside_data_that_cannot_be_drawn(tmp_path, monkeypatch):
    def failing(report):
        raise ValueError("no drawing")

    (tmp_path / "index.html").write_text("of an earlier report")
    monkeypatch.setattr(storage, "render_page", failing)
    report = made_up_report(SMALL)
    with pytest.raises(ValueError, match="no drawing"):
        write_report(report, tmp_path)
    assert read_report(tmp_path / "report.json") == report
    assert not (tmp_path / "index.html").exists()


@pytest.mark.parametrize(
    "content", ["{", "[" * 100_000, "5", '{"schema": 1}', '{"schema": 1, "records": []}']
)
def test_what_is_no_report_is_not_drawn_again(tmp_path, content):
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(InvalidRequestError, match=r"report\.json: "):
        read_report(tmp_path / "report.json")
