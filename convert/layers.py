"""Writes the parts of a converted checkpoint: shared parameters, and one MoE layer's experts.

Memory: a shared part is held while it is written (embedding and head, or a decoder layer without
its routed experts). Of a MoE layer one expert is held at a time at full precision (and nested), and
the layer's INT4 draft, a quarter of its bf16 experts, until it is written as a whole.
"""

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from convert.plan import LayerExperts, Plan, SharedTensor
from convert.sources import TensorSource
from pallas_kernels.int4 import CODES_PER_WORD, NUM_BUCKETS, encode
from pallas_kernels.nested import NestedLayout, padded_capacity
from pallas_kernels.nested import encode as encode_nested
from specter_jax.checkpoint import WORD_DTYPE, expert_file_metadata, expert_tensor_name
from specter_jax.checkpoint.orbax_io import Tree, save_tree
from specter_jax.checkpoint.safetensors_file import SafetensorsWriter
from specter_jax.errors import ConversionError

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

Draft = dict[str, np.ndarray]
"""One MoE layer's INT4 experts, see `specter_jax.checkpoint.Checkpoint.load_draft_layer`."""


def write_shared_part(
    source: TensorSource, plan: Plan, tensors: tuple[SharedTensor, ...], path: Path
) -> None:
    """Writes one part of the shared parameters as an Orbax checkpoint at `path`."""
    save_tree(path, shared_tree(source, plan, tensors))


def shared_tree(source: TensorSource, plan: Plan, tensors: tuple[SharedTensor, ...]) -> Tree:
    """Reads one part of the shared parameters.

    Raises:
        ConversionError: a tensor cannot be read or holds NaN or infinity.
    """
    tree: Tree = {}
    for tensor in tensors:
        array = source.read(tensor.name)
        if plan.shared_dtype is not None:
            array = _cast(array, plan.shared_dtype)
        _check_finite(source, tensor.name, array)
        node = tree
        for key in tensor.path[:-1]:
            node = node.setdefault(key, {})
        node[tensor.path[-1]] = array
    return tree


def write_expert_layer(
    source: TensorSource,
    plan: Plan,
    layer: LayerExperts,
    experts_path: Path,
    draft_path: Path,
    on_expert: Callable[[], None],
) -> None:
    """Writes one MoE layer: its experts (safetensors) and their INT4 draft (Orbax).

    Args:
        source: where the experts are read.
        plan: sizes and types.
        layer: which experts.
        experts_path: the safetensors file to write.
        draft_path: the Orbax directory to write.
        on_expert: called after each expert.

    Raises:
        ConversionError: a tensor cannot be read or holds NaN or infinity.
    """
    config = plan.config
    draft = empty_draft(plan)
    dtype, most = plan.dtype, config.expert_elements
    if plan.expert_format == "nested":
        all_escapes = padded_capacity(config.expert_elements)
        dtype = WORD_DTYPE
        most = NestedLayout(
            config.hidden_size, config.expert_intermediate_size, all_escapes
        ).num_words
    announced = [(expert_tensor_name(expert), dtype, most) for expert in range(config.num_experts)]
    metadata = expert_file_metadata(layer.decoder_layer)
    with SafetensorsWriter(experts_path, announced, metadata) as writer:
        for expert in range(config.num_experts):
            array = convert_expert(source, plan, layer, expert, draft)
            writer.append(expert_tensor_name(expert), array)
            on_expert()
    save_tree(draft_path, draft)


def convert_expert(
    source: TensorSource,
    plan: Plan,
    layer: LayerExperts,
    expert: int,
    draft: Draft,
    place: int | None = None,
) -> np.ndarray:
    """Reads one expert, writes its codes into `draft`, and returns it in the plan's format.

    Plain: packed [3FH]. Nested: int32 words, with room for its own escapes only.

    place: index in `draft` of the expert's codes, `expert` by default.

    Raises:
        ConversionError: a tensor cannot be read or holds NaN or infinity.
    """
    place = expert if place is None else place
    packed = _read_packed(source, plan, layer, expert)
    _encode_expert(source, plan, layer, expert, packed, draft, place)
    if plan.expert_format == "plain":
        return packed
    return encode_nested(packed, draft["gate_up_scales"][place], draft["down_scales"][place])


def empty_draft(plan: Plan, num_experts: int | None = None) -> Draft:
    """Arrays for one layer's draft, or for `num_experts` experts of it."""
    config = plan.config
    hidden = config.hidden_size
    if num_experts is None:
        num_experts = config.num_experts
    width = config.expert_intermediate_size
    sizes = plan.group_sizes
    return {
        "gate_up_codes": np.empty((num_experts, 2 * width, hidden // CODES_PER_WORD), np.int32),
        "gate_up_scales": np.empty((num_experts, 2 * width, hidden // sizes.gate_up), _BFLOAT16),
        "down_codes": np.empty((num_experts, hidden, width // CODES_PER_WORD), np.int32),
        "down_scales": np.empty((num_experts, hidden, width // sizes.down), _BFLOAT16),
        "tables": np.empty((num_experts, 3, NUM_BUCKETS), np.float32),
    }


def _read_packed(source: TensorSource, plan: Plan, layer: LayerExperts, expert: int) -> np.ndarray:
    """One expert as 1-D `[3FH]`: gate, up, down; in the plan's dtype."""
    packed = np.empty(plan.config.expert_elements, plan.dtype)
    start = 0
    for name, array in _read_expert(source, layer, expert):
        values = _cast(array, plan.dtype).reshape(-1)
        _check_finite(source, name, values)
        packed[start : start + values.size] = values
        start += values.size
    return packed


def _read_expert(
    source: TensorSource, layer: LayerExperts, expert: int
) -> list[tuple[str, np.ndarray]]:
    """Tensors of an expert with their names, in the order gate, up, down."""
    if layer.fused is None:
        return [(name, source.read(name)) for name in layer.separate[expert]]
    # gate_up holds gate's rows before up's, as the packed form does.
    return [(name, source.read_slice(name, expert)) for name in layer.fused]


def _encode_expert(
    source: TensorSource,
    plan: Plan,
    layer: LayerExperts,
    expert: int,
    packed: np.ndarray,
    draft: Draft,
    place: int,
) -> None:
    """Writes an expert's codes, scales and tables into `draft` at index `place`."""
    hidden, width = plan.config.hidden_size, plan.config.expert_intermediate_size
    gate, up, down = np.split(packed, 3)
    sizes = plan.group_sizes
    for index, (matrix, group, rows, kind) in enumerate(
        (
            (gate.reshape(width, hidden), sizes.gate_up, slice(0, width), "gate_up"),
            (up.reshape(width, hidden), sizes.gate_up, slice(width, 2 * width), "gate_up"),
            (down.reshape(hidden, width), sizes.down, slice(0, hidden), "down"),
        )
    ):
        try:
            codes, scales, table = encode(matrix, group)
        except ValueError as error:  # finite in its own type, but beyond bfloat16's range
            name = layer.fused[index // 2] if layer.fused else layer.separate[expert][index]
            raise ConversionError(f"{source.where(name)}: tensor {name}: {error}") from None
        draft[f"{kind}_codes"][place, rows] = codes
        draft[f"{kind}_scales"][place, rows] = scales
        draft["tables"][place, index] = table


def _cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):  # overflow is infinity, which is reported with the name
        return array.astype(dtype, copy=False)


def _check_finite(source: TensorSource, name: str, array: np.ndarray) -> None:
    """Raises ConversionError naming the tensor if it holds NaN or infinity."""
    exponent_mask, unsigned = _EXPONENTS[array.dtype]
    bits = array.reshape(-1).view(unsigned)
    # All exponent bits set means NaN or infinity. In blocks, so that temporaries stay small.
    block = 1 << 18
    for start in range(0, bits.size, block):
        if ((bits[start : start + block] & exponent_mask) == exponent_mask).any():
            raise ConversionError(
                f"{source.where(name)}: tensor {name} holds NaN or infinity in {array.dtype}"
            )


_EXPONENTS = {
    _BFLOAT16: (np.uint16(0x7F80), np.uint16),
    np.dtype(np.float16): (np.uint16(0x7C00), np.uint16),
    np.dtype(np.float32): (np.uint32(0x7F800000), np.uint32),
}
