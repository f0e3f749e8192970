"""Compares what the planner predicts with what was measured on a GPU.

    python scripts/bench/validate_planner.py RESULTS.json... --data DIR [--card h200]
        [--traces DIR] [--calibration FILE.json] [--out FILE.json]

RESULTS are files with "cells", as `h200.py` and `cells.py` write them. The planner is given nothing
but the card's nominal figures, the calibration, the number of slots and a routing trace: the
package's own, or one of `--traces` (files named after the models), of which cells get the prompts
of their own kind of text where the file names it (`bench_traces.py`). Plain decoding measured
beside a cell counts as a cell of depth 0; cells of policies that guess the next layer are left out.
Prints a markdown table and the mean error over cells that the calibration was not fitted to.
`--out FILE` replaces "planner" (those cells, which the report shows) and "planner_fitted" in it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.bench import results_file, true_size
from scripts.bench.bench_traces import traces_of
from specter_jax.planner.calibration import DEFAULT_CALIBRATION, fitted_cells, load_calibration
from specter_jax.planner.cards import get_card
from specter_jax.planner.model import model_of_config
from specter_jax.planner.timing import Hardware
from specter_jax.planner.validate import (
    errors,
    is_predictable,
    predict_measured,
    split_fitted,
    with_plain_decoding,
)


def main(arguments: list[str] | None = None) -> int:
    """Predicts and prints; returns the exit code."""
    options = _parser().parse_args(arguments)
    cells = [cell for path in options.results for cell in json.loads(path.read_text())["cells"]]
    cells = with_plain_decoding(cell for cell in cells if not cell.get("baseline"))
    calibration = load_calibration(options.calibration)
    configs = {
        name: true_size.model_config(options.data, name) for name in {c["model"] for c in cells}
    }
    models = {
        (name, form): model_of_config(config, calibration, form)
        for name, config in configs.items()
        for form in ("nested", "plain")
    }
    traces = traces_of(
        configs,
        options.traces,
        text=options.text,
        num_prompts=options.num_prompts,
        new_tokens=options.new_tokens,
    )
    skipped = sum(not is_predictable(cell) for cell in cells)
    print("| model | experts | GiB | slots | policy | depth | predicted ms | measured ms | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    hardware = Hardware.of_card(get_card(options.card))
    rows = predict_measured(cells, models, traces, hardware, calibration, _print_row)
    unseen, seen = split_fitted(rows, fitted_cells(options.calibration))
    print(f"\n{len(rows)} cells, {skipped} not predictable")
    for title, part in (("not used for fitting", unseen), ("used for fitting", seen)):
        if part:
            print(f"{len(part)} {title}: mean error {errors(part).mean_error:.1%}")
    if options.out:
        result = results_file.read(options.out)
        result["planner"], result["planner_fitted"] = unseen, seen
        result["planner_meta"] = {
            "calibration": calibration.source,
            "traces": {
                name: trace.source for name, trace in traces.items() if isinstance(name, str)
            },
            "mean_error": errors(unseen).mean_error if unseen else None,
        }
        results_file.write(options.out, result)
    return 0


def _print_row(row: dict[str, Any]) -> None:
    error = row["predicted_tpot_ms"] / row["measured_tpot_ms"] - 1
    print(
        f"| {row['model']} | {row['expert_format']} | {row['budget_gib']} | {row['slots']} "
        f"| {row['policy']} | {row['depth']} | {row['predicted_tpot_ms']:.1f} "
        f"| {row['measured_tpot_ms']:.1f} | {error:+.0%} |",
        flush=True,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, required=True, help="as for h200.py")
    parser.add_argument("--card", default="h200")
    parser.add_argument("--traces", type=Path, help="default: those of the package")
    parser.add_argument("--text", choices=("greedy", "sampled"), default="greedy")
    parser.add_argument("--calibration", type=Path, default=DEFAULT_CALIBRATION)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main())
