"""Times one draft step and one verification at true size, everything resident, random weights.

Random weights are enough for time: nothing here depends on what the numbers say. Shapes come from
`stretch_checkpoint.py` and a small checkpoint of the same family. Compilation is timed apart, for
several sets of compiler options if asked; a device profile sums up the kernels by name.

    python scripts/bench/steps.py --data DIR --model deepseek-v2-lite
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from pallas_kernels.draft_experts import prepare_draft_layer
from scripts.bench import device_profile, true_size
from scripts.bench import kernel_cases as cases
from specter_jax.config import ModelConfig, layer_name
from specter_jax.engine.programs import build_programs
from specter_jax.models import init_kv
from specter_jax.models.layer_modules import DenseBlock, MoEBlock
from specter_jax.models.outer import Outer

CONTEXT = 256


def random_shared(config: ModelConfig) -> dict[str, Any]:
    """Shared parameters of the right shapes, bf16, on the device."""
    key = jax.random.key(0)
    tokens, lengths = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1,), jnp.int32)
    hidden = jax.ShapeDtypeStruct((1, 1, config.hidden_size), jnp.float32)
    shapes = {"outer": jax.eval_shape(Outer(config).init, key, tokens)["params"]}
    kv = jax.eval_shape(lambda: init_kv(config, 1, 1))
    for layer in range(config.num_layers):
        block = (MoEBlock if config.is_moe(layer) else DenseBlock)(config, layer)
        made = jax.eval_shape(block.init, key, hidden, kv[layer], lengths, tokens)
        shapes[layer_name(layer)] = made["params"]
    rng = jax.jit(
        lambda key, shape: (jax.random.normal(key, shape) * 0.02).astype(jnp.bfloat16),
        static_argnums=1,
    )
    return jax.tree.map(lambda leaf: rng(key, leaf.shape), shapes)


def shape_of(config: ModelConfig) -> cases.Shape:
    return cases.Shape(
        name="model",
        hidden=config.hidden_size,
        inner=config.expert_intermediate_size,
        num_experts=config.num_experts,
        top_k=config.top_k,
    )


def step_bytes(config: ModelConfig, params: dict[str, Any]) -> int:
    """Bytes a draft step must read: shared parameters but the embedding table, chosen codes."""
    shared = sum(x.nbytes for x in jax.tree.leaves(params["shared"]))
    embedding = config.vocab_size * config.hidden_size * 2
    chosen = config.num_moe_layers * config.top_k * shape_of(config).packed_expert_bytes
    return shared - embedding + chosen


def kernel_table(folder: str, top: int) -> list[tuple[str, int, float]]:
    """(kernel, launches, microseconds in all) from a profile, the longest first."""
    totals: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for event in device_profile.stream_events(folder):
        entry = totals[re.sub(r"_\d+$", "", event["name"])]
        entry[0] += 1
        entry[1] += event["dur"]
    rows = [(name, int(n), us) for name, (n, us) in totals.items()]
    return sorted(rows, key=lambda row: -row[2])[:top]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", choices=true_size.MODELS, default="deepseek-v2-lite")
    parser.add_argument("--tokens", type=int, default=9, help="rows of the verification")
    parser.add_argument("--steps", type=int, default=4, help="draft steps a program runs")
    parser.add_argument("--slots", type=int, help="default: every expert")
    parser.add_argument("--options", default="{}", help="JSON list of sets of compiler options")
    parser.add_argument("--verify-sets", type=int, default=1, help="sets that verification tries")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    beginning = time.perf_counter()

    def say(*words: Any) -> None:
        print(f"[{time.perf_counter() - beginning:6.1f} s]", *words, flush=True)

    config = true_size.model_config(args.data, args.model)
    device = jax.devices()[0]
    shape = shape_of(config)
    params = {"shared": random_shared(config), "draft": {}}
    layer = prepare_draft_layer(cases.random_draft_layer(shape))
    for moe_layer in config.moe_layers:
        params["draft"][layer_name(moe_layer)] = jax.tree.map(jnp.copy, layer)
    programs = build_programs(config, "bfloat16", device)
    kv = jax.jit(lambda: init_kv(config, 1, CONTEXT, jnp.bfloat16))()
    jax.block_until_ready((params, kv))
    say("parameters made", device.device_kind)
    bandwidth = cases.copy_bandwidth()["copy"]
    floor = step_bytes(config, params) / bandwidth * 1e3
    say(
        f"copy {bandwidth / 1e12:.2f} TB/s, step reads {step_bytes(config, params) / 1e9:.2f} GB,"
        f" {floor:.2f} ms"
    )
    lengths, active = np.full(1, 64, np.int32), np.ones(1, bool)
    option_sets = json.loads(args.options)
    option_sets = option_sets if isinstance(option_sets, list) else [option_sets]
    draft = None
    for options in option_sets:
        start = programs.start(np.ones(1, np.int32), lengths)
        chunk = (active, np.int32(0), np.int32(args.steps), None)
        began = time.perf_counter()
        lowered = programs.draft.lower(params, kv, None, start, *chunk)
        lower_s = time.perf_counter() - began
        draft = lowered.compile(compiler_options=options or None)
        compile_s = time.perf_counter() - began - lower_s

        def steps(
            count: int, draft: Any = draft, start: Any = start, chunk: Any = chunk
        ) -> tuple[float, float]:
            """Milliseconds a step, and those of them that the host took to issue it."""
            nonlocal kv
            began, issued = time.perf_counter(), 0.0
            for _ in range(count):
                issuing = time.perf_counter()
                result, kv, _ = draft(params, kv, None, start, *chunk)
                issued += time.perf_counter() - issuing
                start = start.replace(last=result.last)
            jax.block_until_ready((start, kv))
            total = time.perf_counter() - began
            return total / (count * args.steps) * 1e3, issued / count * 1e3

        steps(2)
        times = sorted(steps(8) for _ in range(3))
        say(
            f"draft of {args.steps} steps {options}: lower {lower_s:.1f} s, compile"
            f" {compile_s:.1f} s, {times[0][0]:.3f} to {times[-1][0]:.3f} ms a step,"
            f" {times[0][0] / floor:.2f} x its bytes; issued in {times[0][1]:.2f} ms"
        )
    num_slots = args.slots or config.num_moe_layers * config.num_experts
    slots = cases.random_slots(shape, num_slots)
    table = np.arange(config.num_moe_layers * config.num_experts, dtype=np.int32) % num_slots
    table = table.reshape(config.num_moe_layers, config.num_experts)
    say("slots made", num_slots)
    rows = np.ones((1, args.tokens), np.int32) * np.arange(args.tokens, dtype=np.int32)
    common = (params, kv, slots, table, rows, lengths, np.full(1, args.tokens - 1, np.int32))
    for options in option_sets[: args.verify_sets]:
        began = time.perf_counter()
        lowered = programs.verify.lower(params, kv, *common[2:], active, (), None)
        lower_s = time.perf_counter() - began
        verify = lowered.compile(compiler_options=options or None)
        compile_s = time.perf_counter() - began - lower_s

        def passes(count: int, verify: Any = verify) -> float:
            nonlocal kv
            began = time.perf_counter()
            for _ in range(count):
                out, kv = verify(params, kv, *common[2:], active, (), None)
            jax.block_until_ready((out, kv))
            return (time.perf_counter() - began) / count * 1e3

        passes(2)
        out, kv = verify(params, kv, *common[2:], active, (), None)
        experts = np.asarray(out.experts)
        distinct = sum(len(np.unique(layer)) for layer in experts)
        shared = sum(x.nbytes for x in jax.tree.leaves(params["shared"]))
        read = shared - config.vocab_size * config.hidden_size * 2
        read += distinct * 2 * config.expert_elements
        least = read / bandwidth * 1e3
        times = [passes(5) for _ in range(3)]
        say(
            f"verification of {args.tokens} {options}: lower {lower_s:.1f} s, compile"
            f" {compile_s:.1f} s, {min(times):.2f} to {max(times):.2f} ms, {distinct} experts,"
            f" {min(times) / least:.2f} x its bytes"
        )
    if args.profile:
        for name, run in (("draft step", lambda: steps(4)), ("verification", lambda: passes(2))):
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    run()
                table_rows = kernel_table(folder, 28)
                if "OUT" in os.environ:
                    Path(
                        os.environ["OUT"], f"{args.model}-{name.replace(' ', '_')}.json"
                    ).write_text(json.dumps(table_rows))
            say(f"{name}: kernels, launches, us in all ({4 if name[0] == 'd' else 2} runs)")
            for kernel, launches, us in table_rows:
                print(f"  {us:9.1f}  {launches:5d}  {us / launches:7.2f}  {kernel[:90]}")
    stats = device.memory_stats() or {}
    say("peak", f"{stats.get('peak_bytes_in_use', 0) / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
