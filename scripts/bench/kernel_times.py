"""Times the kernels with their tuned block shapes, beside what XLA alone does.

    PYTHONPATH=. python scripts/bench/kernel_times.py --out results.json

Refuses a GPU without tuned tables (`tune_kernels.py --write` makes them). "share" is the bytes
that must be read over time over the copy bandwidth measured in the same run.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels.draft_experts import config as draft_config
from pallas_kernels.draft_experts.api import draft_experts
from pallas_kernels.draft_experts.arithmetic import pack_tables
from pallas_kernels.expert_ffn import config as ffn_config
from pallas_kernels.expert_ffn.api import expert_ffn
from pallas_kernels.nested_ffn.api import nested_ffn
from pallas_kernels.tuning import tuned_fields
from scripts.bench import kernel_cases as cases

DRAFT_ROWS = (1, 4, 32)
FFN_ROWS = (1, 9, 17, 544)
COMPARED_ROWS = 9
LAYERS = 8  # calls in one program, on other experts each time


def draft_seconds(shape: cases.Shape, layer, num_rows: int) -> tuple[float, float]:
    """(seconds, experts read) of one layer; each call's output is the next one's input."""
    if num_rows == 1:
        num_calls = 2 * (shape.num_experts // shape.top_k)
        once = jnp.arange(num_calls // 2 * shape.top_k, dtype=jnp.int32)
        choices = jnp.tile(once, 2).reshape(num_calls, 1, shape.top_k)
    else:
        num_calls = LAYERS
        choices = jnp.stack(
            [cases.random_choices(shape, num_rows, seed)[0] for seed in range(num_calls)]
        )
    weights = jnp.full((num_rows, shape.top_k), 1 / shape.top_k, jnp.float32)

    @jax.jit
    def chain(x, layer, choices):
        for number in range(num_calls):
            x = draft_experts(x, choices[number], weights, layer, implementation="pallas")
        return x

    x = jax.random.normal(jax.random.key(1), (num_rows, shape.hidden), jnp.float32)
    distinct = sum(len(set(call.reshape(-1).tolist())) for call in choices) / num_calls
    return cases.seconds_per_call(lambda: chain(x, layer, choices), 20) / num_calls, distinct


def ffn_inputs(shape: cases.Shape, num_rows: int):
    experts, weights = cases.random_choices(shape, num_rows)
    x = jax.random.normal(jax.random.key(1), (num_rows, shape.hidden), jnp.bfloat16)
    return x, experts, weights


def all_rows(x, experts, weights, slots, slot_row):
    return expert_ffn(
        x, experts, weights, slots, slot_row, None, jnp.bfloat16, implementation="pallas"
    )


def nested_rows(x, experts, weights, words, slot_row, draft):
    return nested_ffn(
        x, experts, weights, words, slot_row, draft, None, jnp.bfloat16, implementation="pallas"
    )


def token_wise(x, experts, weights, slots, slot_row):
    """The same kernels, a row at a time: each row reads its own experts."""
    rows = [
        all_rows(x[row : row + 1], experts[row : row + 1], weights[row : row + 1], slots, slot_row)
        for row in range(x.shape[0])
    ]
    return jnp.concatenate(rows)


def ragged(x, experts, weights, gate_up, down):
    """XLA's grouped product over rows sorted by expert.

    gate_up: [experts, hidden, 2 * inner]. down: [experts, inner, hidden].
    """
    num_rows, top_k = experts.shape
    flat = experts.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=gate_up.shape[0]).astype(jnp.int32)
    both = jax.lax.ragged_dot(x[order // top_k], gate_up, sizes)
    gate, up = jnp.split(both, 2, axis=-1)
    out = jax.lax.ragged_dot(jax.nn.silu(gate) * up, down, sizes).astype(jnp.float32)
    out = (out * weights.reshape(-1)[order][:, None])[jnp.argsort(order)]
    return out.reshape(num_rows, top_k, -1).sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = jax.devices()[0].device_kind
    bandwidth = cases.copy_bandwidth()
    report = {"device": device, "jax": jax.__version__, "bandwidth": bandwidth, "rows": []}
    print(device, {name: f"{value / 1e12:.2f} TB/s" for name, value in bandwidth.items()})

    def add(name: str, shape: cases.Shape, rows: int, seconds: float, num_bytes: float) -> None:
        row = {"kernel": name, "shape": shape.name, "num_rows": rows, "us": seconds * 1e6}
        row |= {"bytes": num_bytes, "share": num_bytes / seconds / bandwidth["copy"]}
        report["rows"].append(row)
        arguments.out.write_text(json.dumps(report, indent=1))
        print(
            f"{name:14} {shape.name:17}{rows:4} rows {row['us']:9.2f} us "
            f"{num_bytes / 1e6:8.1f} MB {row['share']:6.1%}"
        )

    for shape in cases.SHAPES:
        sizes = {"hidden": shape.hidden, "inner": shape.inner}
        for module in (draft_config, ffn_config):
            if not tuned_fields(module.TUNED_FOLDER, device, **sizes):
                raise SystemExit(f"error: {module.__name__} has no entry for {device}, {sizes}")
        layer = cases.random_draft_layer(shape)
        layer |= jax.jit(pack_tables)(layer["tables"])
        for rows in DRAFT_ROWS:
            seconds, distinct = draft_seconds(shape, layer, rows)
            add("draft", shape, rows, seconds, distinct * shape.packed_expert_bytes)
        del layer

        slots = jax.jit(cases.random_slots, static_argnums=(0, 1))(shape, shape.num_experts)
        slot_row = jnp.arange(shape.num_experts, dtype=jnp.int32)
        run = jax.jit(all_rows)
        for rows in FFN_ROWS:
            x, experts, weights = ffn_inputs(shape, rows)
            call = functools.partial(run, x, experts, weights, slots, slot_row)
            num_bytes = len(set(experts.reshape(-1).tolist())) * shape.expert_elements * 2
            add("ffn", shape, rows, cases.seconds_per_call(call, 20), num_bytes)
        words, draft = cases.nested_experts(shape, slots)
        run = jax.jit(nested_rows)
        for rows in FFN_ROWS:
            x, experts, weights = ffn_inputs(shape, rows)
            call = functools.partial(run, x, experts, weights, words, slot_row, draft)
            num_bytes = len(set(experts.reshape(-1).tolist())) * cases.nested_bytes(shape, words)
            add("ffn nested", shape, rows, cases.seconds_per_call(call, 20), num_bytes)
        del words, draft
        x, experts, weights = ffn_inputs(shape, COMPARED_ROWS)
        num_bytes = len(set(experts.reshape(-1).tolist())) * shape.expert_elements * 2
        call = functools.partial(jax.jit(token_wise), x, experts, weights, slots, slot_row)
        seconds = cases.seconds_per_call(call, 5)
        add("ffn token-wise", shape, COMPARED_ROWS, seconds, num_bytes)
        # The same memory read as matrices of the layout that the grouped product wants.
        split = 2 * shape.inner * shape.hidden
        gate_up = slots[:, :split].reshape(-1, shape.hidden, 2 * shape.inner)
        down = slots[:, split:].reshape(-1, shape.inner, shape.hidden)
        call = functools.partial(jax.jit(ragged), x, experts, weights, gate_up, down)
        seconds = cases.seconds_per_call(call, 5)
        add("ffn ragged_dot", shape, COMPARED_ROWS, seconds, num_bytes)
        del slots, gate_up, down, call


if __name__ == "__main__":
    main()
