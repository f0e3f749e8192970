"""Reference experts against plain NumPy, and their independence of the other rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.constants import NOT_RESIDENT
from pallas_kernels.draft_experts import draft_experts
from pallas_kernels.expert_ffn import expert_ffn
from pallas_kernels.int4.layout import decode_numpy, encode

HIDDEN, INNER, EXPERTS, TOP_K = 64, 32, 6, 2

run_ffn = jax.jit(expert_ffn, static_argnames="compute_dtype")


def gated(x, gate, up, down):
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    weights = [
        tuple(rng.standard_normal(shape).astype(np.float32) / 8 for shape in
              ((INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)))
        for _ in range(EXPERTS)
    ]  # fmt: skip
    slots = np.stack([np.concatenate([w.ravel() for w in expert]) for expert in weights])
    rows = 20
    x = rng.standard_normal((rows, HIDDEN)).astype(np.float32)
    experts = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(rows)]).astype(np.int32)
    return weights, slots, x, experts, rng.random((rows, TOP_K)).astype(np.float32)


def by_hand(weights, x, experts, factors, absent=()):
    out = np.zeros_like(x)
    for r in range(len(x)):
        for e, factor in zip(experts[r], factors[r], strict=True):
            if e < EXPERTS and e not in absent:
                out[r] += factor * gated(x[r], *weights[e])
    return out


def test_matches_numpy_with_absent_experts_and_masked_rows(case):
    weights, slots, x, experts, factors = case
    experts = experts.copy()
    experts[3] = EXPERTS
    table = np.array([4, 2, NOT_RESIDENT, 0, 1, 3], np.int32)
    placed = np.zeros_like(slots)
    for e, slot in enumerate(table):
        if slot != NOT_RESIDENT:
            placed[slot] = slots[e]
    got = run_ffn(x, experts, factors, placed, table)
    # float32 sums of 64 and 32 products in another order.
    np.testing.assert_allclose(got, by_hand(weights, x, experts, factors, {2}), atol=1e-5)
    assert not np.asarray(got[3]).any()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 17])
def test_a_row_has_the_same_bits_among_any_others(case, rows):
    _, slots, x, experts, factors = case
    table = np.arange(EXPERTS, dtype=np.int32)
    full = run_ffn(x, experts, factors, slots, table)
    for first in (0, 3):
        part = slice(first, first + rows)
        got = run_ffn(x[part], experts[part], factors[part], slots, table)
        np.testing.assert_array_equal(got, full[part])


def test_adds_to_what_was_accumulated(case):
    weights, slots, x, experts, factors = case
    table = np.arange(EXPERTS, dtype=np.int32)
    before = np.full_like(x, 2.0)
    got = run_ffn(x, experts, factors, slots, table, before)
    np.testing.assert_allclose(got - 2, by_hand(weights, x, experts, factors), atol=1e-5)


def test_bfloat16_products_stay_near_float32(case):
    weights, slots, x, experts, factors = case
    table = np.arange(EXPERTS, dtype=np.int32)
    got = run_ffn(x, experts, factors, slots, table, compute_dtype=jnp.bfloat16)
    expected = by_hand(weights, x, experts, factors)
    # bfloat16 keeps 8 bits; errors of a few roundings, relative to the largest output.
    assert np.abs(got - expected).max() < 0.02 * np.abs(expected).max()
    assert got.dtype == jnp.float32


def test_draft_experts_match_numpy_on_decoded_weights(case):
    weights, _, x, experts, factors = case
    encoded = [[encode(w, 32) for w in expert] for expert in weights]
    layer = {
        "gate_up_codes": np.stack([np.concatenate((g[0], u[0])) for g, u, _ in encoded]),
        "gate_up_scales": np.stack([np.concatenate((g[1], u[1])) for g, u, _ in encoded]),
        "down_codes": np.stack([d[0] for _, _, d in encoded]),
        "down_scales": np.stack([d[1] for _, _, d in encoded]),
        "tables": np.stack([np.stack([part[2] for part in parts]) for parts in encoded]),
    }
    decoded = [tuple(decode_numpy(*part) for part in parts) for parts in encoded]
    experts = experts[:4].copy()
    experts[2] = EXPERTS
    got = jax.jit(draft_experts)(x[:4], experts, factors[:4], layer)
    np.testing.assert_allclose(got, by_hand(decoded, x[:4], experts, factors[:4]), atol=1e-5)
