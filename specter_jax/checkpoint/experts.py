"""The expert store on disk: every routed expert at full precision, as memory-mapped views."""

from pathlib import Path

import numpy as np

from pallas_kernels.nested import NestedLayout, num_escapes, with_capacity
from specter_jax.checkpoint.manifest import CONVERT_HINT, FORMAT_NAME, Manifest
from specter_jax.checkpoint.safetensors_file import (
    DTYPES,
    DamagedFileError,
    Header,
    read_header,
)
from specter_jax.config import layer_name
from specter_jax.errors import CheckpointError, ChecksumError, InvalidRequestError, MissingFileError

WORD_DTYPE = np.dtype(np.int32)
"""Of nested experts."""
_WORD_CODE = "I32"
_DTYPE_CODES = {str(dtype): code for code, dtype in DTYPES.items()}


def expert_file_name(decoder_layer: int) -> str:
    """Path of a layer's experts inside of a converted directory."""
    return f"experts/{layer_name(decoder_layer)}.safetensors"


def expert_file_metadata(decoder_layer: int) -> dict[str, str]:
    """What a layer's file says about itself, so that exchanged files are noticed."""
    return {"format": FORMAT_NAME, "decoder_layer": str(decoder_layer)}


def expert_tensor_name(expert: int) -> str:
    """Name of an expert's tensor in its layer's file: 7 -> "expert_007"."""
    return f"expert_{expert:03d}"


def check_expert(moe_index: int, expert: int, num_layers: int, num_experts: int) -> None:
    """Raises InvalidRequestError unless the model has this expert."""
    if not (0 <= moe_index < num_layers and 0 <= expert < num_experts):
        raise InvalidRequestError(
            f"expert ({moe_index}, {expert}) is out of range: the model has "
            f"{num_layers} MoE layers of {num_experts} experts"
        )


class ExpertFiles:
    """Experts of a converted checkpoint, mapped into memory and read when touched.

    Attributes:
        dtype: numpy dtype of the elements; int32 if experts are nested.
        expert_bytes: bytes of one expert as `get` returns it.
        num_layers: MoE layers.
        num_experts: experts per MoE layer.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._layout = manifest.nested_layout
        nested = self._layout is not None
        self._dtype_code = _WORD_CODE if nested else _DTYPE_CODES[manifest.dtype]
        self.dtype = WORD_DTYPE if nested else DTYPES[self._dtype_code]
        self._expert_elements = manifest.expert_elements
        self.expert_bytes = manifest.expert_bytes
        self.num_layers = len(manifest.moe_layers)
        self.num_experts = manifest.num_experts
        self._layers = [self._map(directory, layer) for layer in manifest.moe_layers]

    def _map(self, directory: Path, decoder_layer: int) -> list[np.ndarray]:
        """Maps one layer's file: every expert as it is there."""
        path = directory / expert_file_name(decoder_layer)
        header = read_expert_header(path)
        said = {key: header.metadata.get(key) for key in expert_file_metadata(decoder_layer)}
        if said != expert_file_metadata(decoder_layer):
            raise ChecksumError(
                f"{path}: holds the experts of decoder layer {said['decoder_layer']} (format "
                f"{said['format']}), expected those of layer {decoder_layer}; {CONVERT_HINT}"
            )
        entries = sorted(header.entries.items(), key=lambda item: item[1].offset)
        names = [expert_tensor_name(expert) for expert in range(self.num_experts)]
        if [name for name, _ in entries] != names or not all(
            entry.dtype_code == self._dtype_code and self._is_expert(entry.shape)
            for _, entry in entries
        ):
            what = f"{self._expert_elements} elements ({self.dtype})"
            if self._layout is not None:
                what = f"nested experts of at most {self._layout.num_words} words"
            raise ChecksumError(
                f"{path}: expected {self.num_experts} tensors of {what}; {CONVERT_HINT}"
            )
        start = entries[0][1].offset
        content = np.memmap(path, np.uint8, mode="r", offset=start)
        return [
            content[entry.offset - start :][: entry.num_bytes].view(self.dtype)
            for _, entry in entries
        ]

    def _is_expert(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape can be one of the experts."""
        if self._layout is None:
            return shape == (self._expert_elements,)
        try:
            layout = NestedLayout.from_words(self._layout.hidden, self._layout.inner, *shape)
        except (TypeError, ValueError):
            return False
        return layout.capacity <= self._layout.capacity

    def get(self, moe_index: int, expert: int) -> np.ndarray:
        """One expert.

        Args:
            moe_index: position among the MoE layers, from 0.
            expert: expert within the layer, from 0.

        Returns:
            Plain: gate `[F, H]`, up `[F, H]`, down `[H, F]`, each row-major, as a read-only view
            `[3FH]` of the file's pages. Nested: int32 words `[W]` with the model's capacity, see
            `pallas_kernels.nested`.

        Raises:
            InvalidRequestError: an index is out of range.
            ChecksumError: the words contradict themselves.
        """
        stored = self._stored(moe_index, expert)
        if self._layout is None:
            return stored
        layout = self._layout
        try:
            return with_capacity(stored, layout.hidden, layout.inner, layout.capacity)
        except ValueError as error:
            raise ChecksumError(
                f"expert ({moe_index}, {expert}): {error}; {CONVERT_HINT}"
            ) from None

    def num_escapes(self, moe_index: int, expert: int) -> int:
        """Escapes of a nested expert; 0 of a plain one."""
        if self._layout is None:
            return 0
        stored = self._stored(moe_index, expert)
        return num_escapes(stored, self._layout)

    def _stored(self, moe_index: int, expert: int) -> np.ndarray:
        """A read-only view of the expert as it is in its file."""
        check_expert(moe_index, expert, self.num_layers, self.num_experts)
        return np.asarray(self._layers[moe_index][expert])


def read_expert_header(path: Path) -> Header:
    """Header of a file of experts; raises CheckpointError and those derived from it."""
    try:
        return read_header(path)
    except FileNotFoundError:
        raise MissingFileError(f"{path}: no such file; {CONVERT_HINT}") from None
    except DamagedFileError as error:
        raise ChecksumError(f"{error}; {CONVERT_HINT}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def largest_capacity(paths: list[Path], hidden: int, inner: int) -> int:
    """Escapes that the largest nested expert of some files has room for."""
    headers = (read_expert_header(path) for path in paths)
    return max(
        NestedLayout.from_words(hidden, inner, *entry.shape).capacity
        for header in headers
        for entry in header.entries.values()
    )
