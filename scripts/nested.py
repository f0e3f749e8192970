"""Nested against plain experts: the same output, how much smaller, and how fast to encode.

    python scripts/nested.py [--model DIR] [--dataset FILE.jsonl] [--limit N] [--depth N]
        [--policy NAME] [--expert-slots N] [--batch-size N] [--json FILE]

`--model` is a Hugging Face directory in bfloat16; both conversions are kept in the cache. Every
batch of prompts is decoded greedily in float32 with plain experts, then with nested ones. Exit code
1 if any output differs; a line then names the prompt and the first position that does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ml_dtypes
import numpy as np

from scripts.exactness import first_difference, table
from scripts.prompt_sets import (
    DEFAULT_DATASET,
    DEFAULT_MODEL,
    Case,
    batches,
    load_quarter,
    read_cases,
)
from specter_jax.cli.session import prepare_environment

if TYPE_CHECKING:
    from specter_jax.model import Model
    from specter_jax.stats import Stats

FORMATS = ("plain", "nested")
ENCODED_SHAPE = (2048, 1408)
"""Hidden and inner size of the expert whose encoding is timed: DeepSeek-V2-Lite's."""
ENCODED_GROUP = 128
NUM_WORKERS = 2


def main(arguments: list[str] | None = None) -> int:
    """Runs the comparison; returns the exit code."""
    options = _parser().parse_args(arguments)
    prepare_environment()
    report: dict[str, Any] = {"encoding": encode_speeds(options.repeats)}
    models = {}
    for expert_format in FORMATS:
        models[expert_format] = load_quarter(
            options.model,
            expert_slots=options.expert_slots,
            dtype="float32",
            max_context=options.prompt_tokens + options.max_new_tokens,
            max_batch=options.batch_size,
            cache_dir=options.cache_dir,
            expert_format=expert_format,
        )
        report[expert_format] = sizes(models[expert_format].path)
    cases = read_cases(
        options.dataset, models["plain"].path, limit=options.limit, tokens=options.prompt_tokens
    )
    groups = batches(cases, options.batch_size)
    outputs = {name: {} for name in FORMATS}
    stats = {name: {} for name in FORMATS}
    for group in groups:
        for name, model in models.items():
            settings = dict(depth=options.depth, policy=options.policy)
            part, measured = generate_group(model, group, options.max_new_tokens, **settings)
            outputs[name] |= part
            stats[name].setdefault(group[0].task, []).append(measured)
        same = sum(tokens == outputs["nested"][key] for key, tokens in outputs["plain"].items())
        print(f"{same} of {len(outputs['plain'])} identical ({group[0].task})", flush=True)
        for case in group:
            expected, got = (outputs[name][case.name] for name in FORMATS)
            position = first_difference(expected, got)
            if position is not None:
                print(f"prompt {case.name} differs from new token {position} on", flush=True)
    for name in FORMATS:
        title = f"{name}, {options.policy}, depth {options.depth}"
        print(table(title, groups, outputs["plain"], outputs[name], stats[name]))
    report |= {"prompts": len(cases), "identical": same}
    report["experts_per_gib_ratio"] = (
        report["nested"]["experts_per_gib"] / report["plain"]["experts_per_gib"]
    )
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(same < len(cases))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--dataset", type=Path, default=DEFAULT_DATASET)
    parser.add_argument("--limit", type=int, help="prompts, evenly spread (default: all)")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=256, help="prompts are cut to this")
    parser.add_argument("--policy", default="lookahead")
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--expert-slots", type=int, help="default: a quarter of the experts")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--cache-dir", help="where the conversions are kept")
    parser.add_argument("--repeats", type=int, default=8, help="experts a worker encodes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return parser


def generate_group(
    model: Model, group: list[Case], max_new_tokens: int, **settings: Any
) -> tuple[dict[str, list[int]], Stats]:
    """Tokens of a batch by prompt, and its statistics."""
    import specter_jax as sj

    ids = [case.ids for case in group]
    result = sj.generate(model, ids, max_new_tokens=max_new_tokens, **settings)
    tokens = {case.name: tokens for case, tokens in zip(group, result.tokens, strict=True)}
    return tokens, result.stats


def sizes(path: Path) -> dict[str, float]:
    """What experts take in slots and in files, and how many of them a GiB of slots holds."""
    from specter_jax.checkpoint import open_checkpoint
    from specter_jax.info import info

    checkpoint = open_checkpoint(path)
    files = checkpoint.manifest.files.items()
    stored = sum(record.bytes for name, record in files if name.startswith("experts/"))
    config = checkpoint.config
    num_weights = config.num_moe_layers * config.num_experts * config.expert_elements
    fields = info(path)
    return {
        "bits_per_weight_in_slots": fields["bits_per_weight"],
        "bits_per_weight_on_disk": 8 * stored / num_weights,
        "escape_share_mean": fields["escape_share_mean"],
        "escape_share_max": fields["escape_share_max"],
        "experts_per_gib": 2**30 / fields["expert_bytes"],
    }


def encode_speeds(repeats: int) -> dict[str, float]:
    """MB of bf16 weights a second that `NUM_WORKERS` threads encode: draft, nested, and both."""
    from pallas_kernels import int4, nested

    hidden, inner = ENCODED_SHAPE
    rng = np.random.default_rng(0)
    packed = rng.standard_normal(3 * hidden * inner, np.float32) * np.float32(hidden**-0.5)
    packed = packed.astype(ml_dtypes.bfloat16)
    gate_up, down = np.split(packed, [2 * inner * hidden])

    def encode_draft(_: int) -> tuple[np.ndarray, np.ndarray]:
        matrices = (gate_up.reshape(2 * inner, hidden), down.reshape(hidden, inner))
        return tuple(int4.encode(matrix, ENCODED_GROUP)[1] for matrix in matrices)

    scales = encode_draft(0)

    def encode_nested(_: int) -> np.ndarray:
        return nested.encode(packed, *scales)

    def encode_both(number: int) -> np.ndarray:
        return nested.encode(packed, *encode_draft(number))

    speeds = {}
    with ThreadPoolExecutor(NUM_WORKERS) as workers:
        for name, encode in (
            ("draft", encode_draft),
            ("nested", encode_nested),
            ("both", encode_both),
        ):
            list(workers.map(encode, range(NUM_WORKERS)))
            begin = time.perf_counter()
            list(workers.map(encode, range(NUM_WORKERS * repeats)))
            seconds = time.perf_counter() - begin
            speeds[f"{name}_mb_per_s"] = NUM_WORKERS * repeats * packed.nbytes / 1e6 / seconds
    words = encode_nested(0)
    speeds["gaussian_bits_per_weight"] = 32 * len(words) / packed.size
    return speeds


if __name__ == "__main__":
    sys.exit(main())
