"""Typed access to the fields of a Hugging Face config.json, with errors that name the field."""

from __future__ import annotations

from typing import Any

from specter_jax.config.checks import as_count, as_number, shown
from specter_jax.config.validation import MAX_SIZE
from specter_jax.errors import UnsupportedModelError


class HfFields:
    """Reads one config.json; `null` counts as absent, as the published files use it so.

    Every reader raises `UnsupportedModelError` naming the field when the value has the wrong type
    or is out of range.
    """

    def __init__(self, family: str, data: dict[str, Any]):
        self.family = family
        self.data = data

    def get(self, name: str, default: Any = None) -> Any:
        value = self.data.get(name)
        return default if value is None else value

    def reject(self, name: str, expected: str) -> UnsupportedModelError:
        """The error for a field whose value this package does not run."""
        return UnsupportedModelError(
            f"{self.family}: config field {name}={shown(self.data.get(name))} is not supported; "
            f"expected {expected}"
        )

    def integer(
        self,
        name: str,
        default: int | None = None,
        minimum: int = 1,
        maximum: int = MAX_SIZE,
    ) -> int:
        value = self.get(name, default)
        if value is None:
            raise UnsupportedModelError(f"{self.family}: config field {name} is missing")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        try:
            return as_count(name, value, minimum=minimum, maximum=maximum)
        except ValueError:
            raise self.reject(name, f"an integer from {minimum} to {maximum}") from None

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        value = self.get(name, default)
        return None if value is None else self.integer(name, default)

    def first_integer(self, names: tuple[str, ...], default: int | None) -> int:
        """The first of several spellings of one field that is present."""
        for name in names:
            if self.get(name) is not None:
                return self.integer(name)
        return self.integer(names[0], default)

    def number(self, name: str, default: float, *, positive: bool = True) -> float:
        value = self.get(name, default)
        try:
            return as_number(name, value, positive=positive)
        except ValueError:
            expected = "a positive finite number" if positive else "a finite number"
            raise self.reject(name, expected) from None

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.reject(name, "true or false")
        return value

    def layer_list(self, name: str, num_layers: int) -> tuple[int, ...]:
        """A list of decoder layer indices, possibly absent."""
        value = self.get(name, [])
        if not isinstance(value, list) or any(
            isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < num_layers for v in value
        ):
            raise self.reject(name, f"a list of layer indices below {num_layers}")
        return tuple(value)

    def token_ids(self, name: str, default: int | None) -> tuple[int, ...]:
        """One token id or a list of them, as a tuple."""
        value = self.get(name, default)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in values):
            raise self.reject(name, "a token id or a list of token ids")
        return tuple(values)
