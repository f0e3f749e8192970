"""Options of `specter report`."""

from __future__ import annotations

from typing import Any


def add_report(commands: Any) -> None:
    """Adds the subcommand to `commands`, what `add_subparsers` gave."""
    parser = commands.add_parser(
        "report", help="measure and draw the evaluation: an HTML page and the JSON behind it"
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="where report.json and index.html are written"
    )
    parser.add_argument(
        "--models",
        nargs="+",
        metavar="DIR",
        help="converted or Hugging Face directories (default: the repository's small model)",
    )
    parser.add_argument(
        "--datasets",
        metavar="DIR",
        help="a directory of .jsonl or .jsonl.gz prompt files (default: a few built-in prompts)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer prompts, depths, budgets and batches"
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="also draw what scripts/bench/h200.py measured on a GPU at true size",
    )
    parser.add_argument(
        "--results",
        metavar="DIR",
        help="where its JSON is (default: the repository's scripts/bench/results); implies --gpu",
    )
    parser.add_argument(
        "--traces",
        metavar="DIR",
        help="routing recorded at true size, .npz files as scripts/replay_traces.py reads them",
    )
    parser.add_argument(
        "--redraw",
        metavar="FILE.json",
        help="measure nothing here: take the small models' figures from an earlier report.json",
    )
    parser.add_argument(
        "--cache-dir", metavar="DIR", help="where a Hugging Face model's conversion is kept"
    )
