"""The report's measurements on the small model, at the smallest size that has every figure."""

import dataclasses
import json

import numpy as np
import pytest

import specter_jax as sj
from specter_jax.report import SECTIONS, evaluation, measure_runs
from specter_jax.report.evaluation import measure
from specter_jax.report.measure_experts import decoded_experts, plain_experts, token_wise
from specter_jax.report.measure_routing import Recorder
from specter_jax.report.prompts import BUILT_IN, Task
from specter_jax.report.settings import Settings
from specter_jax.report.storage import write_report
from specter_jax.systems import SYSTEMS

SMALLEST = Settings(
    task_prompts=2,
    mixed_prompts=2,
    prompt_tokens=16,
    new_tokens=8,
    depths=(2,),
    depth=2,
    diversity_depth=2,
    shares=(0.25,),
    batches=(1,),
    batch_depth=2,
    routing_batches=(1, 2),
    prefill_tokens=(16,),
    draft_batches=(1,),
    passes=1,
    repeats=1,
)
TASKS = tuple(Task(name=task.name, prompts=task.prompts[:2]) for task in BUILT_IN[:2])
# `auto` would compile six depths, and guessing the next layer other programs: see other tests.
SYSTEMS_AT_2 = {name: dataclasses.replace(SYSTEMS[name], depth=2) for name in ("sp-moe", "specter")}
POLICIES = ("lru", "lru-s", "lookahead")


@pytest.fixture(scope="module")
def model(tiny_directory):
    """Every expert in a slot, in float32."""
    return sj.load(tiny_directory, dtype="float32", max_context=SMALLEST.context)


@pytest.fixture(scope="module")
def report(tiny_directory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_runs, "AUTO", 2)
        # Other tests of this process may count what is compiled.
        patch.setattr(evaluation.jax, "clear_caches", lambda: None)
        patch.setattr(measure_runs, "HIT_RATE_POLICIES", POLICIES)
        patch.setattr(measure_runs, "PREFILL_SYSTEMS", ("specter",))
        patch.setattr(evaluation, "SYSTEMS", SYSTEMS_AT_2)
        return measure([tiny_directory], TASKS, SMALLEST)


def test_the_recorder_decodes_what_generate_does(model):
    prompt = np.arange(5, 15, dtype=np.int32)
    iterations = Recorder(model, SMALLEST.context)(prompt, depth=2, new_tokens=8)
    num_new = [it.num_new for it in iterations]
    assert sum(num_new) >= 7
    assert all(it.draft.shape[1] == 2 and it.target.shape[1] == 3 for it in iterations)
    # One token comes from the prompt. With exactly as many as these, no draft is wasted.
    result = sj.generate(model, [prompt], max_new_tokens=1 + sum(num_new), depth=2, ignore_eos=True)
    assert result.stats.iterations == len(iterations)
    assert result.stats.accepted == sum(num_new) - len(iterations)


def test_formats_of_the_draft_agree(model):
    layer = model.params["draft"][next(iter(model.params["draft"]))]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, model.config.hidden_size)).astype(np.float32)
    experts = np.array([[0, 3], [3, 5]], np.int32)
    weights = np.full((2, 2), 0.5, np.float32)
    from pallas_kernels.draft_experts import draft_experts

    layer = {name: array for name, array in layer.items() if not name.startswith("table_")}
    np.testing.assert_allclose(
        decoded_experts(x, experts, weights, layer),
        draft_experts(x, experts, weights, layer),
        rtol=1e-4,
        atol=1e-5,
    )


def test_token_wise_is_the_same_work(model):
    from pallas_kernels.expert_ffn import expert_ffn

    slots, table = plain_experts(model)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, model.config.hidden_size)).astype(np.float32)
    experts = rng.integers(0, model.config.num_experts, (3, 4)).astype(np.int32)
    weights = np.full((3, 4), 0.25, np.float32)
    np.testing.assert_allclose(
        token_wise(x, experts, weights, slots, table[1]),
        expert_ffn(x, experts, weights, slots, table[1]),
        rtol=1e-5,
        atol=1e-6,
    )


def test_every_section_is_measured(report):
    assert {name for name, found in report["records"].items() if not found} == {"planner"}
    assert set(report["records"]) == set(SECTIONS)
    assert report["meta"]["versions"]["jax"]
    (described,) = report["models"]
    assert described["experts"] == 32


def test_what_was_measured_is_plausible(report):
    records = report["records"]
    (match,) = records["match"]
    assert 0.9 < match["mean"] <= 1
    assert sum(match["matched_counts"]) == match["observations"]
    (distinct,) = records["distinct"]
    (point,) = distinct["points"]
    # Three positions of four experts each.
    assert 4 < point["mean"] < 12
    assert point["max"] <= 12
    (depth,) = records["depth"]
    assert [point["depth"] for point in depth["points"]] == [0, 2]
    assert depth["auto"]["depth"] == 2
    cells = {(cell["dataset"], cell["system"]) for cell in records["end_to_end"]}
    assert cells == {(task.name, system) for task in TASKS for system in SYSTEMS_AT_2}
    assert all(cell["tpot_ms"] > 0 and cell["expert_slots"] == 40 for cell in records["end_to_end"])
    rates = {record["policy"]: record["hit_rate"] for record in records["hit_rate"]}
    assert rates["lookahead"] > rates["lru-s"]
    tracks = {span["track"] for span in records["timeline"][0]["spans"]}
    assert {"draft", "transfers", "verification"} <= tracks
    distances = np.array(records["diversity"][0]["distances"])
    assert (distances >= 0).all()
    assert (distances <= 1).all()


def test_the_page_shows_the_numbers_of_the_json(report, tmp_path):
    page = write_report(report, tmp_path).read_text(encoding="utf-8")
    stored = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert stored == report
    match = stored["records"]["match"][0]["mean"]
    assert f"{match:.1%} ({stored['models'][0]['model']})" in page
    tpot = stored["records"]["end_to_end"][0]["tpot_ms"]
    assert f">{tpot:.4g}</td>" in page
    for link in ("http://", "https://", "<script", "<link"):
        assert link not in page
    assert str(tmp_path) not in page
