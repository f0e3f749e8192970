"""Runs the draft kernels a few times on one shape, for a profiler such as ncu.

    ncu --clock-control none -k regex:draft -s 4 -c 2 --section SpeedOfLight \\
        python scripts/bench/profile_draft.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.draft_experts.api import draft_experts
from pallas_kernels.draft_experts.arithmetic import pack_tables
from scripts.bench import kernel_cases as cases

if __name__ == "__main__":
    shape = cases.SHAPES[0]
    layer = cases.random_draft_layer(shape)
    layer |= pack_tables(layer["tables"])
    run = jax.jit(draft_experts)
    x = jax.random.normal(jax.random.key(1), (1, shape.hidden), jnp.float32)
    for seed in range(4):
        experts, weights = cases.random_choices(shape, 1, seed)
        jax.block_until_ready(run(x, experts, weights, layer))
