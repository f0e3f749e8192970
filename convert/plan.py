"""What a conversion will do, settled and checked before anything is written.

Every tensor that the model needs is looked up with its shape and type, every tensor that is there
must be needed, and the group sizes must divide. So a damaged or incomplete source is refused in
well under a second, however large it is; only the values are left to be checked while they pass by.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from convert import mapping
from convert.sources import CONFIG_FILE, GENERATION_CONFIG_FILE, TensorSource
from pallas_kernels.int4 import CODES_PER_WORD
from pallas_kernels.nested import MAX_DIMENSION
from specter_jax.arguments import as_choice, as_integer
from specter_jax.checkpoint import EXPERT_FORMATS, GroupSizes
from specter_jax.config import ModelConfig
from specter_jax.config.checks import shown
from specter_jax.errors import ConversionError, InvalidRequestError
from specter_jax.json_files import read_json_object

GROUP_SIZES = (128, 64, 32, 16, 8)
"""In order of preference; below 64 only where nothing larger divides (tiny models)."""
DTYPES: Mapping[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


@dataclass(frozen=True, kw_only=True)
class SharedTensor:
    """One shared parameter: its name in the source and its place in its part's tree."""

    name: str
    path: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LayerExperts:
    """Where one MoE layer's experts are: `fused` or `separate` is set."""

    decoder_layer: int
    fused: tuple[str, str] | None
    """Names of gate_up `[E, 2F, H]` and down `[E, H, F]`."""
    separate: tuple[tuple[str, str, str], ...]
    """Per expert the names of gate `[F, H]`, up `[F, H]`, down `[H, F]`."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that `convert.layers` needs beside the source."""

    config: ModelConfig
    dtype: np.dtype
    """Of the experts."""
    shared_dtype: np.dtype | None
    """Of the shared parameters; None keeps each one's own."""
    expert_format: str
    """How experts are stored: "nested" or "plain"."""
    group_sizes: GroupSizes
    shared: Mapping[str, tuple[SharedTensor, ...]]
    """By part: "outer", "layers_00", ..."""
    experts: tuple[LayerExperts, ...]
    """By MoE index."""


def read_model_config(source: TensorSource) -> ModelConfig:
    """The model's configuration.

    Raises:
        ConversionError: config.json or generation_config.json is absent or not a JSON object.
        UnsupportedModelError: the family or a field is not supported.
    """
    files = source.companions()
    if CONFIG_FILE not in files:
        raise ConversionError(f"{source.label}: {CONFIG_FILE} is missing")
    generation = files.get(GENERATION_CONFIG_FILE, b"{}")
    return ModelConfig.from_hf(
        _json_object(source, CONFIG_FILE, files[CONFIG_FILE]),
        _json_object(source, GENERATION_CONFIG_FILE, generation),
    )


def _json_object(source: TensorSource, name: str, content: bytes) -> dict[str, Any]:
    try:
        return read_json_object(content, f"{source.label}/{name}")
    except ValueError as error:
        raise ConversionError(str(error)) from None


def choose_group_sizes(
    config: ModelConfig, requested: int | Sequence[int] | None = None
) -> GroupSizes:
    """INT4 group sizes for the hidden axis (gate, up) and the expert axis (down).

    Args:
        config: gives the axes' lengths.
        requested: a size for both axes, or a list or tuple of one for each; by default the first
            of 128, 64, 32, 16 and 8 that divides.

    Raises:
        InvalidRequestError: a requested size is no integer, not a multiple of 8, or does not divide
            its axis.
        ConversionError: no size divides an axis.
    """
    axes = {
        "hidden size": config.hidden_size,
        "expert size": config.expert_intermediate_size,
    }
    sizes = [
        _group_size(axis, length, size)
        for (axis, length), size in zip(axes.items(), _size_of_each_axis(requested), strict=True)
    ]
    return GroupSizes(gate_up=sizes[0], down=sizes[1])


def _size_of_each_axis(requested: int | Sequence[int] | None) -> list[int] | list[None]:
    """A caller's group sizes for the two axes, as Python's integers; None where it has no wish."""
    if requested is None:
        return [None, None]
    both = requested if isinstance(requested, list | tuple) else (requested, requested)
    if len(both) != 2:
        raise InvalidRequestError(f"group size must be one or two numbers, got {shown(requested)}")
    return [as_integer("group size", size) for size in both]


def _group_size(axis: str, length: int, requested: int | None) -> int:
    valid = [size for size in GROUP_SIZES if length % size == 0]
    if requested is None:
        if not valid:
            raise ConversionError(
                f"the model's {axis} {length} is not a multiple of {CODES_PER_WORD}: "
                "it cannot be encoded in INT4"
            )
        return valid[0]
    if requested < CODES_PER_WORD or requested % CODES_PER_WORD or length % requested:
        listed = ", ".join(map(str, valid)) or "none"
        raise InvalidRequestError(
            f"group size {shown(requested)} must be a multiple of {CODES_PER_WORD} that divides "
            f"the {axis} {length}; usual sizes that do: {listed}"
        )
    return requested


def build_plan(
    source: TensorSource,
    group_size: int | Sequence[int] | None = None,
    dtype: str | None = None,
    expert_format: str | None = None,
) -> Plan:
    """Checks the source and the options, and lays out the conversion.

    Options are those of `convert.conversion.convert_checkpoint`.

    Raises:
        ConversionError: a tensor is missing, unknown, there twice, of a wrong shape or of an
            unsupported type.
        UnsupportedModelError: see `read_model_config`.
        InvalidRequestError: an option is out of range.
    """
    if dtype is not None:
        as_choice("dtype", dtype, DTYPES)
    config = read_model_config(source)
    group_sizes = choose_group_sizes(config, group_size)
    tensors = _Tensors(source)
    shared = _plan_shared(tensors, config)
    experts = tuple(_plan_experts(tensors, config, layer) for layer in config.moe_layers)
    tensors.check_all_used(config)
    expert_dtype = DTYPES[dtype] if dtype else _experts_dtype(source, experts)
    return Plan(
        config=config,
        dtype=expert_dtype,
        expert_format=choose_expert_format(config, expert_dtype, expert_format),
        shared_dtype=DTYPES[dtype] if dtype else None,
        group_sizes=group_sizes,
        shared=shared,
        experts=experts,
    )


def choose_expert_format(config: ModelConfig, dtype: np.dtype, requested: str | None = None) -> str:
    """How experts are stored: nested if they can be, unless another format is requested.

    Raises:
        InvalidRequestError: the requested format is unknown or not possible.
    """
    if requested is not None:
        as_choice("expert format", requested, EXPERT_FORMATS)
    largest = max(config.hidden_size, config.expert_intermediate_size)
    obstacle = None
    if dtype != DTYPES["bfloat16"]:
        obstacle = f"the experts are {dtype}, nested ones must be bfloat16"
    elif largest > MAX_DIMENSION:
        obstacle = f"an expert's side is {largest}, nested ones have at most {MAX_DIMENSION}"
    if requested == "nested" and obstacle:
        raise InvalidRequestError(f"expert format nested: {obstacle}; choose plain")
    return requested or ("plain" if obstacle else "nested")


class _Tensors:
    """The source's tensors by canonical name (`mapping.canonical_name`), ticked off when used."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._names: dict[str, str] = {}
        for name in source.names():
            other = self._names.setdefault(mapping.canonical_name(name), name)
            if other != name:
                raise ConversionError(
                    f"{source.where(name)}: tensors {other} and {name} are two spellings of one "
                    "parameter; remove the wrong one"
                )
        self._unused = set(self._names)

    def __contains__(self, canonical: str) -> bool:
        return canonical in self._names

    def use(self, canonical: str, shape: tuple[int, ...]) -> str:
        """Checks presence, shape and type of a tensor; returns its name in the source."""
        source = self._source
        if canonical not in self._names:
            name = self._source_spelling(canonical)
            raise ConversionError(f"{source.where(name)}: tensor {name} is missing")
        name = self._names[canonical]
        if source.shape(name) != tuple(shape):
            raise ConversionError(
                f"{source.where(name)}: tensor {name} has shape {list(source.shape(name))}, "
                f"expected {list(shape)}"
            )
        source.dtype(name)
        self._unused.discard(canonical)
        return name

    def _source_spelling(self, canonical: str) -> str:
        """What a missing tensor would be called beside the tensors that are there."""
        if not any(".block_sparse_moe." in name for name in self._source.names()):
            return canonical
        name = canonical.replace(".mlp.", ".block_sparse_moe.")
        for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            name = name.replace(f".{ours}.", f".{theirs}.")
        return name

    def check_all_used(self, config: ModelConfig) -> None:
        """Tensors that the model does not have mean that it is another model."""
        unused = sorted(
            self._names[name] for name in self._unused if not mapping.ignorable(name, config)
        )
        if unused:
            raise ConversionError(
                f"{self._source.where(unused[0])}: tensor {unused[0]} is not part of a "
                f"{config.family} model as {CONFIG_FILE} describes it ({len(unused)} such tensors)"
            )


def _plan_shared(tensors: _Tensors, config: ModelConfig) -> dict[str, tuple[SharedTensor, ...]]:
    """Finds all shared parameters and sorts them into parts."""
    parts: dict[str, list[SharedTensor]] = {}
    for canonical, target in mapping.shared_targets(config).items():
        name = tensors.use(canonical, target.shape)
        tensor = SharedTensor(name=name, path=target.path[1:])
        parts.setdefault(target.part, []).append(tensor)
    return {part: tuple(members) for part, members in sorted(parts.items())}


def _plan_experts(tensors: _Tensors, config: ModelConfig, layer: int) -> LayerExperts:
    """Finds one layer's experts, fused or separate."""
    num_experts, hidden = config.num_experts, config.hidden_size
    width = config.expert_intermediate_size
    gate_up, down = mapping.fused_expert_names(config, layer)
    if gate_up in tensors or down in tensors:
        fused = (
            tensors.use(gate_up, (num_experts, 2 * width, hidden)),
            tensors.use(down, (num_experts, hidden, width)),
        )
        return LayerExperts(decoder_layer=layer, fused=fused, separate=())
    separate = []
    for expert in range(num_experts):
        gate, up, down = mapping.expert_names(config, layer, expert)
        separate.append(
            (
                tensors.use(gate, (width, hidden)),
                tensors.use(up, (width, hidden)),
                tensors.use(down, (hidden, width)),
            )
        )
    return LayerExperts(decoder_layer=layer, fused=None, separate=tuple(separate))


def _experts_dtype(source: TensorSource, experts: tuple[LayerExperts, ...]) -> np.dtype:
    """The one type of all experts."""
    first: str | None = None
    for layer in experts:
        for name in layer.fused or (name for names in layer.separate for name in names):
            first = first or name
            if source.dtype(name) != source.dtype(first):
                raise ConversionError(
                    f"{source.where(name)}: tensor {name} is {source.dtype(name)} but {first} is "
                    f"{source.dtype(first)}; choose one type for all with --dtype"
                )
    assert first is not None, "a ModelConfig has at least one MoE layer"
    return source.dtype(first)
