"""A source converted while it is loaded equals the same source converted to disk."""

import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from convert import InMemoryCheckpoint, SafetensorsSource, convert_checkpoint
from specter_jax.checkpoint import open_checkpoint
from specter_jax.errors import ConversionError, InvalidRequestError
from tests.convert_cases import EMBEDDED_MODEL


@pytest.mark.parametrize("expert_format", ["nested", "plain"])
def test_in_memory_checkpoint_equals_the_converted_directory(tmp_path, expert_format):
    convert_checkpoint(EMBEDDED_MODEL, tmp_path / "converted", expert_format=expert_format)
    check_equal(tmp_path / "converted", processes=False)


def test_nested_experts_are_let_go_layer_by_layer():
    told = []
    checkpoint = InMemoryCheckpoint(
        SafetensorsSource(EMBEDDED_MODEL),
        tokenizer_path=EMBEDDED_MODEL,
        num_workers=2,
        progress=lambda *step: told.append(step),
    )
    experts = checkpoint.open_experts()
    assert told[-1] == ("encoding experts", 160, 160)
    assert len(checkpoint._layers) == 5
    for layer in range(5):
        experts.get(layer, 0)
        assert sorted(checkpoint._layers) == list(range(layer, 5))
    checkpoint.close()


def test_experts_that_are_all_escapes_find_room(monkeypatch):
    checkpoint = InMemoryCheckpoint(
        SafetensorsSource(EMBEDDED_MODEL), tokenizer_path=EMBEDDED_MODEL, expert_format="nested"
    )
    expected = checkpoint.open_experts().get(0, 3).copy()
    small = InMemoryCheckpoint(
        SafetensorsSource(EMBEDDED_MODEL), tokenizer_path=EMBEDDED_MODEL, expert_format="nested"
    )
    for memory in small._memory:
        monkeypatch.setattr(memory, "_expert_bytes", 64)
    np.testing.assert_array_equal(small.open_experts().get(0, 3), expected)
    checkpoint.close()
    small.close()


@pytest.mark.parametrize("expert_format", ["nested", "plain"])
def test_a_loaded_model_keeps_its_weights(tmp_path, expert_format):
    """What was loaded must not change when the memory it came from is given back."""
    import specter_jax as sj

    convert_checkpoint(EMBEDDED_MODEL, tmp_path / "converted", expert_format=expert_format)
    expected = sj.load(tmp_path / "converted", dtype="float32", expert_slots=20)
    checkpoint = InMemoryCheckpoint(
        SafetensorsSource(EMBEDDED_MODEL),
        tokenizer_path=EMBEDDED_MODEL,
        expert_format=expert_format,
        num_workers=2,
    )
    model = sj.load(checkpoint, dtype="float32", expert_slots=20)
    checkpoint.close()
    assert_equal_trees(model.params, expected.params)
    assert_equal_trees(model.pool.store.experts, expected.pool.store.experts)


def test_an_expert_stays_valid_after_later_layers_were_read():
    checkpoint = InMemoryCheckpoint(
        SafetensorsSource(EMBEDDED_MODEL), tokenizer_path=EMBEDDED_MODEL, expert_format="plain"
    )
    experts = checkpoint.open_experts()
    first = experts.get(0, 3)
    before = first.copy()
    for layer in range(1, 5):
        experts.get(layer, 0)
    np.testing.assert_array_equal(first.view(np.uint16), before.view(np.uint16))
    checkpoint.close()


def test_bad_indices_and_a_closed_checkpoint_are_refused():
    source = SafetensorsSource(EMBEDDED_MODEL)
    checkpoint = InMemoryCheckpoint(source, tokenizer_path=EMBEDDED_MODEL)
    experts = checkpoint.open_experts()
    for key in ((-1, 0), (0, -1), (5, 0), (0, 32)):
        with pytest.raises(InvalidRequestError, match="out of range"):
            experts.get(*key)
    checkpoint.close()
    with pytest.raises(InvalidRequestError, match="closed"):
        experts.get(0, 0)
    with pytest.raises(InvalidRequestError, match="closed"):
        checkpoint.load_shared("float32")


@pytest.mark.parametrize(
    "bad",
    [
        {"num_workers": 0},
        {"num_workers": "x"},
        {"tokenizer_path": None},
        {"group_size": "64"},
        {"group_size": 64.0},
        {"group_size": [64.0, 32]},
        {"group_size": True},
        {"expert_format": ["plain"]},
        {"progress": 5},
    ],
    ids=str,
)
def test_bad_arguments_are_refused(bad):
    source = SafetensorsSource(EMBEDDED_MODEL)
    with pytest.raises(InvalidRequestError):
        InMemoryCheckpoint(source, **{"tokenizer_path": EMBEDDED_MODEL, **bad})


def test_a_source_that_fails_stops_the_other_experts():
    class Failing(SafetensorsSource):
        reads = 0

        def read(self, name):
            if "experts" in name:
                Failing.reads += 1
                if Failing.reads > 3:
                    time.sleep(0.05)  # time for the others to be called off
                    raise ConversionError("the source failed")
            return super().read(name)

        read_slice = read

    checkpoint = InMemoryCheckpoint(Failing(EMBEDDED_MODEL), tokenizer_path=EMBEDDED_MODEL)
    with pytest.raises(ConversionError, match="the source failed"):
        checkpoint.open_experts()
    with pytest.raises(InvalidRequestError, match="closed"):
        checkpoint.open_experts().get(0, 0)
    assert Failing.reads < 100


def test_worker_processes_give_the_same(tmp_path):
    convert_checkpoint(EMBEDDED_MODEL, tmp_path / "converted")
    # In a process of its own: forking one in which JAX already runs threads may hang.
    run = [sys.executable, __file__, str(tmp_path / "converted")]
    root = Path(__file__).parent.parent
    subprocess.run(run, check=True, timeout=120, env=os.environ | {"PYTHONPATH": str(root)})


def check_equal(converted, *, processes):
    source = SafetensorsSource(EMBEDDED_MODEL)
    on_disk = open_checkpoint(converted)
    in_memory = InMemoryCheckpoint(
        source,
        tokenizer_path=EMBEDDED_MODEL,
        num_workers=2,
        processes=processes,
        expert_format=on_disk.manifest.expert_format,
    )
    experts, files = in_memory.open_experts(), on_disk.open_experts()
    assert experts.expert_bytes == files.expert_bytes == on_disk.expert_bytes
    assert experts.dtype == files.dtype
    for layer in range(on_disk.config.num_moe_layers):
        for expert in range(on_disk.config.num_experts):
            np.testing.assert_array_equal(
                experts.get(layer, expert).view(np.uint16), files.get(layer, expert).view(np.uint16)
            )
        assert_equal_trees(in_memory.load_draft_layer(layer), on_disk.load_draft_layer(layer))
    assert in_memory.config == on_disk.config
    assert in_memory.group_sizes == on_disk.group_sizes
    assert_equal_trees(in_memory.load_shared("float32"), on_disk.load_shared("float32"))
    in_memory.close()


def assert_equal_trees(one, other):
    """Same structure, same values."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


if __name__ == "__main__":
    check_equal(sys.argv[1], processes=True)
