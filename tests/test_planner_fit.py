"""Fitting costs of the host: those that made the measurements are found again."""

import dataclasses
import sys

import numpy as np
import pytest

from specter_jax.planner.model import model_of_config
from specter_jax.planner.validate import predict_measured
from tests.conftest import ROOT
from tests.planner_cases import CONFIG, FREE, HARDWARE, random_trace

sys.path.insert(0, str(ROOT / "scripts" / "bench"))

import fit_planner

TRACE = random_trace(3, prompts=2, outputs=24)
TRUE = dataclasses.replace(
    FREE, boundary_us=300.0, issue_us=80.0, host_layer_us=700.0, verify_call_us=4000.0
)
CELLS = [
    {"model": "m", "expert_format": "plain", "policy": "lookahead", "depth": depth, "slots": slots}
    for depth in (0, 4)
    for slots in (20, 80, 158)
]


def rows_at(calibration):
    models = {("m", "plain"): model_of_config(CONFIG, calibration, "plain")}
    return predict_measured(CELLS, models, {"m": TRACE}, HARDWARE, calibration)


def predictor(truth, scale=1.0):
    """Predicts, beside `scale` times what would be measured if `truth` were right."""
    measured = [scale * row["predicted_tpot_ms"] for row in rows_at(truth)]
    return lambda calibration: [
        row | {"measured_tpot_ms": time}
        for row, time in zip(rows_at(calibration), measured, strict=True)
    ]


def test_the_costs_behind_the_measurements_are_found():
    predict = predictor(TRUE)
    start = dataclasses.replace(TRUE, host_layer_us=100.0, verify_call_us=1000.0)
    result = fit_planner.fit(predict, start)
    assert np.abs(fit_planner.relative_errors(predict(start))).max() > 0.2
    assert np.abs(fit_planner.relative_errors(predict(result))).max() < 0.01
    assert result.host_layer_us == pytest.approx(TRUE.host_layer_us, rel=0.05)
    assert result.verify_call_us == pytest.approx(TRUE.verify_call_us, rel=0.05)
    # Nothing else is touched.
    costs = {"host_layer_us": 100.0, "verify_call_us": 1000.0}
    assert dataclasses.replace(result, **costs) == start


def test_costs_do_not_become_negative():
    result = fit_planner.fit(predictor(TRUE, scale=0.01), TRUE)
    assert result.host_layer_us >= 0
    assert result.verify_call_us >= 0
