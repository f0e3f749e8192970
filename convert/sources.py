"""Where a model's tensors come from: one small protocol, and a directory on disk behind it."""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from specter_jax.checkpoint.safetensors_file import (
    DTYPES,
    DamagedFileError,
    TensorEntry,
    read_header,
    read_tensor,
)
from specter_jax.config.checks import shown
from specter_jax.errors import ConversionError
from specter_jax.json_files import read_json_object

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_COMPANIONS = (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


class TensorSource(Protocol):
    """A Hugging Face model, tensor by tensor.

    Attributes:
        label: what messages call the source, such as its path.
    """

    label: str

    def names(self) -> Collection[str]:
        """Names of all tensors, as in the checkpoint."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        ...

    def dtype(self, name: str) -> np.dtype:
        """bfloat16, float16 or float32; ConversionError for a tensor of another type."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor; ConversionError if it cannot be read."""
        ...

    def read_slice(self, name: str, index: int) -> np.ndarray:
        """Element `index` of the tensor's first axis."""
        ...

    def where(self, name: str) -> str:
        """The file or other place that holds (or should hold) the tensor, for messages."""
        ...

    def fingerprint(self) -> str:
        """Equal for equal sources; a conversion resumes only on the same fingerprint."""
        ...

    def companions(self) -> Mapping[str, bytes]:
        """Files to be copied by name: config.json, generation_config.json, the tokenizer's."""
        ...


class SafetensorsSource:
    """A Hugging Face directory with one safetensors file, or several and an index.

    The headers of all files are read and checked against the files' sizes at once; tensor data is
    read when asked for.

    Raises:
        ConversionError: a file is missing, damaged or truncated, or the index does not fit.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.label = str(directory)
        if not self.directory.is_dir():
            reason = "not a directory" if self.directory.exists() else "no such directory"
            raise ConversionError(f"{self.directory}: {reason}; expected a Hugging Face model")
        if not (self.directory / CONFIG_FILE).is_file():
            raise ConversionError(
                f"{self.directory / CONFIG_FILE}: no such file; expected a Hugging Face model"
            )
        self._tensors: dict[str, tuple[Path, TensorEntry]] = {}
        self._unlisted: dict[str, Path] = {}
        index_path = self.directory / INDEX_FILE
        if index_path.exists():
            self._files = self._open_shards(index_path)
        else:
            path = self._single_file()
            self._files = [path]
            self._tensors = {name: (path, entry) for name, entry in _header(path).items()}

    def _single_file(self) -> Path:
        """The only safetensors file of a directory without an index."""
        path = self.directory / SINGLE_FILE
        if path.is_file():
            return path
        found = sorted(self.directory.glob("*.safetensors"))
        if not found:
            raise ConversionError(
                f"{path}: no such file and no {INDEX_FILE}; only safetensors can be converted"
            )
        if len(found) > 1:
            raise ConversionError(
                f"{self.directory / INDEX_FILE}: no such file, but there are {len(found)} shards"
            )
        return found[0]

    def _open_shards(self, index_path: Path) -> list[Path]:
        """Reads the index and every shard's header."""
        weight_map = _json_object(index_path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConversionError(f"{index_path}: no weight_map; the file is damaged")
        shards: dict[str, dict[str, TensorEntry]] = {}
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise ConversionError(
                    f"{index_path}: tensor {name} is in {shown(file_name)}, no file"
                )
            path = self.directory / file_name
            if file_name not in shards:
                if not path.is_file():
                    raise ConversionError(
                        f"{path}: no such file; {index_path.name} lists it (tensor {name})"
                    )
                shards[file_name] = _header(path)
            if name not in shards[file_name]:
                raise ConversionError(
                    f"{path}: tensor {name} is missing, though {index_path.name} lists it here"
                )
            self._tensors[name] = (path, shards[file_name][name])
        for file_name, entries in shards.items():
            for name in entries:
                if name not in weight_map:
                    self._unlisted[name] = self.directory / file_name
        return [index_path, *(self.directory / name for name in sorted(shards))]

    def names(self) -> Collection[str]:
        """See `TensorSource`."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return self._tensors[name][1].shape

    def dtype(self, name: str) -> np.dtype:
        """See `TensorSource`."""
        path, entry = self._tensors[name]
        if entry.dtype_code not in DTYPES:
            raise ConversionError(
                f"{path}: tensor {name} has type {entry.dtype_code}, expected one of "
                f"{', '.join(DTYPES)}"
            )
        return entry.dtype

    def read(self, name: str) -> np.ndarray:
        """See `TensorSource`."""
        return self._read(name, None)

    def read_slice(self, name: str, index: int) -> np.ndarray:
        """See `TensorSource`."""
        return self._read(name, index)

    def _read(self, name: str, index: int | None) -> np.ndarray:
        path, entry = self._tensors[name]
        try:
            return read_tensor(path, entry, index)
        except DamagedFileError as error:
            raise ConversionError(f"tensor {name} cannot be read: {error}") from error

    def where(self, name: str) -> str:
        """See `TensorSource`."""
        if name in self._tensors:
            return str(self._tensors[name][0])
        if name in self._unlisted:
            return f"{self._unlisted[name]} (present there, but {INDEX_FILE} has no entry for it)"
        return self.label

    def fingerprint(self) -> str:
        """Digest of names, sizes and modification times of all files, and of the small ones' text.

        The weights themselves are not read: that would double the time of a conversion.
        """
        digest = hashlib.sha256()
        for path in self._files:
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
        for name, content in self.companions().items():
            digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
        return digest.hexdigest()

    def companions(self) -> Mapping[str, bytes]:
        """See `TensorSource`."""
        paths = [self.directory / name for name in _COMPANIONS]
        paths += sorted(self.directory.glob("additional_chat_templates/*.jinja"))
        return {
            path.relative_to(self.directory).as_posix(): path.read_bytes()
            for path in paths
            if path.is_file()
        }


def _header(path: Path) -> dict[str, TensorEntry]:
    try:
        return dict(read_header(path).entries)
    except DamagedFileError as error:
        raise ConversionError(str(error)) from None
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read ({error.strerror})") from error


def _json_object(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path, str(path))
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConversionError(str(error)) from None
