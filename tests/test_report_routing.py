"""The report's statistics of routing, its prompts and the iterations it cuts from traces."""

import gzip
import json

import numpy as np
import pytest

from specter_jax.errors import InvalidRequestError, PromptError
from specter_jax.report.measure_timeline import median_iteration
from specter_jax.report.prompts import BUILT_IN, mixed, read_tasks, spread
from specter_jax.report.routing import (
    Iteration,
    batched_distinct,
    distinct_experts,
    diversity_record,
    jensen_shannon,
    match_record,
)
from specter_jax.report.settings import FULL
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


def save_trace(file, prompts=3, outputs=20, **other):
    """A trace of random routing; `other` arrays stand for what is wrong with it."""
    rng = np.random.default_rng(0)
    experts = rng.integers(0, 8, (2, prompts, 4 + outputs, 2))
    tokens = np.zeros((prompts, outputs), int)
    arrays = {"prompt_tokens": 4, "task": np.array(["a", "b", "a"][:prompts])}
    for model in ("target", "draft"):
        arrays[f"sampled_{model}_experts"] = experts
        arrays[f"sampled_{model}_argmax"] = tokens
    arrays |= other
    np.savez(file, **{name: array for name, array in arrays.items() if array is not None})


def test_a_trace_becomes_records(tmp_path):
    save_trace(tmp_path / "big.npz")
    records = trace_records(tmp_path, FULL)
    assert records["match"][0]["mean"] == 1
    assert records["match"][0]["experts"] == 8
    (diversity,) = records["diversity"]
    assert [(task["task"], task["requests"]) for task in diversity["tasks"]] == [("a", 2), ("b", 1)]


def test_a_trace_may_say_how_many_experts_there_are(tmp_path):
    save_trace(tmp_path / "big.npz", num_experts=64)
    assert trace_records(tmp_path, FULL)["match"][0]["experts"] == 64


@pytest.mark.parametrize(
    "wrong",
    [
        {"task": None},
        {"task": np.array(["a"])},
        {"task": np.array("a")},
        {"task": np.array([{}], object)},
        {"prompt_tokens": np.arange(2)},
        {"prompt_tokens": 5},
        {"sampled_target_experts": np.zeros((2, 3, 24), int)},
        {"sampled_draft_experts": np.zeros((2, 3, 24, 2))},
        {"sampled_target_argmax": np.zeros(20, int)},
        {"sampled_draft_argmax": np.zeros((3, 19), int)},
        # Too short for one verification at depth 16.
        {"outputs": 16},
    ],
)
def test_a_trace_that_contradicts_itself_is_refused(tmp_path, wrong):
    save_trace(tmp_path / "wrong.npz", **wrong)
    with pytest.raises(InvalidRequestError, match=r"wrong\.npz") as refused:
        trace_records(tmp_path, FULL)
    assert "\n" not in str(refused.value)


def test_a_damaged_trace_is_refused(tmp_path):
    file = tmp_path / "bad.npz"
    save_trace(file)
    whole = file.read_bytes()
    contents = [b"", whole[:100], whole[: len(whole) // 2], whole.replace(b"NUMPY", b"NUMBY")]
    with open(tmp_path / "array", "wb") as array:
        np.save(array, np.arange(3))
    contents.append((tmp_path / "array").read_bytes())
    with open(tmp_path / "nothing", "wb") as archive:
        np.savez(archive)
    contents.append((tmp_path / "nothing").read_bytes())
    for content in contents:
        file.write_bytes(content)
        with pytest.raises(InvalidRequestError, match=r"bad\.npz"):
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


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": ""}',
        '{"turns": ["\\ud800"]}',
        '{"prompt": "p", "category": "\\udfff"}',
        '{"turns": {}}',
        "[" * 100_000,
    ],
)
def test_a_line_without_a_prompt_is_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(f'{{"prompt": "p"}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(PromptError, match=r"a\.jsonl, line 3"):
        read_tasks(tmp_path)


def test_damaged_files_of_prompts_are_refused(tmp_path):
    whole = gzip.compress(b'{"prompt": "a word"}\n' * 50)
    # The end of the file is missing, or the compressed data are wrong.
    for content in (whole[:-9], whole[:12] + b"\xff" * 9 + whole[21:], b"no gzip", b"\x1f"):
        (tmp_path / "a.jsonl.gz").write_bytes(content)
        with pytest.raises(PromptError, match=r"a\.jsonl\.gz: cannot be read"):
            read_tasks(tmp_path)


def test_prompts_are_spread_over_the_tasks():
    assert spread(range(10), 3) == [0, 3, 6]
    chosen = mixed(BUILT_IN, 4)
    assert len(chosen) == len(set(chosen)) == 4
    assert {task.name for task in BUILT_IN for prompt in chosen if prompt in task.prompts} == {
        task.name for task in BUILT_IN
    }
