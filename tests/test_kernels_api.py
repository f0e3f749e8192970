"""Who computes an op: chosen by the device, or on request."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import draft_experts as draft_package
from pallas_kernels import expert_ffn as ffn_package
from pallas_kernels.draft_experts import api as draft_api
from pallas_kernels.draft_experts import config as draft_config
from pallas_kernels.draft_experts import reference as draft_reference
from pallas_kernels.expert_ffn import api as ffn_api
from pallas_kernels.expert_ffn import config as ffn_config
from pallas_kernels.expert_ffn import reference as ffn_reference
from pallas_kernels.tuning import device_file_name, tuned_fields
from tests import kernel_cases as cases

SIZES = cases.Sizes(hidden=64, inner=32, num_experts=3)


@pytest.fixture(scope="module")
def draft_case():
    rng = np.random.default_rng(0)
    layer = {name: jnp.asarray(v) for name, v in cases.draft_layer(rng, SIZES).items()}
    experts, weights = cases.choices(rng, SIZES, 2)
    return (*cases.device(np.ones((2, 64), np.float32), experts, weights), layer)


@pytest.fixture(scope="module")
def ffn_case():
    rng = np.random.default_rng(0)
    slots, slot_row = cases.slots_and_rows(rng, SIZES)
    experts, weights = cases.choices(rng, SIZES, 2)
    return cases.device(np.ones((2, 64), np.float32), experts, weights, slots, slot_row)


@pytest.fixture
def on_gpu(monkeypatch):
    """Makes the choice, not the computation, believe in a GPU."""
    monkeypatch.setattr("pallas_kernels.tuning.is_cuda_gpu", lambda: True)


def test_packages_export_the_chooser():
    assert draft_package.draft_experts is draft_api.draft_experts
    assert ffn_package.expert_ffn is ffn_api.expert_ffn


def test_reference_runs_without_a_gpu(draft_case, ffn_case):
    if draft_api.tuning.is_cuda_gpu():
        pytest.skip("a GPU is there")
    expected = draft_reference.draft_experts(*draft_case)
    np.testing.assert_array_equal(draft_api.draft_experts(*draft_case), expected)
    expected = ffn_reference.expert_ffn(*ffn_case)
    np.testing.assert_array_equal(ffn_api.expert_ffn(*ffn_case), expected)
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU, the default device is cpu"):
        draft_api.draft_experts(*draft_case, implementation="pallas")
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU, the default device is cpu"):
        ffn_api.expert_ffn(*ffn_case, implementation="pallas")


def test_kernels_run_on_a_gpu_and_not_on_request(draft_case, ffn_case, on_gpu, monkeypatch):
    calls = []
    for api, name in ((draft_api, "draft_experts"), (ffn_api, "expert_ffn")):
        for module, label in ((api.pallas_triton, "pallas"), (api.reference, "reference")):
            monkeypatch.setattr(module, name, lambda *_, label=label, **__: calls.append(label))
    for implementation in (None, "pallas", "reference"):
        draft_api.draft_experts(*draft_case, implementation=implementation)
        ffn_api.expert_ffn(*ffn_case, implementation=implementation)
    assert calls == ["pallas"] * 4 + ["reference"] * 2


def test_unsupported_sizes_are_refused_or_left_to_the_reference(ffn_case, on_gpu):
    x, experts, weights, slots, slot_row = ffn_case
    odd = (x[:, :60], experts, weights, slots[:, : 3 * 60 * 32], slot_row)
    np.testing.assert_array_equal(ffn_api.expert_ffn(*odd), ffn_reference.expert_ffn(*odd))
    with pytest.raises(NotImplementedError, match="hidden size must be a multiple of 16, got 60"):
        ffn_api.expert_ffn(*odd, implementation="pallas")


def test_unknown_implementation_is_named(draft_case, ffn_case):
    with pytest.raises(ValueError, match="got 'cuda'"):
        draft_api.draft_experts(*draft_case, implementation="cuda")
    with pytest.raises(ValueError, match="got 'cuda'"):
        ffn_api.expert_ffn(*ffn_case, implementation="cuda")


def test_tuned_entries_match_by_size(tmp_path):
    assert device_file_name("NVIDIA H200") == "nvidia_h200.json"
    text = '[{"match": {"hidden": 64, "inner": 32}, "config": {"block_rows": 8}}]'
    (tmp_path / "some_gpu.json").write_text(text)
    assert tuned_fields(tmp_path, "Some GPU", hidden=64, inner=32) == {"block_rows": 8}
    assert tuned_fields(tmp_path, "Some GPU", hidden=64, inner=48) == {}
    assert tuned_fields(tmp_path, "Other", hidden=64, inner=32) == {}


@pytest.mark.parametrize(("hidden", "inner"), [(2048, 1408), (4096, 6400)])
def test_shipped_tables_fit_their_shapes(hidden, inner):
    draft = draft_config.config_for(hidden, inner, "NVIDIA H200")
    assert draft.early_launch
    assert inner % draft.gate_up_rows == 0
    assert hidden % draft.down_rows == 0
    assert (hidden // 8) % draft.gate_up_chunk_words == 0
    assert (inner // 8) % draft.down_chunk_words == 0
    counts = dict(num_choices=54, num_experts=64)
    ffn = ffn_config.config_for(hidden, inner, "bfloat16", "NVIDIA H200", **counts)
    assert all(size % ffn.block_out == 0 and size % ffn.block_in == 0 for size in (hidden, inner))
