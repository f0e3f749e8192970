"""The report's two files: `report.json`, and `index.html` drawn from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from specter_jax.errors import InvalidRequestError
from specter_jax.json_files import read_json_object
from specter_jax.output import write_text_atomically
from specter_jax.report import SECTIONS
from specter_jax.report.evaluation import SCHEMA
from specter_jax.report.page import render_page

JSON_NAME, PAGE_NAME = "report.json", "index.html"


def write_report(report: dict[str, Any], directory: str | os.PathLike[str]) -> Path:
    """Writes both files into the directory, which is made if need be; returns the page's path.

    If drawing fails, `report.json` is written and there is no page.

    Raises OSError.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, ensure_ascii=False, separators=(",", ":"))
    # A file's name may hold bytes that are no text; JSON can write them, as "\udcff", HTML cannot.
    text = text.encode(errors="backslashreplace").decode()
    # The data first: a failure to draw must not lose what took long to measure.
    write_text_atomically(folder / JSON_NAME, text + "\n")
    try:
        page = render_page(json.loads(text)).encode(errors="replace").decode()
        write_text_atomically(folder / PAGE_NAME, page)
    except BaseException:
        # An earlier page would show other data than lie beside it.
        (folder / PAGE_NAME).unlink(missing_ok=True)
        raise
    return folder / PAGE_NAME


def read_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A report's JSON; raises InvalidRequestError if it is none, OSError."""
    try:
        report = read_json_object(path, str(path))
    except ValueError as error:
        raise InvalidRequestError(str(error)) from error
    schema, records = report.get("schema"), report.get("records")
    if schema is None or not isinstance(records, dict):
        raise InvalidRequestError(f"{path}: not the JSON of a report")
    if schema != SCHEMA:
        raise InvalidRequestError(
            f"{path}: a report of format {schema}, this version reads {SCHEMA}; measure anew"
        )
    for section in SECTIONS:
        records.setdefault(section, [])
    return report
