"""The nested kernels on a real GPU at real sizes; run by scripts/test_gpu.sh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import int4, tuning
from pallas_kernels.constants import NOT_RESIDENT
from pallas_kernels.expert_ffn.api import expert_ffn
from pallas_kernels.nested import NestedLayout, encode, with_capacity
from pallas_kernels.nested_ffn import pallas_triton
from pallas_kernels.nested_ffn.api import nested_ffn
from pallas_kernels.nested_ffn.config import DEFAULT_VARIANT, VARIANTS, config_for

pytestmark = pytest.mark.gpu

MOST_ROWS = 544
ROUNDING = 5e-3  # the same weights; sums differ by escapes beside them, hidden values rarely apart
GROUP = 128


@dataclasses.dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    num_experts: int
    top_k: int


SHAPES = {
    "deepseek-v2-lite": Shape(2048, 1408, 8, 6),
    "phi-3.5-moe": Shape(4096, 6400, 3, 2),
    "small": Shape(128, 256, 8, 2),
}


@pytest.fixture(params=SHAPES, scope="module")
def shape(request):
    if not tuning.is_cuda_gpu():
        pytest.skip("needs an NVIDIA GPU")
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def weights(shape):
    """bf16 slots, nested slots, slot_row with one expert missing, and the draft."""
    rng = np.random.default_rng(0)
    split = 2 * shape.inner * shape.hidden
    plain, words, drafts = [], [], []
    for _ in range(shape.num_experts):
        packed = rng.standard_normal(3 * shape.inner * shape.hidden, np.float32)
        packed = (packed * np.float32(shape.hidden**-0.5)).astype(ml_dtypes.bfloat16)
        gate_up = int4.encode(packed[:split].reshape(-1, shape.hidden), GROUP)
        down = int4.encode(packed[split:].reshape(-1, shape.inner), GROUP)
        plain.append(packed)
        drafts.append((*gate_up[:2], *down[:2]))
        words.append(encode(packed, gate_up[1], down[1]))
    sizes = (shape.hidden, shape.inner)
    capacity = max(NestedLayout.from_words(*sizes, len(one)).capacity for one in words)
    words = np.stack([with_capacity(one, *sizes, capacity) for one in words])
    names = ("gate_up_codes", "gate_up_scales", "down_codes", "down_scales")
    columns = zip(*drafts, strict=True)
    draft = {n: jnp.asarray(np.stack(part)) for n, part in zip(names, columns, strict=True)}
    order = rng.permutation(shape.num_experts).astype(np.int32)
    slot_row = np.argsort(order).astype(np.int32)
    slot_row[1] = NOT_RESIDENT
    slots = (jnp.asarray(np.stack(plain)[order]), jnp.asarray(words[order]))
    return *slots, jnp.asarray(slot_row), draft


def inputs(shape, num_rows):
    keys = jax.random.split(jax.random.key(num_rows), num_rows)
    order = jax.vmap(lambda key: jax.random.permutation(key, shape.num_experts))(keys)
    x = jax.random.normal(keys[0], (num_rows, shape.hidden), jnp.bfloat16)
    weights = jax.random.uniform(keys[0], (num_rows, shape.top_k))
    return x, order[:, : shape.top_k].astype(jnp.int32), weights


def error(value, expected):
    return float(jnp.linalg.norm(value - expected) / jnp.linalg.norm(expected))


@pytest.mark.parametrize("num_rows", [1, 9, 17, MOST_ROWS])
def test_matches_the_plain_kernels_and_rows_keep_their_bits(shape, weights, num_rows):
    slots, words, slot_row, draft = weights
    x, experts, share = inputs(shape, MOST_ROWS)
    experts = experts.at[5].set(shape.num_experts)
    common = dict(compute_dtype=jnp.bfloat16, implementation="pallas")
    nested = jax.jit(functools.partial(nested_ffn, **common))
    plain = jax.jit(functools.partial(expert_ffn, **common))
    some = [array[:num_rows] for array in (x, experts, share)]
    value = nested(*some, words, slot_row, draft)
    assert error(value, plain(*some, slots, slot_row)) < ROUNDING
    np.testing.assert_array_equal(nested(*some, words, slot_row, draft), value)
    everything = nested(x, experts, share, words, slot_row, draft)
    np.testing.assert_array_equal(value, everything[:num_rows])
    assert not everything[5].any()


def of_variant(shape, variant, num_rows):
    """The kernels of a variant in the blocks that it takes for so many rows."""
    counts = dict(num_choices=num_rows * shape.top_k, num_experts=shape.num_experts)
    sizes = (shape.hidden, shape.inner, "bfloat16", tuning.device_kind())
    config = config_for(*sizes, **counts, variant=variant)
    return jax.jit(
        functools.partial(pallas_triton.nested_ffn, compute_dtype=jnp.bfloat16, config=config)
    )


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != DEFAULT_VARIANT])
def test_variants_match_the_plain_kernels_and_rows_keep_their_bits(shape, weights, variant):
    slots, words, slot_row, draft = weights
    x, experts, share = inputs(shape, 60)
    plain = expert_ffn(
        x, experts, share, slots, slot_row, compute_dtype=jnp.bfloat16, implementation="pallas"
    )
    everything = of_variant(shape, variant, 60)(x, experts, share, words, slot_row, draft)
    assert error(everything, plain) < ROUNDING
    for rows in (1, 9):
        some = [array[:rows] for array in (x, experts, share)]
        value = of_variant(shape, variant, rows)(*some, words, slot_row, draft)
        np.testing.assert_array_equal(value, everything[:rows])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("block_rows", [32, 64])
def test_row_blocks_do_not_change_bits(shape, weights, block_rows, variant):
    if block_rows > VARIANTS[variant].most_rows:
        pytest.skip("not a block of this variant")
    _, words, slot_row, draft = weights
    x, experts, share = inputs(shape, 40)
    sizes = (shape.hidden, shape.inner, "bfloat16", "none")
    config = config_for(*sizes, num_choices=1, num_experts=1, variant=variant)
    narrow, wide = (
        jax.jit(functools.partial(pallas_triton.nested_ffn, compute_dtype=jnp.bfloat16, config=one))
        for one in (config, dataclasses.replace(config, block_rows=block_rows))
    )
    expected = narrow(x, experts, share, words, slot_row, draft)
    np.testing.assert_array_equal(wide(x, experts, share, words, slot_row, draft), expected)


def test_float32_on_a_small_shape(shape, weights):
    if shape.hidden > 128:
        pytest.skip("float32 is for small models")
    slots, words, slot_row, draft = weights
    rows = inputs(shape, 20)
    value = jax.jit(functools.partial(nested_ffn, implementation="pallas"))(
        *rows, words, slot_row, draft
    )
    expected = jax.jit(functools.partial(expert_ffn, implementation="reference"))(
        *rows, slots.astype(jnp.float32), slot_row
    )
    assert error(value, expected) < 1e-5
