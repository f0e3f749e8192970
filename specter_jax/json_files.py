"""Reading JSON that somebody else wrote: whatever is wrong with it becomes one clear line."""

import json
import os
from pathlib import Path
from typing import Any

MAX_DEPTH = 64
"""Nesting beyond this is refused: no file read here needs it, and Python's stack has an end."""


def read_json_object(source: str | os.PathLike[str] | bytes, what: str) -> dict[str, Any]:
    """Parses a JSON object.

    Args:
        source: the path of a file, or its contents as bytes.
        what: what messages call it, such as the file's path.

    Returns:
        The object.

    Raises:
        ValueError: not JSON, not in UTF-8, UTF-16 or UTF-32, nested too deeply, or something other
            than an object; one line that begins with `what`.
        OSError: the file cannot be read.
    """
    content = source if isinstance(source, bytes) else Path(source).read_bytes()
    try:
        document = json.loads(content)
        too_deep = _deeper_than(document, MAX_DEPTH)
    except RecursionError:
        too_deep = True
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{what}: not text in {error.encoding} (byte {error.start}); expected JSON in UTF-8"
        ) from None
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{what}: not JSON ({reason})") from None
    if too_deep:
        raise ValueError(f"{what}: nested too deeply; expected at most {MAX_DEPTH} levels")
    if not isinstance(document, dict):
        raise ValueError(f"{what}: holds a JSON {_KINDS[type(document)]}; expected an object")
    return document


_KINDS = {
    list: "array",
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def _deeper_than(document: Any, limit: int) -> bool:
    """Whether containers are nested more than `limit` levels deep; without recursion."""
    level = [document]
    for _ in range(limit):
        level = [
            child
            for container in level
            if isinstance(container, (dict, list))
            for child in (container.values() if isinstance(container, dict) else container)
        ]
        level = [child for child in level if isinstance(child, (dict, list))]
        if not level:
            return False
    return True
