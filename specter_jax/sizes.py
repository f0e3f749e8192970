"""Memory sizes as people write them."""

import re

from specter_jax.errors import InvalidRequestError

_BINARY = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(ib|b)?|b)?", re.IGNORECASE)


def parse_size(size: str | int) -> int:
    """Bytes of "16GiB" (2^30), "16GB" (10^9), "16G" (as GiB), "500 MiB", "4096" or a number.

    Raises:
        InvalidRequestError: not a size, or not above 0.
    """
    number = None
    if isinstance(size, int) and not isinstance(size, bool):
        number = size
    elif isinstance(size, str) and (match := _PATTERN.fullmatch(size.strip())):
        value, prefix, suffix = match.groups()
        units = _DECIMAL if (suffix or "").lower() == "b" else _BINARY
        number = int(float(value) * units[prefix.lower()]) if prefix else int(float(value))
    if number is None or number <= 0:
        raise InvalidRequestError(
            f"memory size is {size!r}; expected a size above 0 such as 16GiB, 500MiB or a "
            "number of bytes"
        )
    return number


def format_size(num_bytes: int) -> str:
    """1536 -> "1.50 KiB"."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
