"""The manifest of a converted checkpoint: what it holds, in which layout, with checksums.

`convert/FORMAT.md` documents the directory. A reader accepts exactly the keys of its own format
version: any change to them, or to the meaning of a file, takes a new version number.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specter_jax.errors import CheckpointError, FormatVersionError, MissingFileError

FORMAT_NAME = "specter-jax"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
CONVERT_HINT = "convert the model again"
_READ_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and SHA-256 (hexadecimal) of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class GroupSizes:
    """Weights per INT4 scale: along the hidden axis (gate, up) and the expert axis (down)."""

    gate_up: int
    down: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of `manifest.json`, version 1."""

    family: str
    model: Mapping[str, Any]
    """`ModelConfig.to_dict()`."""
    dtype: str
    """Of the experts: "bfloat16", "float16" or "float32"."""
    group_sizes: GroupSizes
    expert_elements: int
    """Elements of one packed expert: gate [F, H], up [F, H], down [H, F], each row-major."""
    num_experts: int
    """Per MoE layer."""
    moe_layers: tuple[int, ...]
    """Decoder layers that have routed experts; their position here is the MoE index."""
    shared_parts: tuple[str, ...]
    """Directories under `shared/`: "outer" and one per decoder layer."""
    source_fingerprint: str
    """Digest of the source's files and the options; equal ones mean an identical conversion."""
    files: Mapping[str, FileRecord]
    """Every other file of the directory, by path relative to it."""

    def to_json(self) -> str:
        """The text of `manifest.json`; the same manifest always gives the same text."""
        fields = dataclasses.asdict(self)
        fields["files"] = dict(sorted(fields["files"].items()))
        document = {"format": FORMAT_NAME, "version": FORMAT_VERSION, **fields}
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, path: Path) -> "Manifest":
        """Parses `manifest.json`; `path` is for messages.

        Raises:
            FormatVersionError: another format version.
            CheckpointError: not a manifest, or with missing or unknown keys.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{path}: not JSON ({error}); {CONVERT_HINT}") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT_NAME:
            raise CheckpointError(
                f'{path}: not the manifest of a converted model, its "format" is not '
                f'"{FORMAT_NAME}"; {CONVERT_HINT}'
            )
        version = document.get("version")
        if version != FORMAT_VERSION:
            raise FormatVersionError(
                f"{path}: format version {version}, this program reads version "
                f"{FORMAT_VERSION}; {CONVERT_HINT}"
            )
        fields = {key: document[key] for key in document if key not in ("format", "version")}
        valid = [field.name for field in dataclasses.fields(cls)]
        for problem, keys in (
            ("unknown", sorted(fields.keys() - set(valid))),
            ("missing", sorted(set(valid) - fields.keys())),
        ):
            if keys:
                raise CheckpointError(
                    f"{path}: {problem} {', '.join(keys)}; version {FORMAT_VERSION} has "
                    f"{', '.join(valid)}; {CONVERT_HINT}"
                )
        try:
            fields["group_sizes"] = GroupSizes(**fields["group_sizes"])
            fields["files"] = {
                _relative(name): FileRecord(**record) for name, record in fields["files"].items()
            }
            fields["moe_layers"] = tuple(fields["moe_layers"])
            fields["shared_parts"] = tuple(fields["shared_parts"])
        except (TypeError, AttributeError, ValueError) as error:
            raise CheckpointError(f"{path}: malformed manifest ({error}); {CONVERT_HINT}") from None
        return cls(**fields)


def _relative(name: str) -> str:
    """Checks that a recorded file lies inside of the directory."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"file {name} lies outside of the directory")
    return name


def read_manifest(directory: Path) -> Manifest:
    """Reads the manifest of a converted directory.

    Raises:
        MissingFileError: there is none.
        CheckpointError: it cannot be used (see `Manifest.from_json`).
    """
    path = directory / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        reason = "no such file" if directory.is_dir() else "no such directory"
        raise MissingFileError(
            f"{path}: {reason}; expected a model converted with specter-convert"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); {CONVERT_HINT}") from None
    return Manifest.from_json(text, path)


def record_file(path: Path) -> FileRecord:
    """Size and checksum of a file, read in pieces."""
    digest = hashlib.sha256()
    num_bytes = 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
            num_bytes += len(piece)
    return FileRecord(bytes=num_bytes, sha256=digest.hexdigest())
