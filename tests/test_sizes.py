"""Memory sizes in and out of text."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specter_jax.errors import InvalidRequestError
from specter_jax.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16GiB", 16 * 2**30),
        ("16gib", 16 * 2**30),
        ("16 G", 16 * 2**30),
        ("1.5MiB", 3 * 2**19),
        ("16GB", 16 * 10**9),
        ("2TiB", 2**41),
        ("512b", 512),
        ("4096", 4096),
        (4096, 4096),
        (np.int64(4096), 4096),
        ("0.5 TiB", 2**39),
        # Not representable as a float.
        ("9007199254740993", 2**53 + 1),
        ("1048576 TiB", 2**60),
        ("0" * 5000 + "7", 7),
    ],
)
def test_sizes_are_read(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "16 bananas", "-1GiB", "0", "0.9", "1e9", "nan", "inf", "1_000", "1.", ".5"),
        # Full-width and Arabic digits, and the Kelvin sign.
        *("\uff11\uff16GiB", "\u0661\u0666GiB", "4\u212aiB"),
        *("9" * 400, "9" * 400 + "GiB", "9" * 5000, "1048577TiB", "0." + "0" * 5000 + "1"),
        *(0, -5, True, False, None, 10**5000, 2**60 + 1),
        *(1.5, 16e9, math.nan, math.inf, [16], b"16GiB"),
    ],
    ids=lambda text: ascii(text)[:20] if isinstance(text, str) else type(text).__name__,
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InvalidRequestError, match="memory size") as caught:
        parse_size(text)
    assert len(str(caught.value)) < 200


def test_sizes_are_shown_in_binary_units():
    assert [format_size(n) for n in (0, 1023, 1536, 2**20, 2**40)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "1.00 MiB",
        "1024.00 GiB",
    ]


@given(st.integers(1, 2**45))
def test_a_size_rounded_up_is_enough(num_bytes):
    assert parse_size(format_size(num_bytes, round_up=True)) >= num_bytes
