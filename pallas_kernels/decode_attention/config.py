"""Block shapes of the attention kernels, how a sequence is split, and what is supported."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp

from pallas_kernels.early_launch import supports_early_launch
from pallas_kernels.tuning import tuned_fields

TUNED_FOLDER = Path(__file__).parent
MOST_TOKENS = 32
"""New tokens per sequence up to which the kernels are used; beyond, reading the cache once for all
tokens matters more than latency, and XLA's large products do that."""
TIERS = ((1, 16), (2, 24), (4, 48), (16, 1 << 20))
"""(size in units of `split`, number) of the splits from the first entry on. Short sequences are cut
finely, so that many programs share them; later splits are larger, so that long sequences leave few
partial results. Places are fixed, whatever the length."""
LEAST_DIM = 16  # the matrix unit's step
MOST_RANK = 512  # a block of latents must fit in shared memory
MOST_FLOAT32_DIM = 128  # float32 products are unrolled over the whole dimension


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeAttentionConfig:
    """How the work is cut.

    A token's bits must not depend on what is computed with it. `split` (entries that one program
    reads, see `TIERS`) and `block` (entries of one step of the online softmax) decide the order of
    sums, so they are constants of a shape; `rows` (tokens times query heads of a key head, in one
    program) and `product_rows` (tokens in one program of the projections) are columns of products
    whose bits do not depend on the number of columns, so they may depend on the number of tokens.
    product_out, value_out: tile of the rank in the mapping of queries, of values in the last one.
    """

    split: int = 64
    block: int = 64
    rows: int = 16
    product_rows: int = 16
    product_out: int = 64
    value_out: int = 64
    num_warps: int = 4
    num_stages: int = 2
    combine_splits: int = 16
    combine_warps: int = 4
    early_launch: bool = False
    """Let the next kernel be launched while this one runs (compute capability 9 on)."""
    most_fused_rows: int = 1
    """Tokens of all sequences up to which combining splits and mapping to values is one kernel."""
    most_partial_bytes: int = 64 * 2**20
    """Partial results in memory at a time; more sequences are done in several launches."""

    def num_splits(self, capacity: int) -> int:
        """Splits of a cache of `capacity` entries."""
        return int(self.split_of(capacity - 1)) + 1

    def split_of(self, position: int) -> int:
        """The split that holds an entry; also for traced positions."""
        start, index = 0, 0
        for factor, number in TIERS:
            size = factor * self.split
            index += _clip(position - start, number * size) // size
            start += number * size
        return index

    def split_start(self, index: int) -> int:
        """The first entry of a split; also for traced indices."""
        first, start = 0, 0
        for factor, number in TIERS:
            start += _clip(index - first, number) * factor * self.split
            first += number
        return start


def _clip(value: int, most: int) -> int:
    if isinstance(value, int):
        return max(0, min(value, most))
    return jnp.clip(value, 0, most)


def _power_of_two(value: int) -> bool:
    return value >= LEAST_DIM and value & (value - 1) == 0


def unsupported_reason(num_tokens: int, dtype_name: str, **dims: int) -> str | None:
    """Why the kernels cannot run these sizes, or None.

    dims: every dimension that becomes an axis of a tile, by name. dtype_name: type of the products.
    """
    if num_tokens > MOST_TOKENS:
        return f"at most {MOST_TOKENS} new tokens, got {num_tokens}"
    if dtype_name not in ("bfloat16", "float16", "float32"):
        return f"products must be bfloat16, float16 or float32, got {dtype_name}"
    most = MOST_FLOAT32_DIM if dtype_name == "float32" else MOST_RANK
    for name, value in dims.items():
        if not _power_of_two(value) or value > most:
            return f"{name} must be a power of two from {LEAST_DIM} to {most}, got {value}"
    return None


def config_for(
    *,
    key_dim: int,
    value_dim: int,
    group: int,
    num_tokens: int,
    batch: int,
    dtype_name: str,
    device_kind: str,
) -> DecodeAttentionConfig:
    """Tuned config of a shape on a device, or one that is sure to fit it.

    key_dim: of a cached key, rotated part included. group: query heads that share it.
    """
    exact = dtype_name == "float32"
    fields = {
        "num_stages": 1 if exact else 2 if key_dim > 256 else 3,
        "early_launch": supports_early_launch(device_kind),
    }
    if exact:
        fields |= {"block": 16}
    fields |= tuned_fields(
        TUNED_FOLDER, device_kind, key_dim=key_dim, value_dim=value_dim, exact=int(exact)
    )
    rows = num_tokens * group
    widest = 16 if exact else 32 if value_dim > 256 else 64
    fields["rows"] = next((size for size in (16, 32) if rows <= size), 64)
    fields["rows"] = min(fields["rows"], widest)
    product_rows = next((size for size in (16, 32) if batch * num_tokens <= size), 64)
    fields["product_rows"] = 16 if exact else product_rows
    return DecodeAttentionConfig(**fields)
