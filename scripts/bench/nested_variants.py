"""Checks and times the variants of the nested expert FFN beside the plain kernels on this GPU.

PYTHONPATH=. python scripts/bench/nested_variants.py [--out results.json] [--limit-s 40]

Device times come from one profile for each shape: "all" is the sum over a call's kernels, "two" the
two that read weights. Every call of a program has other rows, and all programs have the same ones.
"share" is bytes of the distinct experts over time over the copy bandwidth of the same run.
Each variant is compared with float64 in one row, with the plain kernels in all, and bit by bit with
itself in programs of other numbers of rows. What does not fit into the time limit is left out.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.expert_ffn import pallas_triton as plain_kernels
from pallas_kernels.expert_ffn.config import config_for as plain_config_for
from pallas_kernels.nested_ffn import pallas_triton as nested_kernels
from pallas_kernels.nested_ffn.config import DEFAULT_VARIANT, VARIANTS, config_for
from scripts.bench import kernel_cases as cases
from scripts.bench.device_profile import stream_events
from specter_jax.engine.compile_options import PROGRAM

ROWS = (9, 17, 1)
MANY_ROWS = 544
CALLS = 4  # of each program in the profile
PAUSE_SECONDS = 5e-3  # between calls, by which the profile is divided
FLOAT64 = 5e-3  # two roundings to bf16 on the way
PLAIN = 5e-3
PLAIN_NAME = "plain"
SINGLE_NAME = "single"  # one warp a program: tried here only
WEIGHT_KERNELS = ("gate_up", "down")


def config_of(name: str, shape: cases.Shape, rows: int) -> Any:
    """Config of a variant, `SINGLE_NAME` or `PLAIN_NAME`, for so many rows."""
    sizes = (shape.hidden, shape.inner, "bfloat16", jax.devices()[0].device_kind)
    counts = dict(num_choices=rows * shape.top_k, num_experts=shape.num_experts)
    if name == PLAIN_NAME:
        return plain_config_for(*sizes, **counts)
    if name != SINGLE_NAME:
        return config_for(*sizes, **counts, variant=name)
    pair = config_for(*sizes, **counts, variant="pair_short")
    return dataclasses.replace(pair, block_out=16, num_warps=1)


def program(name: str, shape: cases.Shape, rows: int) -> Callable:
    """Jitted (x, experts, weights, plain, words, slot_row, draft) -> [rows, hidden]."""
    options = dict(compute_dtype=jnp.bfloat16, config=config_of(name, shape, rows))

    def run(x, experts, weights, plain, words, slot_row, draft):
        if name == PLAIN_NAME:
            return plain_kernels.expert_ffn(x, experts, weights, plain, slot_row, **options)
        return nested_kernels.nested_ffn(x, experts, weights, words, slot_row, draft, **options)

    return jax.jit(run)


def float64_row(shape: cases.Shape, x, experts, weights, plain) -> np.ndarray:
    """One row's output, on the host: x [hidden], experts and weights [k]."""
    x = np.asarray(x.astype(jnp.float32), np.float64)
    total = np.zeros(shape.hidden)
    for expert, weight in zip(experts.tolist(), weights.tolist(), strict=True):
        packed = np.asarray(plain[expert].astype(jnp.float32), np.float64)
        gate, up, down = packed.reshape(3, -1)
        gate, up = (part.reshape(shape.inner, shape.hidden) @ x for part in (gate, up))
        active = gate / (1 + np.exp(-gate)) * up
        total += weight * (down.reshape(shape.hidden, shape.inner) @ active)
    return total


def error(value, expected) -> float:
    value, expected = (np.asarray(array, np.float64) for array in (value, expected))
    return float(np.linalg.norm(value - expected) / np.linalg.norm(expected))


def device_times(calls: Sequence[Callable[[], Any]]) -> list[tuple[float, float]]:
    """us of each call: all its kernels, and those that read weights.

    A kernel that was launched early waits for the one before: counted from its end.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for call in calls:
                time.sleep(PAUSE_SECONDS)
                jax.block_until_ready(call())
        events = stream_events(folder, "(Compute")
    times: list[list[float]] = []
    last = float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        start, end = event["ts"], event["ts"] + event["dur"]
        if start - last > PAUSE_SECONDS * 0.5e6:
            times.append([0.0, 0.0])
        busy = max(end - max(start, last), 0.0)
        times[-1][0] += busy
        times[-1][1] += busy if any(part in event["name"] for part in WEIGHT_KERNELS) else 0.0
        last = max(last, end)
    if len(times) != len(calls):
        raise RuntimeError(f"{len(times)} groups of kernels in the profile of {len(calls)} calls")
    return [(all_, two) for all_, two in times]


@dataclasses.dataclass(kw_only=True)
class Bench:
    names: tuple[str, ...]
    bandwidth: float
    deadline: float
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    faults: list[str] = dataclasses.field(default_factory=list)

    def late(self) -> bool:
        return time.perf_counter() > self.deadline

    def shape(self, shape: cases.Shape, counts: tuple[int, ...]) -> None:
        plain = jax.jit(cases.random_slots, static_argnums=(0, 1))(shape, shape.num_experts)
        words, draft = cases.nested_experts(shape, plain)
        stored = (plain, words, jnp.arange(shape.num_experts, dtype=jnp.int32), draft)
        most = max(counts) + CALLS - 1
        experts, weights = cases.random_choices(shape, most)
        x = jax.random.normal(jax.random.key(1), (most, shape.hidden), jnp.bfloat16)

        def inputs(rows: int, call: int) -> tuple:
            return tuple(array[call : call + rows] for array in (x, experts, weights))

        keys = [(name, rows) for rows in counts for name in self.names]
        pool = concurrent.futures.ThreadPoolExecutor()
        pending = {}
        for name, rows in keys:
            if self.late():
                break
            jitted = program(name, shape, rows)
            lowered = jitted.lower(*inputs(rows, 0), *stored)
            pending[name, rows] = pool.submit(lowered.compile, PROGRAM)
        compiled = {key: future.result() for key, future in pending.items()}
        arguments = {
            (rows, call): jax.block_until_ready(inputs(rows, call))
            for rows in counts
            for call in range(CALLS)
        }
        values = {
            key: np.asarray(run(*arguments[key[1], 0], *stored)) for key, run in compiled.items()
        }
        first = (array[0] for array in arguments[counts[0], 0])
        self.check(shape, values, float64_row(shape, *first, plain))

        calls = [
            functools.partial(run, *arguments[rows, call], *stored)
            for (_, rows), run in compiled.items()
            for call in range(CALLS)
        ]
        times = np.reshape(device_times(calls), (len(compiled), CALLS, 2)).mean(1)
        for ((name, rows), run), (all_, two) in zip(compiled.items(), times.tolist(), strict=True):
            called = [arguments[rows, call][1].reshape(-1).tolist() for call in range(CALLS)]
            distinct = sum(len(set(ids)) for ids in called) / CALLS
            is_plain = name == PLAIN_NAME
            of_one = 2 * shape.expert_elements if is_plain else cases.nested_bytes(shape, words)
            clock = cases.seconds_per_call(functools.partial(run, *arguments[rows, 0], *stored), 10)
            self.add(shape, name, rows, distinct * of_one, all_, two, 1e6 * clock)

    def check(self, shape: cases.Shape, values: dict, expected: np.ndarray) -> None:
        for (name, rows), value in values.items():
            errors = error(value[0], expected), error(value, values[PLAIN_NAME, rows])
            others = [other for (n, _), other in values.items() if n == name]
            keeps = all(
                np.array_equal(value[: len(other)], other[: len(value)]) for other in others
            )
            good = errors[0] < FLOAT64 and errors[1] < PLAIN and keeps
            text = (
                f"{shape.name} {name} {rows} rows: from float64 {errors[0]:.1e}, from plain "
                f"{errors[1]:.1e}, bits {'equal' if keeps else 'DIFFER'}"
            )
            print(text if good else f"FAULT {text}", flush=True)
            if not good:
                self.faults.append(text)

    def add(self, shape, name, rows, num_bytes, all_, two, clock) -> None:
        share, share_two = (1e6 * num_bytes / us / self.bandwidth for us in (all_, two))
        self.rows.append(
            {
                "shape": shape.name,
                "variant": name,
                "num_rows": rows,
                "bytes": num_bytes,
                "us": all_,
                "us_two": two,
                "us_clock": clock,
                "share": share,
                "share_two": share_two,
            }
        )
        default = "*" if name == DEFAULT_VARIANT else " "
        print(
            f"{shape.name:17}{rows:4} rows {name:13}{default} all {all_:7.1f} us {share:6.1%}   "
            f"two {two:7.1f} us {share_two:6.1%}   clock {clock:7.1f} us",
            flush=True,
        )


def main() -> None:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit-s", type=float, default=40.0)
    parser.add_argument("--variants", default=",".join([*VARIANTS, SINGLE_NAME]))
    arguments = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", None)
    bandwidth = cases.copy_bandwidth()["copy"]
    print(f"{jax.devices()[0].device_kind}, copy {bandwidth / 1e12:.2f} TB/s, * is the default")
    bench = Bench(
        names=(PLAIN_NAME, *arguments.variants.split(",")),
        bandwidth=bandwidth,
        deadline=start + arguments.limit_s,
    )
    for number, shape in enumerate(cases.SHAPES):
        if bench.late():
            print(f"time is up before {shape.name}")
            break
        bench.shape(shape, ROWS if number else (*ROWS, MANY_ROWS))
        print(f"{time.perf_counter() - start:.1f} s", flush=True)
    if arguments.out:
        report = {"device": jax.devices()[0].device_kind, "copy": bandwidth, "rows": bench.rows}
        arguments.out.write_text(json.dumps(report, indent=1))
    if bench.faults:
        raise SystemExit(f"{len(bench.faults)} results are wrong")


if __name__ == "__main__":
    main()
