"""Experts from nested words: the same bits as from plain weights."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.constants import NOT_RESIDENT
from pallas_kernels.expert_ffn import reference as plain_reference
from pallas_kernels.int4.layout import encode as encode_draft
from pallas_kernels.nested import NestedLayout, encode, with_capacity
from pallas_kernels.nested_ffn import api, nested_ffn
from pallas_kernels.nested_ffn import reference as nested_reference
from tests import kernel_cases as cases

SIZES = cases.Sizes(hidden=64, inner=48, group=16)


def nested_case(num_rows: int, missing: tuple[int, ...] = (), seed: int = 0) -> tuple:
    """Inputs up to plain bf16 slots and slot_row, the same slots nested, and the layer's draft."""
    rng = np.random.default_rng(seed)
    slots, slot_row = cases.slots_and_rows(rng, SIZES, missing)
    # Of unused slots no draft exists; what they hold must not matter.
    slots = (slots * rng.standard_normal(slots.shape)).astype(ml_dtypes.bfloat16)
    split = 2 * SIZES.inner * SIZES.hidden
    draft: dict[str, list] = {"gate_up": [], "down": []}
    encoded = {}
    for expert in range(SIZES.num_experts):
        packed = slots[slot_row[expert]]
        gate_up = encode_draft(packed[:split].reshape(-1, SIZES.hidden), SIZES.group)
        down = encode_draft(packed[split:].reshape(-1, SIZES.inner), SIZES.group)
        draft["gate_up"].append(gate_up)
        draft["down"].append(down)
        encoded[slot_row[expert]] = encode(packed, gate_up[1], down[1])
    layouts = [
        NestedLayout.from_words(SIZES.hidden, SIZES.inner, len(words)) for words in encoded.values()
    ]
    capacity = max(layout.capacity for layout in layouts)
    nested = np.full(
        (len(slots), NestedLayout(SIZES.hidden, SIZES.inner, capacity).num_words), -7, np.int32
    )
    for slot, words in encoded.items():
        nested[slot] = with_capacity(words, SIZES.hidden, SIZES.inner, capacity)
    arrays = {
        f"{name}_{part}": jnp.asarray(np.stack([matrix[i] for matrix in matrices]))
        for name, matrices in draft.items()
        for i, part in enumerate(("codes", "scales"))
    }
    experts, weights = cases.choices(rng, SIZES, num_rows)
    x = rng.standard_normal((num_rows, SIZES.hidden), np.float32)
    return (
        *cases.device(x, experts, weights),
        *cases.device(slots, nested, slot_row),
        arrays,
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 9, 33])
def test_same_bits_as_plain(num_rows, dtype):
    x, experts, weights, slots, nested, slot_row, draft = nested_case(num_rows)
    experts = experts.at[0, 0].set(SIZES.num_experts)
    start = jnp.ones_like(x)
    plain = jax.jit(functools.partial(plain_reference.expert_ffn, compute_dtype=dtype))
    value = jax.jit(functools.partial(nested_ffn, compute_dtype=dtype, implementation="reference"))
    np.testing.assert_array_equal(
        value(x, experts, weights, nested, slot_row, draft, start),
        plain(x, experts, weights, slots, slot_row, start),
    )


def test_matches_float64():
    x, experts, weights, slots, nested, slot_row, draft = nested_case(5, seed=1)
    slot_row = slot_row.at[2].set(NOT_RESIDENT)
    value = nested_reference.nested_ffn(x, experts, weights, nested, slot_row, draft)
    expected = cases.ffn_float64(x, experts, weights, slots, np.asarray(slot_row))
    assert cases.error(value, expected) < 1e-5


def test_kernels_run_on_a_gpu_and_not_on_request(monkeypatch):
    x, experts, weights, _, nested, slot_row, draft = nested_case(2)
    calls = []
    monkeypatch.setattr("pallas_kernels.tuning.is_cuda_gpu", lambda: True)
    for module, label in ((api.pallas_triton, "pallas"), (api.reference, "reference")):
        monkeypatch.setattr(module, "nested_ffn", lambda *_, label=label, **__: calls.append(label))
    for implementation in (None, "pallas", "reference"):
        nested_ffn(x, experts, weights, nested, slot_row, draft, implementation=implementation)
    assert calls == ["pallas", "pallas", "reference"]


def test_reference_is_chosen_without_a_gpu_and_others_are_refused():
    if jax.default_backend() == "gpu":
        pytest.skip("a GPU is there")
    x, experts, weights, _, nested, slot_row, draft = nested_case(2)
    arguments = (x, experts, weights, nested, slot_row, draft)
    np.testing.assert_array_equal(nested_ffn(*arguments), nested_reference.nested_ffn(*arguments))
    with pytest.raises(NotImplementedError, match="nested_ffn by Pallas"):
        nested_ffn(*arguments, implementation="pallas")
    with pytest.raises(ValueError, match="got 'cuda'"):
        nested_ffn(*arguments, implementation="cuda")
