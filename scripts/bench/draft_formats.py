"""One token through a layer's routed experts in the formats that the draft does not use.

    python scripts/bench/draft_formats.py --out results.json

Figure 11's other bars, in the way that `kernel_times.py` times the draft's own: experts at full
precision by the kernel that verification uses, and INT4 experts written out at full precision by
XLA before they are multiplied. Each call's output is the next one's input, on other experts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parents[2]))
from pallas_kernels.expert_ffn import expert_ffn
from scripts.bench import kernel_cases as cases
from specter_jax.report.measure_experts import FULL_PRECISION, INT4, decoded_experts

ROWS = (1, 32)
CALLS = 4
"""Of one program: experts written out take much memory, and each call compiles its own."""


def full_precision(x: jax.Array, experts: jax.Array, weights: jax.Array, slots: Any) -> jax.Array:
    """float32 [rows, hidden] of plain experts; slots: bf16 [experts, 3 * inner * hidden]."""
    table = jnp.arange(slots.shape[0], dtype=jnp.int32)
    out = expert_ffn(
        x.astype(jnp.bfloat16), experts, weights, slots, table, compute_dtype=jnp.bfloat16
    )
    return out.astype(jnp.float32)


def seconds(compute: Callable[..., jax.Array], shape: cases.Shape, rows: int, held: Any) -> float:
    """Of one layer for `rows` tokens; held: what `compute` takes as its last argument."""
    choices = [cases.random_choices(shape, rows, seed)[0] for seed in range(CALLS)]
    weights = jnp.full((rows, shape.top_k), 1 / shape.top_k, jnp.float32)

    @jax.jit
    def chain(x: jax.Array, held: Any) -> jax.Array:
        for experts in choices:
            # Without it the experts of all calls could be written out at once.
            x, experts = jax.lax.optimization_barrier((x, experts))
            x = compute(x, experts, weights, held)
        return x

    x = jax.random.normal(jax.random.key(1), (rows, shape.hidden), jnp.float32)
    return cases.seconds_per_call(lambda: chain(x, held), 10) / CALLS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="small shapes; no figures")
    arguments = parser.parse_args()
    shapes = cases.SHAPES
    if arguments.tiny:
        tiny = cases.Shape(name="tiny", hidden=256, inner=128, num_experts=8, top_k=2)
        shapes = (tiny,)
    report: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    report["rows"] = []
    for shape in shapes:
        slots = jax.jit(cases.random_slots, static_argnums=(0, 1))(shape, shape.num_experts)
        variants = {FULL_PRECISION: (full_precision, slots)}
        variants[INT4] = (decoded_experts, cases.random_draft_layer(shape))
        for rows in ROWS:
            for name, (compute, held) in variants.items():
                row = {"kernel": f"draft, {name}", "shape": shape.name, "num_rows": rows}
                row |= {"format": name, "us": seconds(compute, shape, rows, held) * 1e6}
                report["rows"].append(row)
                arguments.out.write_text(json.dumps(report, indent=1))
                print(f"{name:22} {shape.name:17}{rows:4} rows {row['us']:10.2f} us", flush=True)
        del slots, variants, held


if __name__ == "__main__":
    main()
