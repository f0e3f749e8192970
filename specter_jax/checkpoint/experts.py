"""The expert store on disk: every routed expert at full precision, as memory-mapped views."""

from pathlib import Path

import numpy as np

from specter_jax.checkpoint.manifest import CONVERT_HINT, FORMAT_NAME, Manifest
from specter_jax.checkpoint.safetensors_file import DTYPES, DamagedFileError, read_header
from specter_jax.config import layer_name
from specter_jax.errors import CheckpointError, ChecksumError, InvalidRequestError, MissingFileError

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


class ExpertFiles:
    """Packed experts of a converted checkpoint, mapped into memory and read when touched.

    Attributes:
        dtype: numpy dtype of the elements.
        expert_elements: elements of one expert, 3 * F * H.
        expert_bytes: bytes of one expert.
        num_layers: MoE layers.
        num_experts: experts per MoE layer.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._dtype_code = _DTYPE_CODES[manifest.dtype]
        self.dtype = DTYPES[self._dtype_code]
        self.expert_elements = manifest.expert_elements
        self.expert_bytes = manifest.expert_elements * self.dtype.itemsize
        self.num_layers = len(manifest.moe_layers)
        self.num_experts = manifest.num_experts
        self._layers = [self._map(directory, layer) for layer in manifest.moe_layers]

    def _map(self, directory: Path, decoder_layer: int) -> np.ndarray:
        """Maps one layer's file: `[E, 3FH]`."""
        path = directory / expert_file_name(decoder_layer)
        try:
            header = read_header(path)
        except FileNotFoundError:
            raise MissingFileError(f"{path}: no such file; {CONVERT_HINT}") from None
        except DamagedFileError as error:
            raise ChecksumError(f"{error}; {CONVERT_HINT}") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
        said = {key: header.metadata.get(key) for key in expert_file_metadata(decoder_layer)}
        if said != expert_file_metadata(decoder_layer):
            raise ChecksumError(
                f"{path}: holds the experts of decoder layer {said['decoder_layer']} (format "
                f"{said['format']}), expected those of layer {decoder_layer}; {CONVERT_HINT}"
            )
        entries = header.entries
        found = [
            (name, entry.dtype_code, entry.shape)
            for name, entry in sorted(entries.items(), key=lambda item: item[1].offset)
        ]
        expected = [
            (expert_tensor_name(expert), self._dtype_code, (self.expert_elements,))
            for expert in range(self.num_experts)
        ]
        if found != expected:
            raise ChecksumError(
                f"{path}: expected {self.num_experts} tensors of {self.expert_elements} elements "
                f"({self.dtype}); {CONVERT_HINT}"
            )
        start = entries[expert_tensor_name(0)].offset
        layer_bytes = np.memmap(path, np.uint8, mode="r", offset=start)
        return layer_bytes.view(self.dtype).reshape(self.num_experts, self.expert_elements)

    def get(self, moe_index: int, expert: int) -> np.ndarray:
        """One packed expert: gate `[F, H]`, up `[F, H]`, down `[H, F]`, each row-major.

        Args:
            moe_index: position among the MoE layers, from 0.
            expert: expert within the layer, from 0.

        Returns:
            A read-only view `[3FH]` of the file's pages.

        Raises:
            InvalidRequestError: an index is out of range.
        """
        if not (0 <= moe_index < self.num_layers and 0 <= expert < self.num_experts):
            raise InvalidRequestError(
                f"expert ({moe_index}, {expert}) is out of range: the model has "
                f"{self.num_layers} MoE layers of {self.num_experts} experts"
            )
        return np.asarray(self._layers[moe_index][expert])
