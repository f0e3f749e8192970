"""`specter report`: the evaluation as a page, whose path is printed at the end."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specter_jax.cli.session import Progress, check_model, prepare_environment
from specter_jax.errors import InvalidRequestError, MissingFileError

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_MODEL = ROOT / "tests" / "data" / "tiny-deepseek_v2"
DEFAULT_RESULTS = ROOT / "scripts" / "bench" / "results"


def run(options: argparse.Namespace) -> None:
    """Measure, draw and write; raises SpecterError or OSError."""
    models = _models(options)
    results = options.results
    if options.gpu and results is None:
        results = _default(DEFAULT_RESULTS, "--results")
    _check_folder(options.out)
    from specter_jax.plots import check_plot

    check_plot("report.svg")
    prepare_environment()
    from specter_jax.report.evaluation import add_results
    from specter_jax.report.storage import write_report

    # Read before anything is measured, which takes long.
    true_size = _true_size(options, results)

    def write(report: dict[str, Any]) -> Path:
        for metas, records in true_size:
            add_results(report, records, metas)
        return write_report(report, options.out)

    print(write(_report(options, models, write)))


def _models(options: argparse.Namespace) -> list[str]:
    """The directories to measure, none if an earlier report is drawn again."""
    if options.redraw is not None:
        if options.models or options.datasets or options.quick:
            raise InvalidRequestError(
                "--redraw measures nothing: it goes without --models, --datasets and --quick"
            )
        return []
    models = options.models or [_default(DEFAULT_MODEL, "--models")]
    for model in models:
        check_model(model)
    return models


def _report(
    options: argparse.Namespace, models: list[str], write: Callable[[dict[str, Any]], Path]
) -> dict[str, Any]:
    """What was measured here, now or in the report that is drawn again.

    write: what stores a report, here one of which only a part was measured.
    """
    from specter_jax.report.evaluation import measure
    from specter_jax.report.prompts import read_tasks
    from specter_jax.report.settings import FULL, QUICK
    from specter_jax.report.storage import read_report

    if options.redraw is not None:
        return read_report(options.redraw)
    tasks = read_tasks(options.datasets)
    settings = QUICK if options.quick else FULL
    with Progress(lines=True) as progress:

        def tell(what: str) -> None:
            progress(what, 0, 1)

        def keep(report: dict[str, Any]) -> None:
            page = write(report)
            # On a terminal a line of progress stands there.
            clear = "\r\033[K" if sys.stderr.isatty() else ""
            print(f"{clear}note: {page} has what was measured so far", file=sys.stderr, flush=True)

        return measure(
            models, tasks, settings, cache_dir=options.cache_dir, progress=tell, keep=keep
        )


def _true_size(
    options: argparse.Namespace, results: str | None
) -> list[tuple[list[dict[str, Any]] | None, dict[str, Any]]]:
    """What `add_results` takes, read from files: metas if they say of any, and records.

    Raises InvalidRequestError if a file is damaged or there is no drawing its figures, OSError.
    """
    from specter_jax.report.page import check_drawable
    from specter_jax.report.results import read_results
    from specter_jax.report.settings import FULL
    from specter_jax.report.traces import trace_records

    found = []
    if results is not None:
        metas, records = read_results(results)
        check_drawable(records, metas, results)
        found.append((metas, records))
    if options.traces is not None:
        found.append((None, trace_records(options.traces, FULL)))
    return found


def _default(path: Path, option: str) -> str:
    """A part of the repository; raises MissingFileError where the package came without it."""
    if not path.is_dir():
        raise MissingFileError(f"{path}: no such directory; give {option}")
    return str(path)


def _check_folder(path: str) -> None:
    """Raises InvalidRequestError if the output cannot be put there, before long work."""
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise InvalidRequestError(f"--out {path}: {folder} is not a directory")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InvalidRequestError(f"--out {path}: cannot be written")
