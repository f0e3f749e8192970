"""Types of command-line options: text to value, with a message of one line where it is none."""

import argparse
import re
import reprlib
from collections.abc import Callable
from typing import Any

from specter_jax.controller import parse_depth
from specter_jax.errors import SpecterError

# Largest of any count on the command line; counts are 32-bit integers on the device.
MAX_NUMBER = 2**31 - 1


def depth_option(text: str) -> int | str:
    """A depth, 0 to 16, or "auto"."""
    return text if parse_depth(text) is None else int(text)


def rate(text: str) -> float:
    """A number above 0, finite or not: what uses it knows its range."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a number above 0")
    return number


def positive(text: str) -> int:
    """A whole number above 0."""
    # At most ten ASCII digits; int would also take thousands, underscores and other scripts'.
    number = int(text) if re.fullmatch("[0-9]{1,10}", text) else 0
    if not 1 <= number <= MAX_NUMBER:
        raise argparse.ArgumentTypeError(
            f"{reprlib.repr(text)} is not a whole number above 0 (and up to {MAX_NUMBER})"
        )
    return number


def checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Keep the parser's own message, which argparse would replace."""

    def checked(text: str) -> Any:
        try:
            return parse(text)
        except SpecterError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return checked
