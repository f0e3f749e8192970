"""Compares logits with transformers on Hugging Face checkpoints.

    python scripts/parity.py MODEL_DIR... [--prompt-length 64] [--steps 32] [--seed 0] [--bfloat16]

Prints, for each directory, max|difference| / max|reference| over a prompt's last position and
cached decode steps, float32 against float32. With --bfloat16 also the bfloat16 errors of both
implementations against the float32 reference. Exit code 1 if a float32 error exceeds 1e-4.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TOLERANCE = 1e-4


def compare(
    directory: Path, prompt_length: int, steps: int, bfloat16: bool, seed: int = 0
) -> dict[str, float]:
    """Relative errors of one checkpoint, by name."""
    import jax.numpy as jnp
    import ml_dtypes
    import torch
    from transformers import AutoModelForCausalLM

    from specter_jax.config import ModelConfig
    from tests.checkpoints import all_resident, read_checkpoint, shared_tree
    from tests.decoding import decode_logits, relative_error, transformers_logits

    config = ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    tensors = read_checkpoint(directory)
    tokens = np.random.default_rng(seed).integers(4, config.vocab_size, prompt_length + steps)

    def ours(numpy_dtype: object, dtype: object) -> np.ndarray:
        cast = {name: tensor.astype(numpy_dtype) for name, tensor in tensors.items()}
        slots, table = all_resident(config, cast)
        shared = shared_tree(config, cast, numpy_dtype)
        return decode_logits(config, shared, slots, table, tokens, prompt_length, dtype)

    def theirs(dtype: object) -> np.ndarray:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation="eager"
        )
        return transformers_logits(model.eval(), tokens, prompt_length)

    reference = theirs(torch.float32)
    errors = {"float32": relative_error(ours(np.float32, jnp.float32), reference)}
    if bfloat16:
        values = {
            "bfloat16": ours(ml_dtypes.bfloat16, jnp.bfloat16),
            "transformers_bfloat16": theirs(torch.bfloat16),
        }
        for name, value in values.items():
            errors[name] = relative_error(value, reference)
            errors[name + "_rms"] = float(
                np.sqrt(np.mean((value - reference) ** 2) / np.mean(reference**2))
            )
            # Most positions lack a token that bfloat16 routes to another expert; the median shows
            # rounding alone.
            per_position = np.abs(value - reference).max(-1) / np.abs(reference).max(-1)
            errors[name + "_median"] = float(np.median(per_position))
    return errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--prompt-length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens")
    parser.add_argument("--bfloat16", action="store_true")
    args = parser.parse_args()
    worst = 0.0
    for directory in args.models:
        errors = compare(directory, args.prompt_length, args.steps, args.bfloat16, args.seed)
        worst = max(worst, errors["float32"])
        print(
            directory.name, *(f"{name}={error:.2e}" for name, error in errors.items()), flush=True
        )
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
