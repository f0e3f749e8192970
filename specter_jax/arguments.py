"""Checks of callers' arguments; free of JAX so that a command line can use them first."""

from __future__ import annotations

import numbers
from collections.abc import Iterable

from specter_jax.config.checks import shown
from specter_jax.errors import InvalidRequestError


def as_integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """`value` as an int, NumPy's integers included; a bound that is None does not apply.

    Raises InvalidRequestError naming the argument if it is no integer or not in low..high.
    """
    wanted = "an integer"
    if low is not None:
        wanted += f" >= {low}" if high is None else f" from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidRequestError(f"{name} is {shown(value)}; expected {wanted}")
    number = int(value)
    if (low is not None and number < low) or (high is not None and number > high):
        raise InvalidRequestError(f"{name} is {shown(number)}; expected {wanted}")
    return number


def as_flag(name: str, value: object) -> bool:
    """`value` if it is True or False; raises InvalidRequestError otherwise."""
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} is {shown(value)}; expected True or False")
    return value


def as_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """`value` if it is one of `choices`; raises InvalidRequestError otherwise."""
    allowed = list(choices)
    if not isinstance(value, str) or value not in allowed:
        raise InvalidRequestError(f"{name} is {shown(value)}; expected one of {', '.join(allowed)}")
    return value


def as_callable(name: str, value: object) -> None:
    """Raises InvalidRequestError unless `value` is None or can be called."""
    if value is not None and not callable(value):
        raise InvalidRequestError(f"{name} is {shown(value)}; expected a function")


def as_list(name: str, value: object, items: str) -> list:
    """`value`'s items; raises InvalidRequestError if it is a text or cannot be iterated over."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name} is {shown(value)}; expected a list of {items}")
    return list(value)
