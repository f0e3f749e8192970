"""Times the small dense products of the three models, with several block shapes, beside XLA's own.

    PYTHONPATH=. python scripts/bench/dense.py --out results.json [--models NAME ...] [--tune]

One program holds a chain of calls, each with weights of its own, more than the L2 cache holds. The
result of a call is added to the next one's, so that they run one after the other. Times are of the
device, from a profile: the host may take longer to launch such short kernels than they run.
`--tune --write FILE` tries every block shape and writes the table of the fastest.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.small_dense import Dense, pallas_triton, reference
from pallas_kernels.small_dense.config import SmallDenseConfig, config_for
from scripts.bench import device_profile
from scripts.bench import kernel_cases as cases

ROWS = (2, 9, 17)
TUNED_ROWS = 9
COPY_BYTES = 160 << 20  # of weights between two uses of the same ones; the L2 cache has 50 MB
MOST_SETS, LEAST_SETS = 24, 2
PAUSE_SECONDS = 0.01  # between two programs of a profile
MOST_CALLS = 64  # of one program: enough that starting it takes no part in the time


@dataclasses.dataclass(frozen=True)
class Case:
    """Parts of one call: (outputs, gated) each; the first takes the previous call's result."""

    model: str
    name: str
    inputs: int
    parts: tuple[tuple[int, bool], ...]

    @property
    def lines(self) -> int:
        """Rows of all weights together."""
        return sum(outputs * (2 if gated else 1) for outputs, gated in self.parts)

    @property
    def weight_bytes(self) -> int:
        """Of one call, bf16."""
        return 2 * self.inputs * self.lines


def _cases() -> list[Case]:
    plain, gated = False, True
    table = {
        "deepseek-v2-lite": [
            ("q, kv_a", 2048, ((3072, plain), (576, plain))),
            ("o", 2048, ((2048, plain),)),
            ("router, shared gate and up", 2048, ((64, plain), (2816, gated))),
            ("shared down", 2816, ((2048, plain),)),
            ("dense gate and up", 2048, ((10944, gated),)),
            ("dense down", 10944, ((2048, plain),)),
            ("head", 2048, ((102400, plain),)),
        ],
        "qwen1.5-moe": [
            ("q, k, v", 2048, ((2048, plain),) * 3),
            ("router, shared gate and up", 2048, ((60, plain), (5632, gated), (1, plain))),
            ("shared down", 5632, ((2048, plain),)),
            ("head", 2048, ((151936, plain),)),
        ],
        "phi-3.5-moe": [
            ("q, k, v", 4096, ((4096, plain), (1024, plain), (1024, plain))),
            ("o", 4096, ((4096, plain),)),
            ("router", 4096, ((16, plain),)),
            ("head", 4096, ((32064, plain),)),
        ],
    }
    return [Case(model, *case) for model, rows in table.items() for case in rows]


def _shapes(names: tuple[str, ...], *rows: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip(names, row, strict=True)) for row in rows]


VECTOR_CHOICES = _shapes(
    ("vector_out", "vector_warps", "vector_ahead"),
    (8, 4, 4),
    (4, 2, 6),
    (4, 4, 6),
    (8, 8, 3),
    (2, 2, 6),
    (8, 4, 1),
)
ROWS_CHOICES = _shapes(
    ("rows_out", "rows_in", "rows_warps", "rows_stages"),
    (32, 128, 2, 6),
    (32, 128, 4, 6),
    (16, 128, 2, 8),
    (16, 256, 2, 6),
    (64, 64, 4, 8),
    (64, 128, 4, 5),
)


def inputs_of(case: Case, num_rows: int) -> tuple[jax.Array, list[list[Dense]]]:
    """x [rows, in] and enough sets of weights to exceed the L2 cache."""
    sets = min(max(-(-COPY_BYTES // case.weight_bytes), LEAST_SETS), MOST_SETS)

    def weight(seed: int, outputs: int) -> jax.Array:
        key = jax.random.key(seed)
        return jax.random.normal(key, (outputs, case.inputs), jnp.bfloat16) * case.inputs**-0.5

    make = jax.jit(weight, static_argnums=1)
    weights = [
        [
            Dense(
                weight=make(10 * number + place, outputs),
                up=make(10 * number + place + 5, outputs) if gated else None,
                dtype=jnp.bfloat16,
            )
            for place, (outputs, gated) in enumerate(case.parts)
        ]
        for number in range(sets)
    ]
    return jax.random.normal(jax.random.key(1), (num_rows, case.inputs), jnp.bfloat16), weights


def chain(compute: Callable, num_calls: int) -> Callable:
    """A jitted function of (x, sets) that calls `compute(x, parts)` on one set after the other."""

    @jax.jit
    def one(x: jax.Array, parts: list[Dense], previous: jax.Array) -> jax.Array:
        first = dataclasses.replace(parts[0], add=(previous,))
        return compute(x, [first, *parts[1:]])

    def whole(x: jax.Array, sets: list[list[Dense]]) -> list[jax.Array]:
        outputs = [jnp.zeros((x.shape[0], sets[0][0].outputs), jnp.bfloat16)]
        everything = []
        for number in range(num_calls):
            # Or XLA would join products of the same x.
            x, previous = jax.lax.optimization_barrier((x, outputs[0]))
            outputs = one(x, sets[number % len(sets)], previous)
            everything.append(outputs)
        return everything

    return jax.jit(whole)


def compute_for(kind: str, config: SmallDenseConfig | None) -> Callable:
    """The kernel of that kind, or XLA's products."""
    if kind == "xla":
        return reference.products
    return functools.partial(getattr(pallas_triton, kind), config=config)


def device_seconds(calls: list[Callable], repeats: int = 3) -> list[float]:
    """Least time that the device was busy in a call of each function, from one profile."""
    for call in calls:
        jax.block_until_ready(call())
        jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for call in calls:
                for _ in range(repeats):
                    jax.block_until_ready(call())
                    time.sleep(PAUSE_SECONDS)
        kernels = sorted(
            (event["ts"], event["ts"] + event["dur"])
            for event in device_profile.stream_events(folder, "(Compute")
        )
    busy: list[float] = []
    last = float("-inf")
    for start, end in kernels:
        if start - last > PAUSE_SECONDS * 0.5e6:
            busy.append(0.0)
        # A kernel that was launched early waits for the one before: counted from its end.
        busy[-1] += max(end - max(start, last), 0.0)
        last = max(last, end)
    if len(busy) != repeats * len(calls):
        raise RuntimeError(f"{len(busy)} groups of kernels in the profile of {len(calls)} calls")
    return [min(busy[i : i + repeats]) / 1e6 for i in range(0, len(busy), repeats)]


def best_fields(entries: list[dict[str, Any]]) -> dict[str, int]:
    """Config fields of the fastest vector and the fastest rows shape of one case."""
    fields = {}
    for kind in ("vector", "rows"):
        rows = [e for e in entries if e["kind"] == kind and e["num_rows"] in (1, TUNED_ROWS)]
        rows = [e for e in rows if (kind == "vector") == (e["num_rows"] == 1) and "us" in e]
        if rows:
            config = min(rows, key=lambda e: e["us"])["config"]
            fields |= {name: value for name, value in config.items() if name.startswith(kind)}
    return fields


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="*", help="default: all")
    parser.add_argument(
        "--tune", action="store_true", help="try every block shape, not the table's"
    )
    parser.add_argument("--write", type=Path, help="table of block shapes to write")
    parser.add_argument("--no-xla", action="store_true", help="without XLA's own products")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so long")
    args = parser.parse_args()
    started = time.perf_counter()
    device = jax.devices()[0].device_kind
    bandwidth = cases.copy_bandwidth()["copy"]
    print(device, f"copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    report = {"device": device, "jax": jax.__version__, "bandwidth": bandwidth, "rows": []}
    table: list[dict[str, Any]] = []
    pool = concurrent.futures.ThreadPoolExecutor(12)

    for case in _cases():
        if args.models and case.model not in args.models:
            continue
        if time.perf_counter() - started > args.seconds:
            print("out of time before", case)
            break
        base = config_for(case.inputs, case.lines, "bfloat16", device)
        x, sets = inputs_of(case, max(ROWS))
        # XLA would compute a product once that comes twice, so it gets every set of weights once.
        calls_of = {"xla": len(sets), "vector": min(8 * len(sets), MOST_CALLS)}
        calls_of["rows"] = calls_of["vector"]
        runs: list[tuple[str, int, SmallDenseConfig | None]] = []
        if args.tune:
            runs += [("vector", 1, dataclasses.replace(base, **c)) for c in VECTOR_CHOICES]
            runs += [("rows", TUNED_ROWS, dataclasses.replace(base, **c)) for c in ROWS_CHOICES]
        else:
            runs += [("vector", 1, base), ("rows", 1, base)]
            runs += [("rows", rows, base) for rows in ROWS]
        if not args.no_xla:
            runs += [("xla", 1, None), ("xla", TUNED_ROWS, None)]
        runs = [
            (
                kind,
                rows,
                c and dataclasses.replace(c, rows_in=min(c.rows_in, case.inputs & -case.inputs)),
            )
            for kind, rows, c in runs
        ]

        def build(run, x=x, sets=sets, calls_of=calls_of):
            kind, rows, config = run
            whole = chain(compute_for(kind, config), calls_of[kind])
            return whole.lower(x[:rows], sets).compile()

        compiled = [pool.submit(build, run) for run in runs]
        concurrent.futures.wait(compiled)  # compiling would take the host's time from launching
        calls = [
            functools.partial(future.result(), x[:rows], sets)
            for (_, rows, _), future in zip(runs, compiled, strict=True)
            if future.exception() is None
        ]
        times = iter(device_seconds(calls))
        for (kind, rows, config), future in zip(runs, compiled, strict=True):
            entry = {"model": case.model, "name": case.name, "kind": kind, "num_rows": rows}
            entry |= {"inputs": case.inputs, "outputs": case.lines, "bytes": case.weight_bytes}
            entry |= {"config": config and dataclasses.asdict(config)}
            if future.exception() is not None:  # a shape that does not fit is a result, too
                message = str(future.exception())
                print(f"{kind} {case.name}: {message.splitlines()[0][:150]}")
                report["rows"].append(entry | {"error": message[:500]})
                continue
            seconds = next(times) / calls_of[kind]
            entry |= {"us": seconds * 1e6, "share": case.weight_bytes / seconds / bandwidth}
            report["rows"].append(entry)
            fields = {} if config is None else dataclasses.asdict(config)
            shown = [v for k, v in fields.items() if k.startswith(kind)]
            print(
                f"{case.model:16} {case.name:27}{kind:7}{rows:3} rows {entry['us']:8.2f} us"
                f" {case.weight_bytes / 1e6:6.1f} MB {entry['share']:6.1%} {shown}",
                flush=True,
            )
        args.out.write_text(json.dumps(report, indent=1))
        entries = [e for e in report["rows"] if (e["model"], e["name"]) == (case.model, case.name)]
        if args.tune:
            match = {"inputs": case.inputs, "outputs": case.lines}
            table.append({"match": match, "config": best_fields(entries)})
        if args.write:
            args.write.write_text(json.dumps(table, indent=1) + "\n")
        del x, sets


if __name__ == "__main__":
    main()
