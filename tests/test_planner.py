"""The planner's parts: cards, calibration, timing model, traces, comparison with measurements."""

import contextlib
import dataclasses
import json
import os
import pickle
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specter_jax.errors import BudgetError, CheckpointError, InvalidRequestError
from specter_jax.planner.calibration import DEFAULT_CALIBRATION, fitted_cells, load_calibration
from specter_jax.planner.cards import CARDS, get_card
from specter_jax.planner.model import expert_bytes, planned_model
from specter_jax.planner.predict import check_request, compare, feasible, predict
from specter_jax.planner.timing import Hardware
from specter_jax.planner.traces import BUNDLED, bundled_trace, load_trace, save_trace
from tests.conftest import TINY_SOURCE
from tests.planner_cases import (
    CONFIG,
    EXPERTS,
    FREE,
    HARDWARE,
    LAYERS,
    MODEL,
    random_trace,
    timing,
    trace_of,
)

rates = st.floats(1e9, 1e13)


def test_cards_have_sources_and_plausible_figures():
    assert set(CARDS) == {"rtx-3090", "rtx-4090", "rtx-5090", "a100-80gb", "h100-sxm", "h200"}
    for name, card in CARDS.items():
        assert get_card(name) is card
        assert "NVIDIA" in card.source
        hardware = Hardware.of_card(card)
        # Memory is tens of times as fast as the link, and the sheet's number stands in the source.
        assert 20 < hardware.bandwidth / hardware.link < 110
        stated = (f"{card.bandwidth * 1000:g} GB/s", f"{card.bandwidth:g} TB/s")
        assert any(figure in card.source for figure in stated)
    with pytest.raises(InvalidRequestError, match="'gtx-980': choose one of rtx-3090"):
        get_card("gtx-980")
    with pytest.raises(InvalidRequestError, match="link is -1"):
        Hardware(bandwidth=1e12, link=-1e9)


@pytest.mark.parametrize("figure", [0.0, -1e12, 1e-300, 1e300, float("inf"), float("nan"), 1e5])
def test_figures_of_no_machine_are_refused_with_the_range(figure):
    for name, expected in (("bandwidth", "0.001 to 1000 TB/s"), ("link", "0.001 to 10000 GB/s")):
        with pytest.raises(InvalidRequestError, match=f"{name} is .*; expected {expected}") as told:
            Hardware(**{"bandwidth": 1e12, "link": 1e10, name: figure})
        assert "\n" not in str(told.value)


def test_every_calibrated_field_says_its_unit_and_source():
    fields = json.loads(DEFAULT_CALIBRATION.read_text())["fields"]
    assert all(field["unit"] and field["source"] for field in fields.values())
    calibration = load_calibration()
    assert calibration.issue_us == fields["issue_us"]["value"]
    assert 0 < calibration.memory_efficiency <= 1
    assert 0 < calibration.link_efficiency <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["fields"].pop("poll_us"), "poll_us are missing or unknown"),
        (lambda c: c["fields"].update(extra={"value": 1}), "extra are missing or unknown"),
        (lambda c: c["fields"]["issue_us"].update(value=-1), "issue_us is -1"),
        (lambda c: c["fields"]["issue_us"].update(value=True), "issue_us is True"),
        (
            lambda c: c["fields"]["draft_efficiency"].update(value=0),
            "draft_efficiency is 0",
        ),
        (lambda c: c.update(fields=3), "boundary_us.* are missing"),
    ],
)
def test_a_wrong_calibration_is_refused_by_field(tmp_path, change, message):
    content = json.loads(DEFAULT_CALIBRATION.read_text())
    change(content)
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidRequestError, match=message):
        load_calibration(path)
    path.write_text("[]")
    with pytest.raises(InvalidRequestError, match="expected an object"):
        load_calibration(path)


def test_a_calibration_names_the_cells_it_was_fitted_to(tmp_path):
    told = {"model", "expert_format", "budget_gib", "policy", "depth", "dataset"}
    assert fitted_cells()
    assert all(set(cell) == told for cell in fitted_cells())
    path = tmp_path / "calibration.json"
    path.write_text("{}")
    assert fitted_cells(path) == []
    for wrong in ('{"fitted_on": {}}', '{"fitted_on": [1]}', "{"):
        path.write_text(wrong)
        with pytest.raises(InvalidRequestError):
            fitted_cells(path)


def test_times_are_bytes_over_bandwidth_plus_fixed_costs():
    costs = dataclasses.replace(
        FREE,
        memory_efficiency=0.5,
        link_efficiency=0.25,
        transfer_expert_us=40,
        draft_efficiency=0.8,
        draft_layer_us=100,
        verify_efficiency=0.9,
        verify_layer_us=200,
    )
    model = timing(costs)
    read = MODEL.num_layers * MODEL.layer + MODEL.head
    assert model.draft_step(20) == pytest.approx(
        # Only experts are read at the draft's own rate.
        read / (0.9 * 0.5e12) + 20 * MODEL.draft_expert / (0.8 * 0.5e12) + MODEL.num_layers * 100e-6
    )
    assert model.verification(45) == pytest.approx(
        (read + 45 * MODEL.expert_read) / (0.9 * 0.5e12) + MODEL.num_layers * 200e-6
    )
    assert model.transfer() == pytest.approx(MODEL.expert / 5e9 + 40e-6)
    nested = dataclasses.replace(
        model,
        model=dataclasses.replace(MODEL, is_nested=True),
        calibration=dataclasses.replace(costs, nested_efficiency=0.45),
    )
    assert nested.experts(45) == pytest.approx(2 * model.experts(45))
    assert nested.layer() == model.layer()
    parts = MODEL.num_layers * model.layer() + model.experts(45) + model.head()
    assert parts == pytest.approx(model.verification(45))


@given(slow=rates, fast=rates, experts=st.integers(0, 500))
def test_times_fall_with_bandwidth_and_link(slow, fast, experts):
    slow, fast = sorted((slow, fast))
    for name, time in (
        ("bandwidth", lambda t: t.draft_step(experts)),
        ("bandwidth", lambda t: t.verification(experts)),
        ("bandwidth", lambda t: t.commit(experts)),
        ("link", lambda t: t.transfer()),
    ):
        assert time(timing(**{name: fast})) <= time(timing(**{name: slow}))


@given(experts=st.integers(0, 500), more=st.integers(1, 100))
def test_times_grow_with_experts(experts, more):
    model = timing()
    for time in (model.draft_step, model.verification, model.commit):
        assert time(experts + more) > time(experts)


def test_a_trace_survives_saving_and_selection_spreads_over_it(tmp_path):
    trace = random_trace(1, prompts=5, prompt_tokens=3, outputs=10)
    path = tmp_path / "trace.npz"
    save_trace(trace, path)
    loaded = load_trace(path)
    assert np.array_equal(loaded.target_experts, trace.target_experts)
    assert np.array_equal(loaded.agree, trace.agree)
    assert loaded.source == "made up, greedy text"
    some = loaded.select(3, 4)
    assert some.num_prompts == 3
    assert np.array_equal(some.target_experts, trace.target_experts[:, [0, 2, 4], :7])
    assert np.array_equal(some.agree, trace.agree[[0, 2, 4], :4])
    assert loaded.select(99, 99).num_prompts == 5
    with pytest.raises(InvalidRequestError, match=r"lacks sampled_.* trace of sampled text"):
        load_trace(path, "sampled")
    for prompts, outputs in ((0, 4), (3, 1)):
        with pytest.raises(InvalidRequestError, match="expected at least 1 of 2"):
            trace.select(prompts, outputs)


def damaged(content: bytes, place: float) -> bytes:
    """One byte turned over."""
    at = int(len(content) * place)
    return content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]


def test_files_that_are_no_traces_are_refused(tmp_path):
    path = tmp_path / "trace.npz"
    save_trace(random_trace(1), path)
    whole = path.read_bytes()
    for content, what in (
        (b"", "is empty"),
        (b"some text\n", "is no .npz file"),
        (pickle.dumps({}), "is no .npz file"),
        (b"\x93NUMPY\x01\x00", "is no .npz file"),
        (b"PK", "is cut short or damaged"),
        *((whole[: int(len(whole) * part)], "is cut short") for part in (0.1, 0.5, 0.99)),
    ):
        path.write_bytes(content)
        with pytest.raises(InvalidRequestError, match=what) as told:
            load_trace(path)
        message = str(told.value)
        assert message.startswith(f"{path}: ")
        assert "expected a routing trace of greedy text, an .npz file such as" in message
        assert "\n" not in message
        assert "pickle" not in message
    for place in range(20):
        path.write_bytes(damaged(whole, place / 20))
        # Nothing else is raised; some bytes, such as those of a date, do not matter.
        with contextlib.suppress(InvalidRequestError):
            load_trace(path)
    with pytest.raises(InvalidRequestError, match="is a directory; expected a routing trace"):
        load_trace(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequestError, match="is no regular file; expected a routing trace"):
        load_trace(tmp_path / "pipe")
    np.savez(path, prompt_tokens=3)
    with pytest.raises(InvalidRequestError, match="lacks greedy_draft_argmax, greedy_draft_exp"):
        load_trace(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("greedy_target_experts.npy", "no array")
    with pytest.raises(InvalidRequestError, match=r"lacks .*greedy_target_experts"):
        load_trace(path)
    trace = random_trace(1)
    for wrong in (
        dataclasses.replace(trace, draft_experts=trace.draft_experts[:, :1]),
        dataclasses.replace(trace, prompt_tokens=2),
        dataclasses.replace(trace, target_experts=trace.target_experts.astype(float)),
        dataclasses.replace(trace, draft_argmax=trace.draft_argmax[:, :5]),
        dataclasses.replace(trace, target_argmax=np.int64(3), draft_argmax=np.int64(3)),
    ):
        save_trace(wrong, path)
        with pytest.raises(InvalidRequestError, match="contradict"):
            load_trace(path)
    save_trace(dataclasses.replace(trace, prompt_tokens=1), path)
    with np.load(path) as file:
        np.savez(path, **{**file, "prompt_tokens": np.array([1, 2])})
    with pytest.raises(InvalidRequestError, match="prompt_tokens is no whole number"):
        load_trace(path)


def test_what_needs_no_trace_is_checked_before_one_is_there():
    model = planned_model(TINY_SOURCE, load_calibration())
    sizes = check_request(model, budgets=[2**34], policy="lru", max_context=128)
    assert sizes[2**34][0] == LAYERS * EXPERTS
    for options, message in (
        ({"budgets": []}, "at least one budget"),
        ({"budgets": [2**34, 2**60]}, "at most 16384.00 GiB"),
        ({"budgets": [1, 2**34]}, "a budget of 1 B is too small: this model needs at least"),
        ({"max_context": 1}, "max_context is 1"),
        ({"policy": "mo"}, "next layer's experts"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            check_request(model, **({"budgets": [2**34], "policy": "lru"} | options))


def test_a_calibration_of_absurd_figures_is_named_as_the_reason():
    calibration = dataclasses.replace(load_calibration(), memory_efficiency=1e-300)
    with pytest.raises(InvalidRequestError, match=r"ms; expected 0 to 1e\+09: the calibration"):
        predict(
            planned_model(TINY_SOURCE, calibration),
            random_trace(1, outputs=4),
            HARDWARE,
            calibration,
            budgets=[2**34],
            depths=[0],
            max_context=128,
        )


def test_a_trace_of_fewer_layers_is_stretched_in_place():
    trace = random_trace(2)
    assert trace.fitted(CONFIG) is trace
    first = dataclasses.replace(
        trace, target_experts=trace.target_experts[:2], draft_experts=trace.draft_experts[:2]
    )
    stretched = first.fitted(CONFIG)
    assert stretched.num_layers == LAYERS
    for layer, origin in enumerate([0, 0, 0, 1, 1]):
        assert np.array_equal(stretched.target_experts[layer], trace.target_experts[origin])
    assert "2 layers stretched to 5" in stretched.source
    other = dataclasses.replace(trace, target_experts=trace.target_experts + EXPERTS)
    with pytest.raises(InvalidRequestError, match="the model has 5 layers, 4 choices and 32"):
        other.fitted(CONFIG)


def test_a_trace_that_knows_its_experts_fits_no_model_of_more(tmp_path):
    path = tmp_path / "trace.npz"
    more = dataclasses.replace(CONFIG, num_experts=2 * EXPERTS)
    save_trace(random_trace(2), path)
    assert load_trace(path).num_experts is None
    assert load_trace(path).fitted(more).num_layers == LAYERS
    save_trace(dataclasses.replace(random_trace(2), num_experts=EXPERTS), path)
    trace = load_trace(path).select(1, 8)
    assert trace.num_experts == EXPERTS
    assert trace.fitted(CONFIG) is trace
    with pytest.raises(InvalidRequestError, match=r"of 32 experts; the model has .* 64 experts"):
        trace.fitted(more)
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **{**arrays, "num_experts": np.float32(EXPERTS)})
    with pytest.raises(InvalidRequestError, match="num_experts is no whole number"):
        load_trace(path)
    np.savez(path, **{**arrays, "num_experts": np.int64(EXPERTS // 2)})
    with pytest.raises(InvalidRequestError, match=r"num_experts is 16, but expert \d+ is chosen"):
        load_trace(path)


def test_no_trace_of_the_package_stands_for_a_model_of_more_experts():
    """DeepSeek-V2 chooses as many a token as DeepSeek-V2-Lite, of 160 in place of 64."""
    shape = {"num_experts": 160, "top_k": 6, "moe_layers": tuple(range(1, 60)), "num_layers": 60}
    with pytest.raises(InvalidRequestError, match="59 MoE layers of 160 experts, 6 a") as told:
        bundled_trace(dataclasses.replace(CONFIG, **shape))
    assert "record one with --record" in str(told.value)
    assert "\n" not in str(told.value)


def test_the_traces_of_the_package_are_small_and_whole():
    files = sorted(BUNDLED.glob("*.npz"))
    assert sum(file.stat().st_size for file in files) < 200_000
    for file in files:
        trace = load_trace(file)
        assert 0.9 < trace.agree.mean() < 1
        assert "stretched" in trace.source
        layers, experts = trace.num_layers, int(trace.target_experts.max()) + 1
        shape = {
            "num_experts": experts,
            "top_k": trace.target_experts.shape[-1],
            "moe_layers": tuple(range(layers)),
            "num_layers": layers,
        }
        assert bundled_trace(dataclasses.replace(CONFIG, **shape)).source == trace.source
    with pytest.raises(InvalidRequestError, match="no trace in the package fits 5 MoE layers"):
        bundled_trace(CONFIG)


def test_sizes_of_a_converted_model_equal_those_of_its_config_alone(tiny_directory):
    calibration = load_calibration()
    for form in ("plain", "nested"):
        converted = planned_model(tiny_directory, calibration, form)
        bare = planned_model(TINY_SOURCE, calibration, form)
        assert converted.has_weights
        assert not bare.has_weights
        # A converted nested model knows its escapes, its config alone only an estimate.
        assert bare.read_bytes().layer == converted.read_bytes().layer
        assert bare.read_bytes().draft_expert == converted.read_bytes().draft_expert
        assert bare.expert_bytes == pytest.approx(converted.expert_bytes, rel=0.05)
    plain, nested = (expert_bytes(CONFIG, form, 0.02) for form in ("plain", "nested"))
    assert plain == 2 * CONFIG.expert_elements
    # One byte a weight, three more an escape, and four for each row.
    assert 1.06 <= nested / CONFIG.expert_elements < 1.15


def test_what_verification_reads_of_nested_experts_includes_the_draft():
    models = [planned_model(TINY_SOURCE, load_calibration(), f) for f in ("plain", "nested")]
    plain, nested = (model.read_bytes() for model in models)
    assert plain.expert_read == plain.expert
    assert (plain.is_nested, nested.is_nested) == (False, True)
    assert nested.expert_read == nested.expert + nested.draft_expert
    shared = plain.num_layers * plain.layer + plain.head
    assert plain.head == CONFIG.vocab_size * CONFIG.hidden_size * 2
    assert shared > plain.head


def test_budgets_that_hold_nothing_are_left_out_up_to_one_that_holds_all():
    model = planned_model(TINY_SOURCE, load_calibration())
    sizes = [2**20 * n for n in (1, 400, 500, 600, 4000, 8000)]
    found = feasible(model, sizes, 128)
    slots = [model.sizes(size, 128)[0] for size in found]
    assert slots == sorted(slots)
    assert slots[-1] == LAYERS * EXPERTS
    assert slots.count(LAYERS * EXPERTS) == 1
    with pytest.raises(BudgetError):
        model.sizes(2**20, 128)


def test_directories_without_a_model_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="neither a converted model nor a config"):
        planned_model(tmp_path, load_calibration())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        planned_model(tmp_path, load_calibration())
    with pytest.raises(InvalidRequestError, match="'zip'; expected one of nested, plain"):
        planned_model(TINY_SOURCE, load_calibration(), "zip")


def cell(budget: int, depth: int, **times: float) -> dict:
    return {"model": "m", "gpu_memory_bytes": budget, "policy": "lru", "depth": depth, **times}


def test_errors_are_relative_to_what_was_measured():
    predicted = [cell(b, d, predicted_tpot_ms=12.0) for b in (16, 24) for d in (0, 8)]
    measured = [
        cell(16, 8, tpot_ms=10.0),
        cell(24, 0, tpot_ms=16.0),
        cell(32, 8, tpot_ms=1.0),
    ]
    result = compare(predicted, measured)
    errors = [12 / 10 - 1, 12 / 16 - 1]
    assert [c["error"] for c in result.cells] == pytest.approx(errors)
    assert result.mean_error == pytest.approx(sum(map(abs, errors)) / 2)
    assert result.to_dict()["cells"][0]["gpu_memory_bytes"] == 16
    with pytest.raises(InvalidRequestError, match="no cell is both"):
        compare(predicted, measured[2:])
    with pytest.raises(InvalidRequestError, match="twice"):
        compare(predicted + predicted, measured)
    with pytest.raises(InvalidRequestError, match="expected ms above 0"):
        compare(predicted, [cell(16, 8, tpot_ms=0.0)])


def test_agreement_is_where_both_name_the_same_token():
    agree = np.array([[True, False, True]])
    experts = np.zeros((LAYERS, 1, 5, CONFIG.top_k), int)
    assert np.array_equal(trace_of(experts, experts, agree, 2).agree, agree)
