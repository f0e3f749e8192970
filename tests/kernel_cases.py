"""Random inputs for the kernel tests, and the same computations in float64 numpy."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.constants import NOT_RESIDENT
from pallas_kernels.int4.layout import decode_numpy, encode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    hidden: int = 128
    inner: int = 96
    num_experts: int = 5
    top_k: int = 2
    group: int = 32


def choices(rng: np.random.Generator, sizes: Sizes, num_rows: int) -> tuple:
    """Distinct experts int32 and weights float32, [rows, k]."""
    experts = [rng.permutation(sizes.num_experts)[: sizes.top_k] for _ in range(num_rows)]
    weights = rng.uniform(0.1, 1.0, (num_rows, sizes.top_k))
    return np.array(experts, np.int32), weights.astype(np.float32)


def draft_layer(rng: np.random.Generator, sizes: Sizes) -> dict[str, np.ndarray]:
    def encoded(num_out: int, num_in: int) -> tuple:
        scale = np.float32(num_in**-0.5)
        matrices = rng.standard_normal((sizes.num_experts, num_out, num_in), np.float32) * scale
        return tuple(
            np.stack(part)
            for part in zip(*(encode(matrix, sizes.group) for matrix in matrices), strict=True)
        )

    gate = encoded(sizes.inner, sizes.hidden)
    up = encoded(sizes.inner, sizes.hidden)
    down = encoded(sizes.hidden, sizes.inner)
    return {
        "gate_up_codes": np.concatenate([gate[0], up[0]], axis=1),
        "gate_up_scales": np.concatenate([gate[1], up[1]], axis=1),
        "down_codes": down[0],
        "down_scales": down[1],
        "tables": np.stack([gate[2], up[2], down[2]], axis=1),
    }


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def draft_float64(x, experts, weights, layer, rounded: bool = False) -> np.ndarray:
    """The draft experts in float64; with `rounded`, on the kernels' byte tables and activations."""
    num_experts = layer["tables"].shape[0]
    inner = layer["down_codes"].shape[2] * 8
    x = np.asarray(x, np.float64)
    output = np.zeros(x.shape)
    for row, slot in np.ndindex(experts.shape):
        expert = experts[row, slot]
        if expert >= num_experts:
            continue
        tables = layer["tables"][expert]
        if rounded:
            tables = np.stack([byte_table(table) for table in tables])
        codes, scales = layer["gate_up_codes"][expert], layer["gate_up_scales"][expert]
        gate = decode_numpy(codes[:inner], scales[:inner], tables[0]).astype(np.float64)
        up = decode_numpy(codes[inner:], scales[inner:], tables[1]).astype(np.float64)
        down = decode_numpy(layer["down_codes"][expert], layer["down_scales"][expert], tables[2])
        inputs = rounded_blocks(x[row], 32) if rounded else x[row]
        active = silu(gate @ inputs) * (up @ inputs)
        active = rounded_blocks(active, 16) if rounded else active
        output[row] += weights[row, slot] * (down.astype(np.float64) @ active)
    return output


def byte_table(table: np.ndarray) -> np.ndarray:
    step = table.max() / 127.5
    return (np.clip(np.floor(table / step), 0, 127) + 0.5) * step


def rounded_blocks(values: np.ndarray, block: int) -> np.ndarray:
    blocks = values.reshape(-1, block)
    scale = np.abs(blocks).max(-1, keepdims=True) / 127
    return (np.rint(blocks / np.where(scale > 0, scale, 1)) * scale).reshape(values.shape)


def slots_and_rows(rng: np.random.Generator, sizes: Sizes, missing: tuple[int, ...] = ()) -> tuple:
    """Slots float32 [experts + 2, 3 * inner * hidden] in shuffled order, and slot_row."""
    num_slots = sizes.num_experts + 2
    slots = rng.standard_normal((num_slots, 3 * sizes.inner * sizes.hidden), np.float32)
    slot_row = rng.permutation(num_slots)[: sizes.num_experts].astype(np.int32)
    slot_row[list(missing)] = NOT_RESIDENT
    return slots * np.float32(sizes.hidden**-0.5), slot_row


def ffn_float64(x, experts, weights, slots, slot_row) -> np.ndarray:
    x, slots = np.asarray(x, np.float64), np.asarray(slots, np.float64)
    hidden = x.shape[1]
    inner = slots.shape[1] // (3 * hidden)
    output = np.zeros(x.shape)
    for row, slot in np.ndindex(experts.shape):
        expert = experts[row, slot]
        if expert >= len(slot_row) or slot_row[expert] == NOT_RESIDENT:
            continue
        gate, up, down = slots[slot_row[expert]].reshape(3, -1)
        gate, up = gate.reshape(inner, hidden) @ x[row], up.reshape(inner, hidden) @ x[row]
        output[row] += weights[row, slot] * (down.reshape(hidden, inner) @ (silu(gate) * up))
    return output


def error(value, expected) -> float:
    """Largest relative error of a row, by norms; rows of zeros must be zeros exactly."""
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    size = np.linalg.norm(expected, axis=-1)
    off = np.linalg.norm(value - expected, axis=-1)
    assert (off[size == 0] == 0).all()
    return float((off[size > 0] / size[size > 0]).max())


def device(*arrays):
    return tuple(jnp.asarray(array) for array in arrays)
