"""A model whose tensors Python holds, or makes one by one, as a source of a conversion."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.sources import CONFIG_FILE
from specter_jax.checkpoint.safetensors_file import DTYPES
from specter_jax.errors import ConversionError


@dataclass(frozen=True, kw_only=True)
class LazyTensor:
    """A tensor that is made when it is needed."""

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[], np.ndarray]
    read_slice: Callable[[int], np.ndarray] | None = None
    """Element of the first axis; without it the whole tensor is made for every element."""


class ArraySource:
    """Tensors that Python holds or makes on demand, under their checkpoint names.

    Args:
        config: contents of config.json.
        tensors: arrays, or `LazyTensor`s for models larger than the memory.
        identity: names the contents; equal identities (with equal config and shapes) are taken for
            the same model when an interrupted conversion resumes.
        files: further files to be copied by name, such as tokenizer.json.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tensors: Mapping[str, np.ndarray | LazyTensor],
        *,
        identity: str,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.label = identity
        self._tensors = tensors
        config_text = json.dumps(dict(config), indent=2, sort_keys=True) + "\n"
        self._companions = {CONFIG_FILE: config_text.encode(), **(files or {})}

    def names(self) -> Collection[str]:
        """See `TensorSource`."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """See `TensorSource`."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> np.dtype:
        """See `TensorSource`."""
        dtype = np.dtype(self._tensors[name].dtype)
        if dtype not in DTYPES.values():
            raise ConversionError(
                f"{self.label}: tensor {name} has type {dtype}, expected one of "
                f"{', '.join(str(valid) for valid in DTYPES.values())}"
            )
        return dtype

    def read(self, name: str) -> np.ndarray:
        """See `TensorSource`."""
        tensor = self._tensors[name]
        return self._checked(name, tensor.read() if isinstance(tensor, LazyTensor) else tensor)

    def read_slice(self, name: str, index: int) -> np.ndarray:
        """See `TensorSource`."""
        tensor = self._tensors[name]
        if isinstance(tensor, LazyTensor) and tensor.read_slice is not None:
            return tensor.read_slice(index)
        return self.read(name)[index]

    def _checked(self, name: str, array: np.ndarray) -> np.ndarray:
        if array.shape != self.shape(name) or array.dtype != self.dtype(name):
            raise ConversionError(
                f"{self.label}: tensor {name} was made as {array.dtype} {array.shape}, "
                f"announced as {self.dtype(name)} {self.shape(name)}"
            )
        return array

    def where(self, name: str) -> str:
        """See `TensorSource`."""
        return self.label

    def fingerprint(self) -> str:
        """Digest of the identity, the files and every tensor's name, shape and dtype."""
        digest = hashlib.sha256(self.label.encode())
        for name in sorted(self._tensors):
            digest.update(f"{name} {self.shape(name)} {self.dtype(name)}\n".encode())
        for name, content in self._companions.items():
            digest.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
        return digest.hexdigest()

    def companions(self) -> Mapping[str, bytes]:
        """See `TensorSource`."""
        return self._companions
