"""Puts figures, sentences and tables on one HTML page that needs no other file."""

from __future__ import annotations

import dataclasses
from typing import Any

from jinja2 import Environment

from specter_jax.errors import InvalidRequestError
from specter_jax.report import SMALL, TRUE_SIZE
from specter_jax.report.catalogue import CATALOGUE, Entry
from specter_jax.report.page_template import TEMPLATE
from specter_jax.report.sources import about, files_of, source_rows
from specter_jax.report.style import Panel, drawing
from specter_jax.sizes import format_size
from specter_jax.systems import SYSTEMS

MAX_TABLE_ROWS = 400
"""Of one table on the page; the JSON has all."""


@dataclasses.dataclass(frozen=True)
class Shown:
    """A figure's panel in one setting; None where nothing was measured.

    about: models, formats, budgets and files of what comes from files; else "".
    """

    setting: str
    heading: str
    panel: Panel | None
    about: str = ""


def render_page(report: dict[str, Any]) -> str:
    """The page of a report as `evaluation.measure` returns it. Draws all figures."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"cell": format_cell, "heading": lambda name: name.replace("_", " ")}
    template = environment.from_string(TEMPLATE)
    with drawing():
        figures = [(entry, _shown(entry, report)) for entry in CATALOGUE]
    return template.render(
        meta=report["meta"],
        settings=report["settings"],
        tasks=report["tasks"],
        models=[_model_row(model) for model in report["models"]],
        results=report["results"],
        traced=_traced(report),
        systems=list(SYSTEMS.values()),
        figures=figures,
        sources=_sources(report),
        max_rows=MAX_TABLE_ROWS,
    )


def draw_all(report: dict[str, Any]) -> dict[tuple[str, str], Panel]:
    """Every panel there are records for, by section and setting."""
    with drawing():
        return {
            (entry.section, shown.setting): shown.panel
            for entry in CATALOGUE
            for shown in _shown(entry, report)
            if shown.panel is not None
        }


def check_drawable(records: dict[str, Any], metas: list[dict[str, Any]], what: str) -> None:
    """Draws true-size records for nothing but errors; raises InvalidRequestError, naming `what`."""
    report = {"records": records, "results": metas, "meta": {"processor": "", "cores": 0}}
    try:
        draw_all(report)
        _sources(report)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"{what}: its figures cannot be drawn ({error!r})") from error


def _shown(entry: Entry, report: dict[str, Any]) -> list[Shown]:
    """The figure in both settings; true sizes are left out where no results were read at all."""
    records = report["records"].get(entry.section, [])
    settings = [SMALL] if entry.section != "planner" else []
    if any(found["setting"] == TRUE_SIZE for rs in report["records"].values() for found in rs):
        settings.append(TRUE_SIZE)
    shown = []
    for setting in settings or [TRUE_SIZE]:
        ours = [record for record in records if record["setting"] == setting]
        panel = entry.draw(ours) if ours else None
        from_files = setting == TRUE_SIZE and panel is not None
        told = f"{about(ours)} {files_of(ours)}".strip() if from_files else ""
        shown.append(Shown(setting, _heading(setting, report), panel, told))
    return shown


def _sources(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the table of sources, figure by figure."""
    rows = []
    for entry in CATALOGUE:
        records = report["records"].get(entry.section, [])
        rows += source_rows(entry.number, [r for r in records if r["setting"] == TRUE_SIZE])
    return rows


def _heading(setting: str, report: dict[str, Any]) -> str:
    if setting == SMALL:
        meta = report["meta"]
        return f"Small models, {meta['processor']}, {meta['cores']} cores"
    gpus = dict.fromkeys(str(meta["gpu"]) for meta in report["results"] if meta.get("gpu"))
    return "True size, " + (", ".join(gpus) or "recorded on a GPU")


def _traced(report: dict[str, Any]) -> list[str]:
    """True-size models whose routing was read from traces."""
    records = report["records"].get("match", [])
    return [record["model"] for record in records if record["setting"] == TRUE_SIZE]


def _model_row(model: dict[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in model.items() if name != "setting"}
    return {
        name.removesuffix("_bytes"): format_size(value) if name.endswith("_bytes") else value
        for name, value in shown.items()
    }


def format_cell(value: Any) -> str:
    """A table's cell: whole numbers as they are, others to four digits, nothing as a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
