"""Memory sizes in and out of text."""

import pytest

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
    ],
)
def test_sizes_are_read(text, expected):
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "16 bananas", "-1GiB", "0", 0, -5, True, None, "1e9"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InvalidRequestError, match="memory size"):
        parse_size(text)


def test_sizes_are_shown_in_binary_units():
    assert [format_size(n) for n in (0, 1023, 1536, 2**20, 2**40)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "1.00 MiB",
        "1024.00 GiB",
    ]
