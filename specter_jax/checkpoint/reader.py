"""Opening a converted checkpoint: checks first, then parameters layer by layer."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from pallas_kernels.int4 import CODES_PER_WORD, NUM_BUCKETS
from specter_jax.checkpoint.experts import ExpertFiles
from specter_jax.checkpoint.manifest import (
    CONVERT_HINT,
    FileRecord,
    GroupSizes,
    Manifest,
    read_manifest,
    record_file,
)
from specter_jax.checkpoint.orbax_io import Tree, load_tree
from specter_jax.config import ModelConfig, layer_name
from specter_jax.errors import (
    CheckpointError,
    ChecksumError,
    InvalidRequestError,
    MissingFileError,
)
from specter_jax.paths import as_path, reason

Verify = Literal["sizes", "checksums"]

SMALL_FILE_BYTES = 64 << 10
"""Files up to this size are always compared by checksum.

They take milliseconds together, and each part of a model has some that differ from the other parts'
(norms, the draft's tables), so that exchanged directories are noticed.
"""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A converted checkpoint whose files have been checked; see `open_checkpoint`."""

    path: Path
    manifest: Manifest
    config: ModelConfig

    def load_shared(self, dtype: Any, device: Any = None) -> Tree:
        """Loads the shared parameters, one part after another.

        Args:
            dtype: what floating-point parameters are converted to, such as "bfloat16".
            device: `jax.Device` or `Sharding`; JAX's default device if None.

        Returns:
            Nested dicts of arrays by part: "outer" (embedding, final norm, head), "layers_00",
            "layers_01", ...

        Raises:
            CheckpointError: a part cannot be read.
        """
        shared: Tree = {}
        for part in self.manifest.shared_parts:
            tree = load_tree(self.path / "shared" / part)
            shared[part] = jax.tree.map(lambda array: place(array, dtype, device), tree)
        return shared

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert on the link and in its slot."""
        return self.manifest.expert_bytes

    @property
    def group_sizes(self) -> GroupSizes:
        """Weights per INT4 scale."""
        return self.manifest.group_sizes

    def load_draft_layer(self, layer: int, device: Any = None) -> Tree:
        """Loads the INT4 draft of MoE layer `layer`.

        Args:
            layer: MoE index.
            device: as for `load_shared`.

        Returns:
            With E experts, hidden size H and expert size F: gate_up_codes int32 `[E, 2F, H/8]`,
            gate_up_scales bf16 `[E, 2F, H/g1]`, down_codes int32 `[E, H, F/8]`, down_scales bf16
            `[E, H, F/g2]`, tables float32 `[E, 3, 8]` (gate, up, down).

        Raises:
            CheckpointError: the layer cannot be read.
        """
        path = self.path / "draft" / layer_name(self.manifest.moe_layers[layer])
        tree = load_tree(path)
        shapes = {name: getattr(array, "shape", None) for name, array in tree.items()}
        if shapes != self._draft_shapes():
            raise CheckpointError(
                f"{path}: its arrays have other shapes than the manifest's model; {CONVERT_HINT}"
            )
        return jax.tree.map(lambda array: place(array, None, device), tree)

    def _draft_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one layer's draft arrays."""
        config, sizes = self.config, self.group_sizes
        experts, hidden = config.num_experts, config.hidden_size
        width = config.expert_intermediate_size
        return {
            "gate_up_codes": (experts, 2 * width, hidden // CODES_PER_WORD),
            "gate_up_scales": (experts, 2 * width, hidden // sizes.gate_up),
            "down_codes": (experts, hidden, width // CODES_PER_WORD),
            "down_scales": (experts, hidden, width // sizes.down),
            "tables": (experts, 3, NUM_BUCKETS),
        }

    def load_draft(self, device: Any = None) -> Tree:
        """Loads every MoE layer's INT4 draft: `{"layers_03": tree}`, see `load_draft_layer`."""
        return {
            layer_name(decoder_layer): self.load_draft_layer(layer, device)
            for layer, decoder_layer in enumerate(self.manifest.moe_layers)
        }

    def open_experts(self) -> ExpertFiles:
        """Maps the expert store's files.

        Raises:
            CheckpointError: a file is missing or not as the manifest says.
        """
        return ExpertFiles(self.path, self.manifest)


def place(array: np.ndarray, dtype: Any, device: Any) -> jax.Array:
    """Converts on the host, then copies to the device."""
    if dtype is not None and jax.numpy.issubdtype(array.dtype, jax.numpy.floating):
        array = array.astype(jax.numpy.dtype(dtype), copy=False)
    return jax.device_put(array, device)


def open_checkpoint(path: str | os.PathLike[str], verify: Verify = "sizes") -> Checkpoint:
    """Opens a converted directory.

    Args:
        path: directory written by `specter-convert`.
        verify: "sizes" checks that every file is there with its recorded size, and the SHA-256
            digests of files of at most `SMALL_FILE_BYTES`; "checksums" those of all files.

    Raises:
        FormatVersionError: written in another version of the format.
        MissingFileError: the manifest or a file it lists is absent.
        ChecksumError: a file has another size or checksum than recorded.
        CheckpointError: the manifest cannot be used.
        InvalidRequestError: `verify` is neither of the two, or `path` is no path.
    """
    if verify not in ("sizes", "checksums"):
        raise InvalidRequestError(f'verify must be "sizes" or "checksums", got {verify!r}')
    directory = as_path("path", path)
    manifest = read_manifest(directory)
    check_files(directory, manifest, verify)
    return Checkpoint(path=directory, manifest=manifest, config=manifest.config)


def check_files(directory: Path, manifest: Manifest, verify: Verify) -> None:
    """Compares the files with the manifest; raises as `open_checkpoint` does."""
    for name, record in manifest.files.items():
        path = directory / name
        try:
            _check_file(path, record, verify)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({reason(error)})") from error


def _check_file(path: Path, record: FileRecord, verify: Verify) -> None:
    if not path.is_file():
        raise MissingFileError(f"{path}: no such file; {CONVERT_HINT}")
    size = path.stat().st_size
    if size != record.bytes:
        raise ChecksumError(
            f"{path}: {size} bytes, the manifest has {record.bytes}; {CONVERT_HINT}"
        )
    wanted = verify == "checksums" or size <= SMALL_FILE_BYTES
    if wanted and record_file(path).sha256 != record.sha256:
        raise ChecksumError(f"{path}: SHA-256 differs from the manifest's; {CONVERT_HINT}")
