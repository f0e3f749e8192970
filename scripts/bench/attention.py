"""Times attention for decoding, appending included: the kernels beside the plain reference.

    PYTHONPATH=. python scripts/bench/attention.py [--variants] [--out results.json]

A call is one layer's attention between its input and its output projection. Bytes are those of the
cache entries that the tokens read, once, and of the latents' up-projection.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.decode_attention import pallas_triton, reference
from pallas_kernels.decode_attention.config import DecodeAttentionConfig, config_for
from scripts.bench import device_profile
from scripts.bench import kernel_cases as cases

LENGTHS = (256, 1024, 4096)
TOKENS = (1, 2, 9, 17)
LAYERS, ROUNDS = 16, 2  # caches in one program, and passes over them
COMPARED = ((256, 1), (256, 9), (1024, 1), (1024, 9), (4096, 1), (4096, 9))
VARIANTS = {
    "split 128": dict(split=128),
    "combine 8": dict(combine_splits=8),
    "values 32": dict(value_out=32),
}
TRIED = {
    "deepseek-v2-lite": ("split 128", "combine 8", "values 32"),
    "qwen1.5-moe": ("split 128", "combine 8"),
}
TRIED_AT = ((256, 1), (1024, 9), (4096, 9))


@dataclasses.dataclass(frozen=True)
class Kind:
    """The attention of one model in bf16; latent where `rank` is not 0."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    value: int
    rank: int = 0
    rope: int = 0

    @property
    def entry_bytes(self) -> int:
        if self.rank:
            return 2 * (self.rank + self.rope)
        return 2 * self.kv_heads * (self.dim + self.value)

    @property
    def weight_bytes(self) -> int:
        return 2 * self.heads * (self.dim - self.rope + self.value) * self.rank

    def config(self, batch: int, tokens: int) -> DecodeAttentionConfig:
        return config_for(
            key_dim=self.rank + self.rope if self.rank else self.dim,
            value_dim=self.rank or self.value,
            group=self.heads // self.kv_heads,
            num_tokens=tokens,
            batch=batch,
            dtype_name="bfloat16",
            device_kind=tuning.device_kind(),
        )

    def shapes(self, batch: int, tokens: int, capacity: int) -> tuple[dict, dict, dict]:
        """Shapes of what is new, of the cache, and of the weights."""
        new, cached = (batch, tokens), (batch, capacity)
        if self.rank:
            up = (self.heads, self.dim - self.rope + self.value, self.rank)
            return (
                {"q": (*new, self.heads, self.dim), "compressed": (*new, self.rank + self.rope)},
                {"latent": (*cached, self.rank), "rope": (*cached, self.rope)},
                {"norm_weight": (self.rank,), "kv_up": up},
            )
        return (
            {
                "q": (*new, self.heads, self.dim),
                "k": (*new, self.kv_heads, self.dim),
                "v": (*new, self.kv_heads, self.value),
            },
            {
                "keys": (*cached, self.kv_heads, self.dim),
                "values": (*cached, self.kv_heads, self.value),
            },
            {},
        )


KINDS = (
    Kind("deepseek-v2-lite", 16, 1, 192, 128, 512, 64),
    Kind("qwen1.5-moe", 16, 16, 128, 128),
    Kind("phi-3.5-moe", 32, 8, 128, 128),
)


def chain(kind: Kind, implementation: Any, config: DecodeAttentionConfig | None):
    """A function of (new, angles, weights, lengths, caches) that runs every layer some times."""
    function = getattr(implementation, "attend_latent" if kind.rank else "attend_grouped")
    options = dict(window=0, scale=0.1, interleaved=bool(kind.rank), compute_dtype=jnp.bfloat16)
    if kind.rank:
        options["eps"] = 1e-6
    if config is not None:
        options["config"] = config

    # Behind a jit of its own, so that it is traced and lowered once.
    layer_call = jax.jit(functools.partial(function, **options))

    def run(new, angles, weights, lengths, caches):
        outputs = []
        for _ in range(ROUNDS):
            for layer in range(LAYERS):
                names = tuple(caches[layer])
                output, *cache = layer_call(
                    **new, **angles, **weights[layer], **caches[layer], lengths=lengths
                )
                caches = [
                    *caches[:layer],
                    dict(zip(names, cache, strict=True)),
                    *caches[layer + 1 :],
                ]
                outputs.append(output)
        return outputs, caches

    return run


@functools.cache
def inputs(kind: Kind, batch: int, tokens: int, length: int):
    """Shapes of one measurement's arguments; the cache holds `length` entries at the end."""
    new, cache, weights = kind.shapes(batch, tokens, length)
    half = (kind.rope or kind.dim) // 2
    half_precision = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    angle = jax.ShapeDtypeStruct((batch, tokens, half), jnp.float32)
    return (
        {name: half_precision(shape) for name, shape in new.items()},
        {"cos": angle, "sin": angle},
        [{name: half_precision(shape) for name, shape in weights.items()} for _ in range(LAYERS)],
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        [{name: half_precision(shape) for name, shape in cache.items()} for _ in range(LAYERS)],
    )


@jax.jit
def _noise(key: jax.Array, like: jax.Array) -> jax.Array:
    return (0.3 * jax.random.normal(key, like.shape)).astype(like.dtype)


def random_like(tree: Any) -> Any:
    """Normal numbers of a tree of shapes; int32 leaves come out as zeros."""
    leaves, structure = jax.tree.flatten(tree)
    made = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    keys = jax.random.split(jax.random.key(0), len(made))
    made = [
        x if x.dtype == jnp.int32 else _noise(key, x) for key, x in zip(keys, made, strict=True)
    ]
    return jax.tree.unflatten(structure, made)


@dataclasses.dataclass(frozen=True)
class Job:
    kind: Kind
    version: str
    tokens: int
    length: int
    batch: int = 1

    @property
    def name(self) -> str:
        """Of the program, which the device profile repeats."""
        words = (self.kind.name, self.version, self.tokens, self.length, self.batch)
        return re.sub(r"\W", "_", "_".join(map(str, words)))

    def compiled(self) -> Any:
        implementation, config = reference, None
        if self.version != "reference":
            implementation = pallas_triton
            config = self.kind.config(self.batch, self.tokens)
            config = dataclasses.replace(config, **VARIANTS.get(self.version, {}))
        run = chain(self.kind, implementation, config)
        run.__name__ = self.name
        return (
            jax.jit(run, donate_argnums=4)
            .lower(*inputs(self.kind, self.batch, self.tokens, self.length))
            .compile()
        )

    def measure(self, run: Any, folder: str) -> dict[str, Any]:
        """Times from the host's clock, and of each kernel from a device profile."""
        *fixed, caches = random_like(inputs(self.kind, self.batch, self.tokens, self.length))
        fixed[3] = jnp.full((self.batch,), self.length - self.tokens, jnp.int32)
        calls = LAYERS * ROUNDS
        times, issued = [], 0.0
        for count in (1, 4, 4, 4):
            jax.block_until_ready(caches)
            began = time.perf_counter()
            for _ in range(count):
                outputs, caches = run(*fixed, caches)
            issued = (time.perf_counter() - began) / count / calls
            jax.block_until_ready((outputs, caches))
            times.append((time.perf_counter() - began) / count / calls)
        with jax.profiler.trace(folder):
            outputs, caches = run(*fixed, caches)
            jax.block_until_ready((outputs, caches))
        kernels = {name: us / calls for name, us in kernel_microseconds(folder).items()}
        read = self.batch * self.length * self.kind.entry_bytes + self.kind.weight_bytes
        return {
            "kind": self.kind.name,
            "version": self.version,
            "tokens": self.tokens,
            "length": self.length,
            "batch": self.batch,
            "us": sum(kernels.values()),
            "wall_us": min(times[1:]) * 1e6,
            "issue_us": issued * 1e6,
            "kernels_us": kernels,
            "bytes": read,
        }


def kernel_microseconds(folder: str) -> dict[str, float]:
    """Device time by kernel, from a profile.

    A kernel that was launched while the one before it ran counts from that one's end.
    """
    kernels = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in device_profile.stream_events(folder)
    )
    totals: dict[str, float] = collections.defaultdict(float)
    free = 0.0
    for start, end, name in kernels:
        totals[re.sub(r"_*[\d_]*$", "", name)] += max(0.0, end - max(start, free))
        free = max(free, end)
    return dict(totals)


def jobs(variants: bool) -> list[Job]:
    chosen = [Job(k, "kernels", t, s) for k in KINDS[:2] for s in LENGTHS for t in TOKENS]
    chosen += [Job(KINDS[2], "kernels", t, 1024) for t in (1, 9)]
    chosen += [Job(k, "kernels", 9, 1024, 32) for k in KINDS[:1]]
    chosen += [Job(k, "reference", t, s) for k in KINDS[:2] for s, t in COMPARED]
    if variants:
        chosen += [
            Job(k, name, t, s) for k in KINDS[:2] for name in TRIED[k.name] for s, t in TRIED_AT
        ]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", action="store_true", help="other block shapes too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    todo = jobs(args.variants)
    began = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        programs = {job: pool.submit(job.compiled) for job in todo}
        concurrent.futures.wait(programs.values())
    print(f"{len(todo)} programs compiled in {time.perf_counter() - began:.1f} s")
    bandwidth = cases.copy_bandwidth()["copy"]
    print(f"{tuning.device_kind()}, copy {bandwidth / 1e12:.2f} TB/s")
    rows = []
    for job, program in programs.items():
        try:
            with tempfile.TemporaryDirectory() as folder:
                row = job.measure(program.result(), folder)
        except Exception as error:  # a block shape that does not fit is a result, too
            print(f"{job.name}: {str(error)[:150]}")
            continue
        row["share"] = row["bytes"] / bandwidth / (row["us"] * 1e-6)
        rows.append(row)
        split = " ".join(f"{name} {us:.1f}" for name, us in row["kernels_us"].items() if us > 0.05)
        print(
            f"{row['kind']:16s} {row['version']:11s} {row['batch']:2d} x {row['tokens']:2d} tokens"
            f" {row['length']:4d} entries: {row['us']:6.2f} us (wall {row['wall_us']:.1f}, issue"
            f" {row['issue_us']:.1f}), {100 * row['share']:3.0f} %: {split[:90]}",
            flush=True,
        )
    if args.out:
        args.out.write_text(json.dumps({"copy": bandwidth, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
