"""Model shapes, random inputs and timing shared by the kernel bench and the tuning script."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.int4 import BUCKET_FRACTIONS
from pallas_kernels.nested import REMAINDERS, NestedLayout

GROUP = 128
SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One MoE layer's routed experts."""

    name: str
    hidden: int
    inner: int
    num_experts: int
    top_k: int

    @property
    def expert_elements(self) -> int:
        return 3 * self.hidden * self.inner

    @property
    def packed_expert_bytes(self) -> int:
        """INT4 codes and bf16 group scales of one expert."""
        return self.expert_elements // 2 + 2 * self.expert_elements // GROUP


SHAPES = (
    Shape(name="deepseek-v2-lite", hidden=2048, inner=1408, num_experts=64, top_k=6),
    Shape(name="qwen1.5-moe", hidden=2048, inner=1408, num_experts=60, top_k=4),
    Shape(name="phi-3.5-moe", hidden=4096, inner=6400, num_experts=16, top_k=2),
)


def random_draft_layer(shape: Shape) -> dict[str, jax.Array]:
    """Random codes and scales in the draft format, outputs about as large as inputs."""
    keys = jax.random.split(jax.random.key(SEED), 4)
    experts, hidden, inner = shape.num_experts, shape.hidden, shape.inner

    def codes(key: jax.Array, *dims: int) -> jax.Array:
        bits = jax.random.bits(key, dims, jnp.uint32)
        return jax.lax.bitcast_convert_type(bits, jnp.int32)

    def scales(key: jax.Array, fan_in: int, *dims: int) -> jax.Array:
        uniform = jax.random.uniform(key, dims, minval=1.0, maxval=3.0)
        return (uniform / fan_in**0.5).astype(jnp.bfloat16)

    tables = jnp.array([0.015, 0.075, 0.19, 0.34, 0.48, 0.63, 0.77, 0.93], jnp.float32)
    return {
        "gate_up_codes": codes(keys[0], experts, 2 * inner, hidden // 8),
        "gate_up_scales": scales(keys[1], hidden, experts, 2 * inner, hidden // GROUP),
        "down_codes": codes(keys[2], experts, hidden, inner // 8),
        "down_scales": scales(keys[3], inner, experts, hidden, inner // GROUP),
        "tables": jnp.broadcast_to(tables, (experts, 3, 8)),
    }


def random_slots(shape: Shape, num_slots: int) -> jax.Array:
    """bf16 [num_slots, 3 * inner * hidden], filled slot by slot to bound the memory needed."""

    def one(key: jax.Array) -> jax.Array:
        values = jax.random.normal(key, (shape.expert_elements,), jnp.bfloat16)
        return values * jnp.bfloat16(shape.hidden**-0.5)

    return jax.lax.map(one, jax.random.split(jax.random.key(SEED), num_slots))


def _bits(values: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(values, jnp.uint16).astype(jnp.int32)


def _packed(values: jax.Array, bits: int) -> jax.Array:
    """int32 values of `bits` bits, several to an int32 word, along the last axis."""
    groups = values.reshape(*values.shape[:-1], -1, 32 // bits)
    return (groups << (bits * jnp.arange(32 // bits))).sum(-1, dtype=jnp.int32)


def nested_matrix(weights: jax.Array) -> tuple[jax.Array, ...]:
    """Nested form of normal bf16 `[out, in]`, none of whose groups is all zero.

    Returns codes int32 [out, in / 8], scales bf16 [out, in / GROUP], remainders int32 [out, in]
    and escapes bool [out, in].
    """
    magnitudes = _bits(weights) & 0x7FFF
    groups = magnitudes.reshape(weights.shape[0], -1, GROUP)
    largest = groups.max(-1).astype(jnp.uint16)
    scales = jax.lax.bitcast_convert_type(largest, jnp.bfloat16)
    edges = scales.astype(jnp.float32)[..., None] * jnp.asarray(BUCKET_FRACTIONS)
    edges = _bits(edges.astype(jnp.bfloat16))
    buckets = sum((groups >= edges[..., b, None]).astype(jnp.int32) for b in range(1, 8))
    bases = edges.at[..., 0].set(jnp.maximum(edges[..., 1] - REMAINDERS, 0))
    own = sum(jnp.where(buckets == b, bases[..., b, None], 0) for b in range(8))
    remainders = (groups - own).reshape(weights.shape)
    escapes = remainders < 0
    remainders = jnp.where(escapes, 0, remainders)
    codes = buckets.reshape(weights.shape) | (_bits(weights) >> 15) << 3
    return _packed(codes, 4), scales, remainders, escapes


def nested_experts(shape: Shape, plain: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Slots of nested words, expert by expert in `plain`'s order, and the draft's arrays.

    plain: bf16 [num_experts, 3 * inner * hidden]. Made on the device: the host's codec would take
    minutes. The words' capacity is that of the expert with the most escapes.
    """
    hidden, inner = shape.hidden, shape.inner
    split = 2 * inner * hidden

    def matrices(packed):
        gate_up = nested_matrix(packed[:split].reshape(2 * inner, hidden))
        return gate_up, nested_matrix(packed[split:].reshape(hidden, inner))

    def count(packed):
        return sum(part[3].sum(dtype=jnp.int32) for part in matrices(packed))

    most = int(jax.jit(lambda all_: jax.lax.map(count, all_))(plain).max())
    layout = NestedLayout(hidden, inner, -(-most // 128) * 128)

    def words_of(packed):
        gate_up, down = matrices(packed)
        rows = jnp.concatenate([part[3].sum(1, dtype=jnp.int32) for part in (gate_up, down)])
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(rows, dtype=jnp.int32)])
        starts = jnp.pad(starts, (0, layout.escapes - layout.row_starts - starts.size))
        escapes = jnp.concatenate([part[3].reshape(-1) for part in (gate_up, down)])
        places = jnp.nonzero(escapes, size=layout.capacity, fill_value=packed.size)[0]
        positions = jnp.where(places < split, places % hidden, (places - split) % inner)
        positions = jnp.where(places < packed.size, positions, 0).astype(jnp.int32)
        values = _bits(packed).at[places].get(mode="fill", fill_value=0)
        remainders = [_packed(part[2], 8).reshape(-1) for part in (gate_up, down)]
        parts = [*remainders, starts, values << 16 | positions]
        return jnp.concatenate(parts), gate_up[:2], down[:2]

    words, gate_up, down = jax.jit(lambda all_: jax.lax.map(words_of, all_))(plain)
    return words, {
        "gate_up_codes": gate_up[0],
        "gate_up_scales": gate_up[1],
        "down_codes": down[0],
        "down_scales": down[1],
    }


def nested_bytes(shape: Shape, words: jax.Array) -> int:
    """What the nested kernel reads of an expert: its words, and the draft's codes and scales."""
    return 4 * words.shape[1] + shape.packed_expert_bytes


def random_choices(shape: Shape, num_rows: int, seed: int = SEED) -> tuple[jax.Array, jax.Array]:
    """Distinct experts int32 [rows, k] and weights float32 [rows, k]."""
    keys = jax.random.split(jax.random.key(seed), num_rows)
    experts = jax.vmap(lambda key: jax.random.permutation(key, shape.num_experts))(keys)
    weights = jax.random.uniform(jax.random.key(seed + 1), (num_rows, shape.top_k))
    return experts[:, : shape.top_k].astype(jnp.int32), weights


def seconds_per_call(run: Callable[[], object], calls: int, repeats: int = 3) -> float:
    """Median over `repeats` of the mean time of `calls` back-to-back asynchronous calls."""
    jax.block_until_ready(run())
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def copy_bandwidth() -> dict[str, float]:
    """Bytes per second of a 2 GiB device copy (read + write) and of reading 2 GiB."""
    source = jax.random.bits(jax.random.key(SEED), (1 << 29,), jnp.uint32)
    copy = jax.jit(lambda x: x ^ jnp.uint32(1))
    read = jax.jit(lambda x: jnp.max(x.reshape(1 << 15, -1), axis=1))
    return {
        "copy": 2 * source.nbytes / seconds_per_call(lambda: copy(source), 10),
        "read": source.nbytes / seconds_per_call(lambda: read(source), 10),
    }
