"""Fits the planner's costs of the host to measured cells.

    python scripts/bench/fit_planner.py results/h200.json --data DIR [--write]

The cells are those that the calibration names under "fitted_on", which may be at most half of all.
Two costs (`COSTS`) are varied, by least squares of relative errors of the time per token; the
others come from measurements of their own and stay. Prints them, or with `--write` puts them into
the calibration, whose texts are not changed. `validate_planner.py` then tells the error on the
cells that are not named.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from scripts.bench import true_size
from scripts.bench.bench_traces import traces_of
from specter_jax.planner.calibration import (
    DEFAULT_CALIBRATION,
    Calibration,
    fitted_cells,
    load_calibration,
)
from specter_jax.planner.cards import get_card
from specter_jax.planner.model import model_of_config
from specter_jax.planner.timing import Hardware
from specter_jax.planner.validate import predict_measured, split_fitted, with_plain_decoding

COSTS = ("host_layer_us", "verify_call_us")
ROUNDS = 3
STEP_US = 50.0

Rows = Sequence[Mapping[str, Any]]


def fit(predict: Callable[[Calibration], Rows], calibration: Calibration) -> Calibration:
    """The calibration with `COSTS`, 0 or more, such that predictions come closest to the rows.

    predict: gives rows as `predict_measured` does. Gauss and Newton's method; what the rows do not
        depend on stays as it is.
    """
    for _ in range(ROUNDS):
        base = relative_errors(predict(calibration))
        slopes = np.stack(
            [
                (relative_errors(predict(_moved(calibration, {name: STEP_US}))) - base) / STEP_US
                for name in COSTS
            ],
            axis=1,
        )
        steps = -np.linalg.lstsq(slopes, base, rcond=1e-6)[0]
        calibration = _moved(calibration, dict(zip(COSTS, steps.tolist(), strict=True)))
    return calibration


def relative_errors(rows: Rows) -> np.ndarray:
    """float64 [rows]: predicted over measured time per token, less 1."""
    return np.array([row["predicted_tpot_ms"] / row["measured_tpot_ms"] - 1 for row in rows])


def _moved(calibration: Calibration, steps: Mapping[str, float]) -> Calibration:
    values = {name: max(0.0, getattr(calibration, name) + step) for name, step in steps.items()}
    return dataclasses.replace(calibration, **values)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="as for h200.py")
    parser.add_argument("--card", default="h200")
    parser.add_argument("--traces", type=Path, help="default: those of the package")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--calibration", type=Path, default=DEFAULT_CALIBRATION)
    parser.add_argument("--write", action="store_true", help="into the calibration")
    args = parser.parse_args(argv)
    calibration = load_calibration(args.calibration)
    every = with_plain_decoding(json.loads(args.results.read_text())["cells"])
    cells = split_fitted(every, fitted_cells(args.calibration))[1]
    if not cells or 2 * len(cells) > len(every):
        raise SystemExit(
            f"error: fitted_on names {len(cells)} of {len(every)} cells; expected 1 to half of them"
        )
    configs = {cell["model"]: true_size.model_config(args.data, cell["model"]) for cell in cells}
    traces = traces_of(
        configs, args.traces, num_prompts=args.num_prompts, new_tokens=args.new_tokens
    )
    hardware = Hardware.of_card(get_card(args.card))

    def predict(tried: Calibration) -> Rows:
        models = {
            (name, form): model_of_config(config, tried, form)
            for name, config in configs.items()
            for form in ("nested", "plain")
        }
        return predict_measured(cells, models, traces, hardware, tried)

    result = fit(predict, calibration)
    content = json.loads(args.calibration.read_text())
    for name in COSTS:
        value = float(f"{getattr(result, name):.3g}")
        print(f"{name}: {getattr(calibration, name):g} -> {value:g}")
        content["fields"][name]["value"] = value
    print("errors left:", ", ".join(f"{e:+.1%}" for e in relative_errors(predict(result))))
    if args.write:
        args.calibration.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
