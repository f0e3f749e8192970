"""Checks of values that came from JSON: type and range, with a one-line ValueError."""

import math
from collections.abc import Sequence
from typing import Any

MAX_COUNT = 2**63 - 1
"""The largest size in bytes or elements that a file system or an array can have."""
_SHOWN_CHARACTERS = 80


def shown(value: Any) -> str:
    """A value as messages show it: on one line and not too long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # an integer of more digits than Python writes out
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


def as_count(name: str, value: Any, *, minimum: int = 0, maximum: int = MAX_COUNT) -> int:
    """An integer of at least `minimum` and at most `maximum`; true and 1.0 are none."""
    if type(value) is not int or not minimum <= value <= maximum:
        limit = "" if maximum == MAX_COUNT else f" and at most {maximum}"
        raise ValueError(f"{name}={shown(value)}, expected an integer of at least {minimum}{limit}")
    return value


def as_number(name: str, value: Any, *, positive: bool = False) -> float:
    """A finite number, as a float."""
    expected = "a positive finite number" if positive else "a finite number"
    if type(value) not in (int, float):
        raise ValueError(f"{name}={shown(value)}, expected {expected}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or (positive and number <= 0):
        raise ValueError(f"{name}={shown(value)}, expected {expected}")
    return number


def as_text(name: str, value: Any) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}={shown(value)}, expected a text")
    return value


def as_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """One of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name}={shown(value)}, expected one of {', '.join(choices)}")
    return value


def as_list(name: str, value: Any) -> list[Any]:
    """A list."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name}={shown(value)}, expected a list")
    return list(value)


def as_object(name: str, value: Any, keys: Sequence[str] = ()) -> dict[str, Any]:
    """A JSON object, with exactly `keys` if any are given."""
    if not isinstance(value, dict) or (keys and set(value) != set(keys)):
        what = f"an object with {' and '.join(keys)}" if keys else "an object"
        raise ValueError(f"{name}={shown(value)}, expected {what}")
    return value
