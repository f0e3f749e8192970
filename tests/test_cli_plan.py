"""`specter plan` on the command line."""

import json

import numpy as np
import pytest

from specter_jax.cli.main import main
from specter_jax.planner.calibration import load_calibration
from specter_jax.planner.cards import get_card
from specter_jax.planner.model import planned_model
from specter_jax.planner.predict import feasible
from specter_jax.planner.traces import load_trace, save_trace
from tests.conftest import TINY_SOURCE
from tests.planner_cases import EXPERTS, LAYERS, random_trace

CONTEXT = 128
SIZE = ["--max-context", str(CONTEXT)]


@pytest.fixture(scope="module")
def tight():
    """A budget in bytes that holds a part of the experts."""
    model = planned_model(TINY_SOURCE, load_calibration())
    sizes = [mebi * 2**20 for mebi in range(300, 500, 4)]
    partly = feasible(model, sizes, CONTEXT)[:-1]
    return partly[len(partly) // 2]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "made-up.npz"
    save_trace(random_trace(1, prompts=3, outputs=40), path)
    return str(path)


def plan(capsys, *arguments) -> dict:
    assert main(["plan", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_says_predicted_everywhere(capsys, trace, tight):
    result = plan(
        capsys, TINY_SOURCE, "--card", "rtx-4090", "--trace", trace, "--gpu-memory", tight,
        "--gpu-memory", "24GiB", "--depth", 0, "--depth", 2, *SIZE
    )  # fmt: skip
    card = get_card("rtx-4090")
    assert result["kind"] == "predicted"
    assert result["link_bytes_per_s"] == card.link * 1e9
    assert result["bandwidth_bytes_per_s"] == card.bandwidth * 1e12
    cells = result["cells"]
    assert [(c["gpu_memory_bytes"], c["depth"]) for c in cells] == [
        (size, depth) for size in (tight, 24 * 2**30) for depth in (0, 2)
    ]
    given = {"gpu_memory_bytes", "expert_slots", "depth"}
    assert all(name in given or name.startswith("predicted_") for c in cells for name in c)
    assert cells[0]["expert_slots"] < LAYERS * EXPERTS == cells[-1]["expert_slots"]
    assert cells[-1]["predicted_hit_rate"] == 1.0
    for row in result["best"]:
        same = [c for c in cells if c["gpu_memory_bytes"] == row["gpu_memory_bytes"]]
        best = min(same, key=lambda c: c["predicted_tpot_ms"])
        assert row["predicted_best_depth"] == best["depth"]


def test_figures_of_hardware_override_the_cards(capsys, trace, tight):
    common = [TINY_SOURCE, "--trace", trace, "--gpu-memory", tight, "--depth", "0", *SIZE]
    times = []
    for link in ("0.01", "32"):
        result = plan(capsys, *common, "--link", link, "--bandwidth", "1.008")
        assert result["link_bytes_per_s"] == float(link) * 1e9
        times.append(result["cells"][0]["predicted_tpot_ms"])
    by_card = plan(capsys, *common, "--card", "rtx-4090")["cells"][0]["predicted_tpot_ms"]
    assert times[0] > times[1] == by_card


def test_the_table_is_marked_and_names_its_sources(capsys, trace):
    arguments = [str(TINY_SOURCE), "--card", "h200", "--trace", trace, "--depth", "2", *SIZE]
    assert main(["plan", *arguments]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Predicted time per token" in out
    assert "All figures are predicted, none is measured." in out
    assert "made up, greedy text" in out
    assert "NVIDIA H200" in out


def test_a_recorded_trace_can_be_used_again(capsys, tiny_directory, tmp_path, tight):
    path = tmp_path / "recorded.npz"
    common = [tiny_directory, "--card", "a100-80gb", "--gpu-memory", tight, "--depth", 4, *SIZE]
    size = ["--max-new-tokens", "8"]
    first = plan(capsys, *common, *size, "--prompt", "The old man walked", "--record", path)
    trace = load_trace(path)
    assert trace.num_prompts == 1
    assert trace.agree.shape == (1, 8)
    assert trace.num_experts == EXPERTS
    assert np.unique(trace.target_experts).size > 4
    again = plan(capsys, *common, *size, "--trace", path)
    assert again["cells"] == first["cells"]
    assert "recorded from" in first["trace"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no hardware named: give --card, or --bandwidth and --link"),
        (["--bandwidth", "1"], "no hardware named"),
        (["--bandwidth", "1", "--link", "20"], "no memory budget: give --gpu-memory, or --card"),
        (["--card", "rtx-1"], "unknown card 'rtx-1': choose one of rtx-3090"),
        (["--card", "h200", "--link", "nan"], "'nan' is not a number above 0"),
        (["--card", "h200", "--gpu-memory", "1MiB"], "too small"),
        (["--card", "h200", "--prompt", "hi"], "are what --record runs the model on"),
        (["--card", "h200", "--policy", "mo"], "next layer's experts"),
        (["--card", "h200", "--record", "x.npz"], "has no weights to record from"),
        (["--card", "h200", "--link", "1e-300"], "link is 1e-300 GB/s; expected 0.001 to 10000"),
        (["--card", "h200", "--link", "1e300"], "GB/s; expected 0.001 to 10000 GB/s"),
        (["--card", "h200", "--link", "1e9"], "link is 1e+09 GB/s; expected 0.001 to 10000"),
        (["--card", "h200", "--bandwidth", "1e-9"], "is 1e-09 TB/s; expected 0.001 to 1000 TB/s"),
        (["--card", "h200", "--gpu-memory", "1"], "1 B is too small: this model needs at least"),
        (["--card", "h200", "--gpu-memory", "1048576TiB"], "expected at most 16384.00 GiB"),
        (["--card", "h200", "--max-new-tokens", "1"], "expected at least 1 of 2"),
    ],
)
def test_bad_requests_are_one_line(capsys, trace, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    if "--record" not in arguments:
        arguments = [*arguments, "--trace", trace]
    try:
        code = main(["plan", str(TINY_SOURCE), *arguments, *SIZE])
    except SystemExit as exit_:
        code = exit_.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu-memory", "1MiB"], "too small: this model needs at least"),
        (["--gpu-memory", "8GiB", "--policy", "mo"], "next layer's experts"),
        (["--gpu-memory", "8GiB", "--max-new-tokens", "1"], "expected at least 1 and 2"),
        (["--gpu-memory", "8GiB", "--max-new-tokens", "127"], "and 128 together at most"),
    ],
)
def test_what_cannot_be_planned_is_not_recorded(
    capsys, tiny_directory, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.setattr("specter_jax.model.load", lambda *_, **__: pytest.fail("it was loaded"))
    path = tmp_path / "recorded.npz"
    common = [str(tiny_directory), "--card", "h200", "--prompt", "The old man", *SIZE]
    assert main(["plan", *common, "--record", str(path), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not path.exists()


def test_the_slowest_hardware_that_is_accepted_keeps_its_figures(capsys, trace, tight):
    slowest = ["--bandwidth", "0.001", "--link", "0.001", "--gpu-memory", str(tight)]
    assert main(["plan", str(TINY_SOURCE), "--trace", trace, *slowest, *SIZE]) == 0
    out = capsys.readouterr().out
    assert "\N{HORIZONTAL ELLIPSIS}" not in out
    assert all(f"K={depth} " in out for depth in (0, 1, 2, 4, 8, 16))


def test_a_file_that_is_no_trace_is_named_with_what_is_expected(capsys, tmp_path):
    path = tmp_path / "notes.npz"
    path.write_text("some text\n")
    for file, what in ((path, "is no .npz file"), (tmp_path, "is a directory")):
        assert main(["plan", str(TINY_SOURCE), "--card", "h200", "--trace", str(file), *SIZE]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {file}: {what}; expected a routing trace of greedy text")
        assert error.count("\n") == 1


@pytest.mark.parametrize("source", [[], ["--record", "recorded.npz"]])
def test_a_text_that_only_files_have_needs_a_file(
    capsys, tiny_directory, tmp_path, monkeypatch, source
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specter_jax.model.load", lambda *_, **__: pytest.fail("it was loaded"))
    common = ["plan", str(tiny_directory), "--card", "h200", *SIZE, *source]
    assert main([*common, "--text", "sampled"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --text sampled needs --trace: ")
    assert error.count("\n") == 1


def test_a_model_without_a_fitting_trace_is_told_what_to_do(capsys):
    assert main(["plan", str(TINY_SOURCE), "--card", "h200"]) == 2
    assert "give one with --trace, or record one with --record" in capsys.readouterr().err
