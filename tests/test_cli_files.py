"""Files that commands write: none over another, checked before work, and after the results."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from specter_jax.cli import generate, session
from specter_jax.cli.arguments import build_parser
from specter_jax.cli.main import main
from specter_jax.cli.profile import DEFAULT_PLOT
from specter_jax.cli.session import check_distinct
from specter_jax.errors import InvalidRequestError
from specter_jax.planner.traces import load_trace
from specter_jax.stats import StatsRecorder
from tests.planner_cases import random_trace
from tests.test_profile import made_up_profile


@pytest.fixture(autouse=True)
def environment_unchanged(monkeypatch, tmp_path):
    """`main` runs in this process, whose environment variables are not its to set."""
    monkeypatch.setattr(session, "ENVIRONMENT", {})
    monkeypatch.chdir(tmp_path)


def refuse_loading(*_, **__):
    pytest.fail("the model was loaded")


@pytest.fixture
def no_loading(monkeypatch):
    """Where a request must be refused before the model is loaded."""
    for command in ("generate", "profile"):
        monkeypatch.setattr(f"specter_jax.cli.{command}.load_model", refuse_loading)
    monkeypatch.setattr("specter_jax.model.load", refuse_loading)


@pytest.fixture
def generated(monkeypatch):
    """A generation of one prompt that needs no model: its text."""
    stats = StatsRecorder(sequences=1).summary()
    result = SimpleNamespace(texts=["words"], tokens=[[1]], prompt_stats=[stats], stats=stats)

    def stand_in(*_, on_text=None, **__):
        if on_text is not None:
            on_text(0, "words")
        return result

    monkeypatch.setattr("specter_jax.api.generate", stand_in)
    monkeypatch.setattr("specter_jax.cli.generate.load_model", lambda options: None)
    return "words"


@pytest.fixture
def measured(monkeypatch):
    """A profile that needs no model."""
    monkeypatch.setattr("specter_jax.cli.profile.load_model", lambda options: None)
    monkeypatch.setattr("specter_jax.cli.profile.profile", lambda *_, **__: made_up_profile())


SAME = {
    "statistics and timeline": (
        ("generate", "{model}", "--prompt", "a", "--stats", "x.json", "--trace", "./x.json"),
        "--stats and --trace are the same file, ./x.json: name two",
    ),
    "by a link": (
        ("generate", "{model}", "--prompt", "a", "--stats", "link", "--trace", "p.jsonl"),
        "--stats and --trace are the same file",
    ),
    "prompts and statistics": (
        ("generate", "{model}", "--prompts", "p.jsonl", "--stats", "p.jsonl"),
        "--prompts and --stats are the same file",
    ),
    "prompts and timeline": (
        ("generate", "{model}", "--prompts", "p.jsonl", "--trace", "link"),
        "--prompts and --trace are the same file",
    ),
    "prompts and plot": (
        ("profile", "{model}", "--prompts", "p.svg", "--plot", "p.svg"),
        "--prompts and --plot are the same file",
    ),
    "prompts and recorded trace": (
        ("plan", "{model}", "--card", "h200", "--prompts", "p.jsonl", "--record", "p.jsonl"),
        "--prompts and --record are the same file",
    ),
    "costs and recorded trace": (
        ("plan", "{model}", "--card", "h200", "--calibration", "c.json", "--record", "c.json"),
        "--calibration and --record are the same file",
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_no_file_is_written_over_another(capsys, tiny_directory, tmp_path, no_loading, case):
    arguments, complaint = SAME[case]
    prompt = json.dumps({"prompt": "a"})
    for name in ("p.jsonl", "p.svg", "c.json"):
        (tmp_path / name).write_text(prompt)
    (tmp_path / "link").symlink_to("p.jsonl")
    assert main([part.format(model=tiny_directory) for part in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {complaint}")
    assert error.count("\n") == 1
    assert (tmp_path / "p.jsonl").read_text() == prompt


def test_what_is_written_to_directly_may_be_named_twice(tmp_path):
    check_distinct({"--stats": "/dev/null", "--trace": "/dev/null", "--plot": None})
    check_distinct({"--stats": "a.json", "--trace": "b.json"})
    (tmp_path / "there").touch()
    with pytest.raises(InvalidRequestError, match="same file"):
        check_distinct({"--stats": "there", "--trace": "there"})


@pytest.mark.parametrize("output", [["--json"], ["--quiet"], []])
def test_a_full_disk_loses_neither_results_nor_the_other_file(
    capsys, tiny_directory, tmp_path, generated, output
):
    common = ["generate", str(tiny_directory), "--prompt", "a", *output]
    for full, other in (("--stats", "--trace"), ("--trace", "--stats")):
        written = tmp_path / f"other than {full}.json"
        assert main([*common, full, "/dev/full", other, str(written)]) == 2
        assert json.loads(written.read_text())
        out, err = capsys.readouterr()
        text = json.loads(out)["text"] if "--json" in output else out.removesuffix("\n")
        assert text == generated
        assert out.endswith("\n")
        assert "No space left on device" in err


def test_files_are_written_though_the_reader_of_results_went_away(
    tiny_directory, tmp_path, monkeypatch, generated
):
    def leave(*_):
        raise BrokenPipeError

    monkeypatch.setattr("specter_jax.cli.generate._print_results", leave)
    arguments = ["generate", str(tiny_directory), "--prompt", "a", "--json"]
    files = ["--stats", "stats.json", "--trace", "trace.json"]
    with pytest.raises(BrokenPipeError):
        generate.run(build_parser().parse_args([*arguments, *files]))
    for name in ("stats.json", "trace.json"):
        assert json.loads((tmp_path / name).read_text())


PLAN = (
    "--card",
    "h200",
    "--max-context",
    "128",
    "--depth",
    "0",
    "--prompt",
    "The old man",
    "--json",
)


@pytest.fixture
def recorded(monkeypatch):
    """A recording that needs no model: its trace."""
    trace = random_trace(1)
    monkeypatch.setattr("specter_jax.model.load", lambda *_, **__: None)
    monkeypatch.setattr("specter_jax.planner.record.record_trace", lambda *_, **__: trace)
    return trace


def test_a_full_disk_does_not_lose_a_prediction(capsys, tiny_directory, recorded):
    assert main(["plan", str(tiny_directory), *PLAN, "--record", "/dev/full"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["trace"] == recorded.source
    assert "No space left on device" in err


def test_a_recording_is_kept_though_the_prediction_fails(
    capsys, tiny_directory, tmp_path, monkeypatch, recorded
):
    def fail(*_, **__):
        raise InvalidRequestError("no prediction")

    monkeypatch.setattr("specter_jax.planner.predict.predict", fail)
    assert main(["plan", str(tiny_directory), *PLAN, "--record", "kept.npz"]) == 2
    assert capsys.readouterr().err == "error: no prediction\n"
    kept = load_trace(tmp_path / "kept.npz")
    assert np.array_equal(kept.target_experts, recorded.target_experts)


def test_a_plot_that_nobody_asked_for_may_be_impossible(capsys, tiny_directory, tmp_path, measured):
    # A directory of its name refuses it to every user, as a folder without permission does not.
    (tmp_path / DEFAULT_PLOT).mkdir()
    assert main(["profile", str(tiny_directory), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["best_depth"] == 4
    assert err == f"no plot: --plot {DEFAULT_PLOT}: cannot be written\n"
    assert main(["profile", str(tiny_directory), "--plot", DEFAULT_PLOT]) == 2
    assert capsys.readouterr().err == f"error: --plot {DEFAULT_PLOT}: cannot be written\n"


def test_the_default_plot_spares_the_prompts(capsys, tiny_directory, tmp_path, measured):
    prompts = tmp_path / DEFAULT_PLOT
    prompts.write_text(json.dumps({"prompt": "a"}))
    assert main(["profile", str(tiny_directory), "--json", "--prompts", str(prompts)]) == 0
    assert capsys.readouterr().err.startswith("no plot: --prompts and --plot are the same file")
    assert json.loads(prompts.read_text()) == {"prompt": "a"}


def test_too_few_tokens_to_profile_are_refused_before_loading(capsys, tiny_directory, no_loading):
    assert main(["profile", str(tiny_directory), "--max-new-tokens", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: max_new_tokens is 1; expected at least 2")
    assert error.count("\n") == 1
