"""What is reached of nominal figures, and the fixed costs: measured once, kept in a JSON file.

The file names for every field its value, unit and source, and under "fitted_on" the measured cells
that fields were fitted to: how good predictions are, the others tell. A calibration made on one
machine is used for others too: bandwidths enter as shares of nominal ones, host and launch costs as
they are.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specter_jax.errors import InvalidRequestError
from specter_jax.json_files import read_json_object

DEFAULT_CALIBRATION = Path(__file__).with_name("calibration.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Fields of `calibration.json`, which says what each is; times in microseconds."""

    device: str
    source: str
    memory_efficiency: float
    link_efficiency: float
    transfer_latency_us: float
    transfer_expert_us: float
    issue_us: float
    poll_us: float
    dispatch_us: float
    meeting_us: float
    commit_call_us: float
    commit_expert_us: float
    draft_efficiency: float
    draft_layer_us: float
    draft_call_us: float
    verify_efficiency: float
    nested_efficiency: float
    verify_layer_us: float
    verify_call_us: float
    boundary_us: float
    host_layer_us: float
    escape_share: float


def load_calibration(path: str | os.PathLike[str] = DEFAULT_CALIBRATION) -> Calibration:
    """Reads a calibration.

    Raises:
        InvalidRequestError: a field is missing, unknown, or no finite number of at least 0
            (above 0 for efficiencies).
        OSError: the file cannot be read.
    """
    path = Path(path)
    try:
        content = read_json_object(path, str(path))
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None
    fields = content.get("fields")
    names = {field.name for field in dataclasses.fields(Calibration)} - {"device", "source"}
    if not isinstance(fields, dict) or set(fields) != names:
        wrong = names ^ set(fields if isinstance(fields, dict) else ())
        raise InvalidRequestError(
            f"{path}: fields {', '.join(sorted(wrong))} are missing or unknown"
        )
    values = {}
    for name, field in fields.items():
        value = field.get("value") if isinstance(field, dict) else None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        # What is divided by must not be 0.
        share = name.endswith("_efficiency")
        if not number or not math.isfinite(value) or value < 0 or (share and value == 0):
            least = "above 0" if share else "0 or more"
            raise InvalidRequestError(f"{path}: {name} is {value!r}; expected a number, {least}")
        values[name] = float(value)
    described = {name: str(content.get(name)) for name in ("device", "source")}
    return Calibration(**described, **values)


def fitted_cells(path: str | os.PathLike[str] = DEFAULT_CALIBRATION) -> list[Mapping[str, Any]]:
    """What tells the measured cells apart that a calibration was fitted to; may be none.

    Raises:
        InvalidRequestError: "fitted_on" is no list of objects. OSError: the file cannot be read.
    """
    path = Path(path)
    try:
        content = read_json_object(path, str(path))
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None
    cells = content.get("fitted_on", [])
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise InvalidRequestError(f"{path}: fitted_on is no list of objects")
    return cells
