"""JSON of unknown quality: an object, or one line that says what is wrong."""

import json
from pathlib import Path

import pytest

from specter_jax.json_files import MAX_DEPTH, read_json_object


def nested(depth: int) -> bytes:
    """An object of `depth` levels in all."""
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_an_object_is_read_in_every_encoding_of_json(tmp_path: Path, encoding: str) -> None:
    content = json.dumps({"ä": [1]}, ensure_ascii=False).encode(encoding)
    (tmp_path / "file.json").write_bytes(content)
    assert read_json_object(tmp_path / "file.json", "it") == {"ä": [1]}
    assert read_json_object(content, "it") == {"ä": [1]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not JSON"),
        (b'{"a": 1', "not JSON"),
        (b'{"a": "\xff"}', "not text in utf-8"),
        (b"[1]", "holds a JSON array; expected an object"),
        (b"null", "holds a JSON null"),
        (b"true", "holds a JSON boolean"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not JSON"),
        (nested(MAX_DEPTH + 1), "nested too deeply"),
        (nested(100_000), "nested too deeply"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_anything_else_is_one_line(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^it: .*{reason}") as caught:
        read_json_object(content, "it")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_deepest_nesting_allowed_is_read() -> None:
    assert list(read_json_object(nested(MAX_DEPTH), "it")) == ["a"]


def test_a_missing_file_stays_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_json_object(tmp_path / "nowhere.json", "it")
