"""A source converted while it is loaded equals the same source converted to disk."""

import jax
import numpy as np
from convert_cases import EMBEDDED_MODEL

from convert import InMemoryCheckpoint, SafetensorsSource, convert_checkpoint
from specter_jax.checkpoint import open_checkpoint


def test_in_memory_checkpoint_equals_the_converted_directory(tmp_path):
    convert_checkpoint(EMBEDDED_MODEL, tmp_path / "converted")
    on_disk = open_checkpoint(tmp_path / "converted")
    in_memory = InMemoryCheckpoint(
        SafetensorsSource(EMBEDDED_MODEL), tokenizer_path=EMBEDDED_MODEL, num_threads=2
    )
    assert in_memory.config == on_disk.config
    assert in_memory.group_sizes == on_disk.group_sizes
    assert_equal_trees(in_memory.load_shared("float32"), on_disk.load_shared("float32"))
    experts, files = in_memory.open_experts(), on_disk.open_experts()
    assert experts.expert_bytes == files.expert_bytes
    for layer in range(on_disk.config.num_moe_layers):
        assert_equal_trees(in_memory.load_draft_layer(layer), on_disk.load_draft_layer(layer))
        for expert in range(on_disk.config.num_experts):
            np.testing.assert_array_equal(
                experts.get(layer, expert).view(np.uint16), files.get(layer, expert).view(np.uint16)
            )


def assert_equal_trees(one, other):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, other
    )
