"""The model that is planned for: its configuration and the sizes of its parts, without weights."""

from __future__ import annotations

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

from pallas_kernels.nested import NestedLayout, padded_capacity
from specter_jax.arguments import as_integer
from specter_jax.budget import DEFAULT_MAX_CONTEXT
from specter_jax.checkpoint import MANIFEST_NAME, open_checkpoint
from specter_jax.config import ModelConfig
from specter_jax.errors import CheckpointError, InvalidRequestError, MissingFileError
from specter_jax.json_files import read_json_object
from specter_jax.memory import plan_memory, staging_slots
from specter_jax.parameter_sizes import ParameterSizes, parameter_sizes
from specter_jax.planner.calibration import Calibration
from specter_jax.planner.timing import ModelBytes
from specter_jax.runtime_config import RuntimeConfig

ITEM_BYTES = 2
"""Of one element of bfloat16, what a GPU computes in."""

EXPERT_FORMATS = ("nested", "plain")
_WORD_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model by its shapes; has what sizes are computed from, as an open checkpoint has it.

    expert_bytes: of one expert in its slot and on the link; has_weights: whether `path` is a
    converted directory, which can be loaded.
    """

    path: Path
    config: ModelConfig
    group_sizes: Any
    expert_format: str
    expert_bytes: int
    has_weights: bool

    @functools.cached_property
    def parts(self) -> ParameterSizes:
        """Bytes of shared parameters, draft and one expert."""
        return parameter_sizes(self, ITEM_BYTES)

    @property
    def max_in_flight(self) -> int:
        """Transfers that may be on their way at once."""
        return staging_slots(self.expert_bytes)

    def context(self, max_context: int | None) -> int:
        """Tokens that memory is set aside for, as `load` has it; raises InvalidRequestError."""
        most = self.config.max_context
        if max_context is None:
            return min(most, DEFAULT_MAX_CONTEXT)
        return as_integer("max_context", max_context, 2, most)

    def sizes(self, budget: int, max_context: int | None) -> tuple[int, int]:
        """Expert slots that a budget in bytes buys, and transfers in flight.

        Raises:
            BudgetError: the budget is too small. InvalidRequestError: `max_context` is.
        """
        ledger = plan_memory(
            config=self.config,
            shared_bytes=self.parts.shared_bytes,
            draft_bytes=self.parts.draft_bytes,
            expert_bytes=self.parts.expert_bytes,
            itemsize=ITEM_BYTES,
            max_batch=1,
            max_context=self.context(max_context),
            prefill_tokens=RuntimeConfig.prefill_tokens,
            gpu_memory=budget,
        )
        return ledger.num_slots, ledger.max_in_flight

    def read_bytes(self) -> ModelBytes:
        """What this model's programs read."""
        config = self.config
        sizes = self.parts
        head = config.vocab_size * config.hidden_size * ITEM_BYTES
        # Of an embedding of its own only a row is read.
        embedding = 0 if config.tie_word_embeddings else head
        draft = sizes.draft_bytes / (config.num_moe_layers * config.num_experts)
        nested = self.expert_format == "nested"
        return ModelBytes(
            num_layers=config.num_layers,
            layer=(sizes.shared_bytes - head - embedding) / config.num_layers,
            head=head,
            draft_expert=draft,
            expert=self.expert_bytes,
            expert_read=self.expert_bytes + (draft if nested else 0),
            is_nested=nested,
        )


def planned_model(
    path: str | os.PathLike[str], calibration: Calibration, expert_format: str | None = None
) -> PlannedModel:
    """Describes a converted directory, or one that holds no more than a config.json.

    Args:
        expert_format: "nested" or "plain"; by default a converted directory's own, else "nested".

    Raises:
        MissingFileError, CheckpointError, UnsupportedModelError: the directory cannot be used.
    """
    path = Path(path)
    if (path / MANIFEST_NAME).exists():
        checkpoint = open_checkpoint(path)
        config, groups = checkpoint.config, checkpoint.group_sizes
        stored_as = getattr(checkpoint.manifest, "expert_format", EXPERT_FORMATS[1])
        if expert_format in (None, stored_as):
            expert_format, size = stored_as, parameter_sizes(checkpoint, ITEM_BYTES).expert_bytes
        else:
            size = None
        return _planned(path, config, groups, expert_format, calibration, size, has_weights=True)
    if (path / "config.json").exists():
        return model_of_config(_read_config(path), calibration, expert_format, path=path)
    raise MissingFileError(f"{path}: neither a converted model nor a config.json there")


def model_of_config(
    config: ModelConfig,
    calibration: Calibration,
    expert_format: str | None = None,
    *,
    path: Path = Path("."),
) -> PlannedModel:
    """Describes a model by its configuration; raises ConversionError if INT4 cannot encode it."""
    # Conversion sits above this package; its choice of group sizes is needed here alone.
    from convert.plan import choose_group_sizes

    groups = choose_group_sizes(config)
    expert_format = expert_format or EXPERT_FORMATS[0]
    return _planned(path, config, groups, expert_format, calibration, None, has_weights=False)


def _planned(
    path: Path,
    config: ModelConfig,
    groups: Any,
    expert_format: str,
    calibration: Calibration,
    size: int | None,
    *,
    has_weights: bool,
) -> PlannedModel:
    if expert_format not in EXPERT_FORMATS:
        raise InvalidRequestError(
            f"expert format is {expert_format!r}; expected one of {', '.join(EXPERT_FORMATS)}"
        )
    return PlannedModel(
        path=path,
        config=config,
        group_sizes=groups,
        expert_format=expert_format,
        expert_bytes=size or expert_bytes(config, expert_format, calibration.escape_share),
        has_weights=has_weights,
    )


def expert_bytes(config: ModelConfig, expert_format: str, escape_share: float) -> int:
    """Bytes of one bf16 expert in its slot; escape_share: of its weights, kept apart if nested."""
    if expert_format == "plain":
        return config.expert_elements * ITEM_BYTES
    capacity = padded_capacity(round(config.expert_elements * escape_share))
    layout = NestedLayout(config.hidden_size, config.expert_intermediate_size, capacity)
    return layout.num_words * _WORD_BYTES


def _read_config(path: Path) -> ModelConfig:
    file = path / "config.json"
    try:
        return ModelConfig.from_hf(read_json_object(file, str(file)))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise CheckpointError(str(error)) from None
