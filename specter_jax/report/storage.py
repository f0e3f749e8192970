"""The report's two files: `report.json`, and `index.html` drawn from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from specter_jax.errors import InvalidRequestError
from specter_jax.output import write_text_atomically
from specter_jax.report import SECTIONS
from specter_jax.report.evaluation import SCHEMA
from specter_jax.report.page import render_page

JSON_NAME, PAGE_NAME = "report.json", "index.html"


def write_report(report: dict[str, Any], directory: str | os.PathLike[str]) -> Path:
    """Writes both files into the directory, which is made if need be; returns the page's path.

    Raises OSError.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, ensure_ascii=False, separators=(",", ":"))
    # The data first: a failure to draw must not lose what took long to measure.
    write_text_atomically(folder / JSON_NAME, text + "\n")
    write_text_atomically(folder / PAGE_NAME, render_page(json.loads(text)))
    return folder / PAGE_NAME


def read_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A report's JSON; raises InvalidRequestError if it is none, OSError."""
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        schema, records = report["schema"], report["records"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequestError(f"{path}: not the JSON of a report") from error
    if schema != SCHEMA:
        raise InvalidRequestError(
            f"{path}: a report of format {schema}, this version reads {SCHEMA}; measure anew"
        )
    for section in SECTIONS:
        records.setdefault(section, [])
    return report
