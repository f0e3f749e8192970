"""Times block shapes of the kernels on this GPU and prints the best of each shape.

PYTHONPATH=. python scripts/bench/tune_kernels.py --out results.json [--ops draft,ffn,nested]
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels.draft_experts import config as draft_config
from pallas_kernels.draft_experts.arithmetic import pack_tables
from pallas_kernels.draft_experts.config import DraftExpertsConfig
from pallas_kernels.draft_experts.pallas_triton import draft_experts
from pallas_kernels.expert_ffn import config as ffn_config
from pallas_kernels.expert_ffn.config import ExpertFFNConfig
from pallas_kernels.expert_ffn.pallas_triton import expert_ffn
from pallas_kernels.nested_ffn import config as nested_config
from pallas_kernels.nested_ffn.config import NestedFFNConfig
from pallas_kernels.nested_ffn.pallas_triton import nested_ffn
from pallas_kernels.tuning import device_file_name
from scripts.bench import kernel_cases as cases

FFN_ROWS = 9


def draft_variants(shape: cases.Shape) -> list[DraftExpertsConfig]:
    """Both kernels vary together: their times are read separately from the profile."""
    if shape.hidden <= 2048:
        tall = dict(down_rows=16, down_warps=16)
        gate_up = [
            dict(),
            dict(gate_up_chunk_words=64),
            dict(),
            dict(),
        ]
        down = [tall, tall, {**tall, "down_chunks": 32}, dict()]
    else:
        wide = dict(down_chunk_words=32, down_ahead=1, down_chunks=16, down_warps=4)
        big = dict(gate_up_words=256, gate_up_warps=8)
        gate_up = [
            dict(gate_up_chunk_words=64, **big),
            big,
            dict(gate_up_chunk_words=64, **big),
        ]
        down = [wide, wide, {**wide, "down_chunks": 8, "down_ahead": 2}]
    common = dict(early_launch=True)
    pairs = zip(gate_up, down, strict=True)
    return [DraftExpertsConfig(**g, **d, **common) for g, d in pairs]


def ffn_variants() -> list[ExpertFFNConfig]:
    return [
        ExpertFFNConfig(block_out=64, block_in=64, num_stages=6),
        ExpertFFNConfig(block_out=64, block_in=128, num_stages=3),
    ]


def nested_variants() -> list[NestedFFNConfig]:
    return [NestedFFNConfig(block_rows=8, num_stages=stages) for stages in (2, 3, 4)]


def write_table(folder: Path, device: str, timed: dict) -> None:
    """Writes the config with the least total time of each pair of sizes (see `tuning.py`).

    timed: (hidden, inner) -> config -> times in us of the shapes that have these sizes.
    """
    entries = []
    for (hidden, inner), configs in timed.items():
        most = max(len(times) for times in configs.values())
        best = min((c for c in configs if len(configs[c]) == most), key=lambda c: sum(configs[c]))
        fields = dataclasses.asdict(best)
        fields.pop("block_rows", None)  # depends on the number of rows, not on the device
        entries.append({"match": {"hidden": hidden, "inner": inner}, "config": fields})
    file = folder / device_file_name(device)
    file.write_text(json.dumps(entries, indent=1) + "\n")


def kernel_times(run) -> dict[str, float]:
    """Median device time in us of each kernel name in one profiled call."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        [file] = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
    times: dict[str, list[float]] = {}
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                times.setdefault(event.name, []).append(event.duration_ns / 1e3)
    return {name: sorted(all_)[len(all_) // 2] for name, all_ in times.items()}


def time_draft(shape: cases.Shape, layer, config: DraftExpertsConfig) -> dict:
    """One layer's time, over calls that use each expert once and feed each other."""
    num_calls = 2 * (shape.num_experts // shape.top_k)
    order = jnp.arange(num_calls * shape.top_k, dtype=jnp.int32) % (num_calls // 2 * shape.top_k)
    experts = order.reshape(num_calls, 1, shape.top_k)
    weights = jnp.full((1, shape.top_k), 1 / shape.top_k, jnp.float32)

    @jax.jit
    def chain(x, layer, experts):
        for number in range(num_calls):
            x = draft_experts(x, experts[number], weights, layer, config=config)
        return x

    x = jax.random.normal(jax.random.key(1), (1, shape.hidden), jnp.float32)
    start = time.perf_counter()
    chain.lower(x, layer, experts).compile()
    compile_s = time.perf_counter() - start
    seconds = cases.seconds_per_call(lambda: chain(x, layer, experts), 20) / num_calls
    return {
        "us": seconds * 1e6,
        "compile_s": compile_s,
        "kernels_us": kernel_times(lambda: chain(x, layer, experts)),
        "finite": bool(jnp.isfinite(chain(x, layer, experts)).all()),
    }


def time_ffn(shape: cases.Shape, slots, slot_row, config: ExpertFFNConfig) -> dict:
    experts, weights = cases.random_choices(shape, FFN_ROWS)
    x = jax.random.normal(jax.random.key(1), (FFN_ROWS, shape.hidden), jnp.bfloat16)

    @jax.jit
    def run(x, experts, slots, slot_row):
        return expert_ffn(
            x, experts, weights, slots, slot_row, compute_dtype=jnp.bfloat16, config=config
        )

    seconds = cases.seconds_per_call(lambda: run(x, experts, slots, slot_row), 20)
    return {
        "us": seconds * 1e6,
        "experts": len(set(experts.reshape(-1).tolist())),
        "kernels_us": kernel_times(lambda: run(x, experts, slots, slot_row)),
    }


def time_nested(shape: cases.Shape, words, draft, slot_row, config: NestedFFNConfig) -> dict:
    experts, weights = cases.random_choices(shape, FFN_ROWS)
    x = jax.random.normal(jax.random.key(1), (FFN_ROWS, shape.hidden), jnp.bfloat16)

    @jax.jit
    def run(x, experts, words, slot_row, draft):
        return nested_ffn(
            x, experts, weights, words, slot_row, draft, compute_dtype=jnp.bfloat16, config=config
        )

    call = functools.partial(run, x, experts, words, slot_row, draft)
    return {
        "us": cases.seconds_per_call(call, 20) * 1e6,
        "experts": len(set(experts.reshape(-1).tolist())),
        "kernels_us": kernel_times(call),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ops", default="draft,ffn,nested")
    parser.add_argument("--shapes", default="")
    parser.add_argument("--write", action="store_true", help="replace the tuned tables")
    arguments = parser.parse_args()
    bandwidth = cases.copy_bandwidth()
    device = jax.devices()[0].device_kind
    print(device, {name: f"{value / 1e12:.2f} TB/s" for name, value in bandwidth.items()})
    report = {"device": device, "jax": jax.__version__, "bandwidth": bandwidth, "rows": []}

    timed = collections.defaultdict(lambda: collections.defaultdict(list))

    def add(op: str, shape: cases.Shape, config, num_bytes: int, figures: dict) -> None:
        share = num_bytes / (figures["us"] * 1e-6) / bandwidth["copy"]
        row = {"op": op, "shape": shape.name, "config": repr(config), "bytes": num_bytes}
        report["rows"].append({**row, "share": share, **figures})
        timed[op, shape.hidden, shape.inner][config].append(figures["us"])
        arguments.out.write_text(json.dumps(report, indent=1))
        kernels = {
            name[:16]: round(us, 2) for name, us in figures["kernels_us"].items() if us > 2.5
        }
        print(f"{op} {shape.name:17}{figures['us']:8.2f} us {share:5.1%} {kernels} {config}")

    for shape in cases.SHAPES:
        if arguments.shapes and shape.name not in arguments.shapes.split(","):
            continue
        if "draft" in arguments.ops:
            layer = cases.random_draft_layer(shape)
            layer |= jax.jit(pack_tables)(layer["tables"])
            for config in draft_variants(shape):
                figures = time_draft(shape, layer, config)
                add("draft", shape, config, shape.top_k * shape.packed_expert_bytes, figures)
            del layer
        if "ffn" in arguments.ops.split(","):
            slots = jax.jit(cases.random_slots, static_argnums=(0, 1))(shape, shape.num_experts)
            slot_row = jnp.arange(shape.num_experts, dtype=jnp.int32)
            for config in ffn_variants():
                figures = time_ffn(shape, slots, slot_row, config)
                num_bytes = figures["experts"] * shape.expert_elements * 2
                add("ffn", shape, config, num_bytes, figures)
            del slots
        if "nested" in arguments.ops:
            slots = jax.jit(cases.random_slots, static_argnums=(0, 1))(shape, shape.num_experts)
            words, draft = cases.nested_experts(shape, slots)
            slot_row = jnp.arange(shape.num_experts, dtype=jnp.int32)
            for config in nested_variants():
                figures = time_nested(shape, words, draft, slot_row, config)
                num_bytes = figures["experts"] * cases.nested_bytes(shape, words)
                add("nested", shape, config, num_bytes, figures)
            del slots, words, draft
    if arguments.write:
        for op, module in (
            ("draft", draft_config),
            ("ffn", ffn_config),
            ("nested", nested_config),
        ):
            table = {tuple(key[1:]): configs for key, configs in timed.items() if key[0] == op}
            if table:
                write_table(module.TUNED_FOLDER, device, table)


if __name__ == "__main__":
    main()
