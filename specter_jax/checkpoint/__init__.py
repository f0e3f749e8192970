"""Converted checkpoints on disk: manifest, shared and draft parameters, expert store."""

from specter_jax.checkpoint.experts import (
    WORD_DTYPE,
    ExpertFiles,
    check_expert,
    expert_file_metadata,
    expert_file_name,
    expert_tensor_name,
    largest_capacity,
)
from specter_jax.checkpoint.manifest import (
    EXPERT_FORMATS,
    FORMAT_NAME,
    FORMAT_VERSION,
    MANIFEST_NAME,
    FileRecord,
    GroupSizes,
    Manifest,
    read_manifest,
    record_file,
)
from specter_jax.checkpoint.reader import (
    Checkpoint,
    check_files,
    open_checkpoint,
    place,
)

__all__ = [
    "EXPERT_FORMATS",
    "FORMAT_NAME",
    "FORMAT_VERSION",
    "MANIFEST_NAME",
    "WORD_DTYPE",
    "Checkpoint",
    "ExpertFiles",
    "FileRecord",
    "GroupSizes",
    "Manifest",
    "check_expert",
    "check_files",
    "expert_file_metadata",
    "expert_file_name",
    "expert_tensor_name",
    "largest_capacity",
    "open_checkpoint",
    "place",
    "read_manifest",
    "record_file",
]
