"""Safetensors files read and written piece by piece, so that a whole file is never in memory.

The library `safetensors` writes a file from tensors that are all in memory at once. Here the
place of the header is left free, the tensors are appended one after another, and the header is
written last. Reading goes through plain positioned reads (bounded memory) or a memory map (expert
store).

Layout of a file: 8 bytes little-endian header length, JSON header, tensor data. The header may end
in spaces; files written here are padded so that the data begins on a page boundary.
"""

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specter_jax.json_files import read_json_object
from specter_jax.paths import naming

DTYPES: Mapping[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
"""Types of weights."""
_STORED_DTYPES = {**DTYPES, "I32": np.dtype(np.int32)}
_CODE_OF_DTYPE = {dtype: code for code, dtype in _STORED_DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_PAGE_BYTES = 4096


class DamagedFileError(ValueError):
    """The file is not a complete safetensors file; the message names file and reason."""


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies in a safetensors file."""

    dtype_code: str
    """As in the file, such as "BF16"; codes missing in `DTYPES` can be listed but not read."""
    shape: tuple[int, ...]
    offset: int
    """Of the first byte, from the beginning of the file."""
    num_bytes: int

    @property
    def dtype(self) -> np.dtype:
        """The numpy dtype; KeyError for a code that is not supported."""
        return DTYPES[self.dtype_code]


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a safetensors file says about itself."""

    entries: Mapping[str, TensorEntry]
    """By tensor name; they fill the file without gaps."""
    metadata: Mapping[str, str]
    """The writer's own notes (`__metadata__`), empty if there are none."""


def read_header(path: Path) -> Header:
    """Header of a safetensors file, after checking that the file has exactly what it announces.

    Raises:
        DamagedFileError: not a safetensors file, or truncated, or with bytes that are no tensor's.
        OSError: the file cannot be read.
    """
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            raise DamagedFileError(f"{path}: only {file_bytes} bytes, not a safetensors file")
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(_MAX_HEADER_BYTES, file_bytes - 8):
            raise DamagedFileError(
                f"{path}: header of {header_bytes} bytes in a file of {file_bytes} bytes: "
                "truncated or not a safetensors file"
            )
        raw = file.read(header_bytes)
    try:
        fields = read_json_object(raw, "text")
        metadata = fields.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise ValueError("__metadata__ holds other things than strings")
        entries = {name: _entry(name, field, 8 + header_bytes) for name, field in fields.items()}
    except ValueError as error:
        raise DamagedFileError(f"{path}: unreadable safetensors header ({error})") from None
    _check_data(path, entries, 8 + header_bytes, file_bytes)
    return Header(entries=entries, metadata=metadata)


def _entry(name: str, field: Any, data_start: int) -> TensorEntry:
    """One tensor's entry; ValueError unless it has the form of one."""
    if not isinstance(field, dict) or not isinstance(field.get("dtype"), str):
        raise ValueError(f"tensor {name} has no type")
    shape, span = field.get("shape"), field.get("data_offsets")
    for numbers in (shape, span):
        if not isinstance(numbers, list) or not all(type(v) is int and v >= 0 for v in numbers):
            raise ValueError(f"tensor {name} has no valid shape and position")
    if len(span) != 2 or span[1] < span[0]:
        raise ValueError(f"tensor {name} has no valid position")
    return TensorEntry(
        dtype_code=field["dtype"],
        shape=tuple(shape),
        offset=data_start + span[0],
        num_bytes=span[1] - span[0],
    )


def _check_data(
    path: Path, entries: Mapping[str, TensorEntry], data_start: int, file_bytes: int
) -> None:
    """Tensors must have their shapes' sizes and fill the file one after another."""
    end = max((entry.offset + entry.num_bytes for entry in entries.values()), default=data_start)
    if end != file_bytes:
        state = "truncated" if file_bytes < end else "damaged"
        raise DamagedFileError(f"{path}: {file_bytes} bytes, its header needs {end}: {state}")
    expected = data_start
    for name, entry in sorted(
        entries.items(), key=lambda item: (item[1].offset, item[1].num_bytes)
    ):
        dtype = _STORED_DTYPES.get(entry.dtype_code)
        if dtype is not None and entry.num_bytes != prod(entry.shape) * dtype.itemsize:
            raise DamagedFileError(f"{path}: tensor {name} has a size that contradicts its shape")
        if entry.offset != expected:
            raise DamagedFileError(
                f"{path}: tensor {name} does not begin where the one before it ends: damaged"
            )
        expected += entry.num_bytes


def read_tensor(path: Path, entry: TensorEntry, index: int | None = None) -> np.ndarray:
    """Reads one tensor, or element `index` of its first axis, into new memory.

    Raises:
        DamagedFileError: the file ended early.
        OSError: the file cannot be read.
    """
    shape, offset = entry.shape, entry.offset
    if index is not None:
        shape = shape[1:]
        offset += index * prod(shape) * entry.dtype.itemsize
    array = np.empty(shape, entry.dtype)
    target = memoryview(array.reshape(-1).view(np.uint8))
    with naming(path), path.open("rb", buffering=0) as file:
        file.seek(offset)
        done = 0
        while done < len(target):
            count = file.readinto(target[done:])
            if not count:
                raise DamagedFileError(f"{path}: ended {len(target) - done} bytes early: truncated")
            done += count
    return array


class SafetensorsWriter:
    """Writes a safetensors file tensor by tensor, in the order announced.

    Use as a context manager; leaving it normally flushes the file to the disk. Memory use is
    that of the tensor at hand. Tensors are announced by name, dtype and most elements; shapes are
    taken as they come.
    """

    def __init__(
        self,
        path: Path,
        tensors: Iterable[tuple[str, np.dtype, int]],
        metadata: Mapping[str, str],
    ) -> None:
        self.path = path
        self._pending = list(tensors)
        self._metadata = dict(metadata)
        self._written: list[tuple[str, np.dtype, tuple[int, ...]]] = []

    def __enter__(self) -> "SafetensorsWriter":
        largest = [(name, dtype, (size,)) for name, dtype, size in self._pending]
        length = len(self._header(largest))
        self._header_bytes = length + -(length + 8) % _PAGE_BYTES
        self._file = self.path.open("wb")
        with naming(self.path):
            self._file.seek(8 + self._header_bytes)
        return self

    def _header(self, tensors: Iterable[tuple[str, np.dtype, tuple[int, ...]]]) -> bytes:
        header: dict[str, object] = {"__metadata__": self._metadata}
        offset = 0
        for name, dtype, shape in tensors:
            end = offset + prod(shape) * dtype.itemsize
            code = _CODE_OF_DTYPE[np.dtype(dtype)]
            header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        return json.dumps(header, separators=(",", ":")).encode()

    def append(self, name: str, array: np.ndarray) -> None:
        """Writes the next tensor, which must be the one announced and no larger."""
        expected = self._pending[len(self._written)]
        found = (name, array.dtype)
        if found != (expected[0], np.dtype(expected[1])) or not 0 < array.size <= expected[2]:
            raise ValueError(f"expected {expected}, got {(*found, array.shape)}")
        content = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        with naming(self.path):
            self._file.write(content)
        self._written.append((name, array.dtype, array.shape))

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is None:
                missing = len(self._pending) - len(self._written)
                if missing:
                    raise ValueError(f"{self.path}: {missing} tensors missing")
                header = self._header(self._written).ljust(self._header_bytes)
                with naming(self.path):
                    self._file.seek(0)
                    self._file.write(struct.pack("<Q", len(header)) + header)
                    self._file.flush()
                    os.fsync(self._file.fileno())
        finally:
            with naming(self.path):
                self._file.close()
