"""Memory sizes as people write them."""

import math
import numbers
import re
import reprlib
from decimal import Decimal

from specter_jax.errors import InvalidRequestError

# 1 EiB: more than any machine has, and far from the limits of 64-bit arithmetic.
MAX_SIZE_BYTES = 2**60

_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
# ASCII: otherwise the digits of other scripts, and the Kelvin sign as a "k", would match.
_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgt])(ib|b)?|b)?", re.IGNORECASE | re.ASCII)


def parse_size(size: str | int) -> int:
    """Bytes of "16GiB" (2^30), "16GB" (10^9), "16G" (as GiB), "500 MiB", "4096" or a number.

    Fractions of a byte are dropped.

    Raises:
        InvalidRequestError: not a size, not above 0, or above `MAX_SIZE_BYTES`.
    """
    number: Decimal | int | None = None
    if isinstance(size, numbers.Integral) and not isinstance(size, bool):
        number = int(size)
    elif isinstance(size, str) and (match := _PATTERN.fullmatch(size.strip())):
        value, prefix, suffix = match.groups()
        units = _DECIMAL if (suffix or "").lower() == "b" else _BINARY
        # Unlike int, Decimal takes any number of digits.
        number = Decimal(value) * (units[prefix.lower()] if prefix else 1)
    if number is None or not 1 <= number <= MAX_SIZE_BYTES:
        # Python refuses to print integers of thousands of digits.
        huge = isinstance(number, int) and abs(number) > MAX_SIZE_BYTES
        shown = f"an integer of {number.bit_length()} bits" if huge else reprlib.repr(size)
        raise InvalidRequestError(
            f"memory size is {shown}; expected a size above 0, of at most "
            "1048576TiB, such as 16GiB, 500MiB or a number of bytes"
        )
    return int(number)


def format_size(num_bytes: int, *, round_up: bool = False) -> str:
    """1536 -> "1.50 KiB"; round_up: never less than `num_bytes`, for sizes that are demanded."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    if unit == "B":
        return f"{num_bytes} B"
    return f"{math.ceil(size * 100) / 100 if round_up else size:.2f} {unit}"
