"""The manifest of a converted checkpoint: what it holds, in which layout, with checksums.

`convert/FORMAT.md` documents the directory. A reader accepts exactly the keys of its own format
version: any change to them, or to the meaning of a file, takes a new version number.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_kernels.int4 import CODES_PER_WORD
from pallas_kernels.nested import NestedLayout, padded_capacity
from specter_jax.checkpoint.safetensors_file import DTYPES
from specter_jax.config import ModelConfig, layer_name
from specter_jax.config.checks import as_choice, as_count, as_list, as_object, as_text, shown
from specter_jax.errors import CheckpointError, FormatVersionError, MissingFileError
from specter_jax.json_files import read_json_object

FORMAT_NAME = "specter-jax"
FORMAT_VERSION = 2
MANIFEST_NAME = "manifest.json"
CONVERT_HINT = "convert the model again"
_ITEM_BYTES = {str(dtype): dtype.itemsize for dtype in DTYPES.values()}
EXPERT_DTYPES = tuple(_ITEM_BYTES)
EXPERT_FORMATS = ("nested", "plain")
_SHA256 = re.compile(r"[0-9a-f]{64}")
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
    """Contents of `manifest.json`, version 2."""

    family: str
    model: Mapping[str, Any]
    """`ModelConfig.to_dict()`."""
    dtype: str
    """Of the experts: "bfloat16", "float16" or "float32"."""
    expert_format: str
    """How their files hold them: "plain", or "nested" (bfloat16 only)."""
    escape_capacity: int
    """Escapes that a slot for any nested expert must have room for; 0 where they are plain."""
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

    @property
    def config(self) -> ModelConfig:
        """The model's architecture."""
        return ModelConfig.from_dict(dict(self.model))

    @property
    def nested_layout(self) -> NestedLayout | None:
        """Layout of a nested expert in its slot; None where experts are plain."""
        if self.expert_format != "nested":
            return None
        config = self.config
        return NestedLayout(
            config.hidden_size, config.expert_intermediate_size, self.escape_capacity
        )

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert on the link and in its slot."""
        layout = self.nested_layout
        if layout is not None:
            return 4 * layout.num_words
        return self.expert_elements * _ITEM_BYTES[self.dtype]

    @classmethod
    def from_json(cls, content: bytes, path: Path) -> "Manifest":
        """Parses and checks `manifest.json`; `path` is for messages.

        Raises:
            FormatVersionError: another format version.
            CheckpointError: not a manifest, with missing or unknown keys, with a value of a wrong
                type or out of range, or with values that contradict each other.
        """
        try:
            document = read_json_object(content, str(path))
        except ValueError as error:
            raise CheckpointError(f"{error}; {CONVERT_HINT}") from None
        if document.get("format") != FORMAT_NAME:
            raise CheckpointError(
                f'{path}: not the manifest of a converted model, its "format" is not '
                f'"{FORMAT_NAME}"; {CONVERT_HINT}'
            )
        version = document.get("version")
        if type(version) is not int:
            raise FormatVersionError(
                f"{path}: version={shown(version)}, expected the number {FORMAT_VERSION}; "
                f"{CONVERT_HINT}"
            )
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
            manifest = cls(**_checked_fields(fields))
            _check_agreement(manifest)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}; {CONVERT_HINT}") from None
        return manifest


def _checked_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """The manifest's values as `Manifest` holds them; ValueError names the first bad one."""
    sizes = as_object("group_sizes", fields["group_sizes"], ("gate_up", "down"))
    return {
        "family": as_text("family", fields["family"]),
        "model": as_object("model", fields["model"]),
        "dtype": as_choice("dtype", fields["dtype"], EXPERT_DTYPES),
        "expert_format": as_choice("expert_format", fields["expert_format"], EXPERT_FORMATS),
        "escape_capacity": as_count("escape_capacity", fields["escape_capacity"]),
        "group_sizes": GroupSizes(
            gate_up=as_count("group_sizes.gate_up", sizes["gate_up"], minimum=1),
            down=as_count("group_sizes.down", sizes["down"], minimum=1),
        ),
        "expert_elements": as_count("expert_elements", fields["expert_elements"], minimum=1),
        "num_experts": as_count("num_experts", fields["num_experts"], minimum=1),
        "moe_layers": tuple(
            as_count("moe_layers", layer) for layer in as_list("moe_layers", fields["moe_layers"])
        ),
        "shared_parts": tuple(
            as_text("shared_parts", part)
            for part in as_list("shared_parts", fields["shared_parts"])
        ),
        "source_fingerprint": as_text("source_fingerprint", fields["source_fingerprint"]),
        "files": {
            _relative(name): _record(name, record)
            for name, record in as_object("files", fields["files"]).items()
        },
    }


def _relative(name: str) -> str:
    """Checks that a recorded file lies inside of the directory."""
    if not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"files: {shown(name)} lies outside of the directory")
    return name


def _record(name: str, value: Any) -> FileRecord:
    place = f"files[{shown(name)}]"
    record = as_object(place, value, ("bytes", "sha256"))
    digest = as_text(f"{place}.sha256", record["sha256"])
    if not _SHA256.fullmatch(digest):
        raise ValueError(f"{place}.sha256={shown(digest)}, expected 64 hexadecimal digits")
    return FileRecord(bytes=as_count(f"{place}.bytes", record["bytes"]), sha256=digest)


def _check_agreement(manifest: Manifest) -> None:
    """What the manifest says twice must agree, and every part must have files."""
    config = manifest.config
    parts = ("outer", *(layer_name(layer) for layer in range(config.num_layers)))
    for name, value, expected in (
        ("family", manifest.family, config.family),
        ("expert_elements", manifest.expert_elements, config.expert_elements),
        ("num_experts", manifest.num_experts, config.num_experts),
        ("moe_layers", list(manifest.moe_layers), list(config.moe_layers)),
        ("shared_parts", sorted(manifest.shared_parts), sorted(parts)),
    ):
        if value != expected:
            raise ValueError(
                f"{name}={shown(value)} contradicts the model, expected {shown(expected)}"
            )
    sizes = manifest.group_sizes
    for name, size, length in (
        ("gate_up", sizes.gate_up, config.hidden_size),
        ("down", sizes.down, config.expert_intermediate_size),
    ):
        if size % CODES_PER_WORD or length % size:
            raise ValueError(
                f"group_sizes.{name}={size}, expected a multiple of {CODES_PER_WORD} that "
                f"divides {length}"
            )
    _check_expert_format(manifest)
    listed = {"/".join(Path(name).parts[:2]) for name in manifest.files}
    layers = [layer_name(layer) for layer in manifest.moe_layers]
    for part in (
        *(f"shared/{part}" for part in parts),
        *(f"draft/{layer}" for layer in layers),
        *(f"experts/{layer}.safetensors" for layer in layers),
    ):
        if part not in listed:
            raise ValueError(f"files lists nothing of {part}")


def _check_expert_format(manifest: Manifest) -> None:
    """Nested experts are bfloat16 and have a valid layout; plain ones have no escapes."""
    if manifest.expert_format == "plain":
        if manifest.escape_capacity:
            raise ValueError(
                f"escape_capacity={manifest.escape_capacity}, expected 0: the experts are plain"
            )
        return
    if manifest.dtype != "bfloat16":
        raise ValueError(f'expert_format="nested" contradicts dtype={shown(manifest.dtype)}')
    most = padded_capacity(manifest.expert_elements)
    if manifest.escape_capacity > most:
        raise ValueError(
            f"escape_capacity={manifest.escape_capacity}, an expert has {most} weights at most"
        )
    try:
        _ = manifest.nested_layout
    except ValueError as error:
        raise ValueError(f"escape_capacity={manifest.escape_capacity}: {error}") from None


def read_manifest(directory: Path) -> Manifest:
    """Reads the manifest of a converted directory.

    Raises:
        MissingFileError: there is none.
        CheckpointError: it cannot be used (see `Manifest.from_json`).
    """
    path = directory / MANIFEST_NAME
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        reason = "no such file" if directory.is_dir() else "no such directory"
        raise MissingFileError(
            f"{path}: {reason}; expected a model converted with specter-convert"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    return Manifest.from_json(content, path)


def record_file(path: Path) -> FileRecord:
    """Size and checksum of a file, read in pieces."""
    digest = hashlib.sha256()
    num_bytes = 0
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
            num_bytes += len(piece)
    return FileRecord(bytes=num_bytes, sha256=digest.hexdigest())
