"""Published models at their true size, made from small trained ones of the same family.

The published checkpoints need not be at hand: `stretch_checkpoint.py` (in the data directory, with
the small checkpoints) widens a trained model to the published tensor shapes and keeps its text, its
routing and how well INT4 agrees with it. Tensors are made one by one while the model is loaded.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from convert import ArraySource, InMemoryCheckpoint, LazyTensor
from specter_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrueSize:
    """A published model: the small checkpoint it is made from, and its vocabulary."""

    name: str
    source: str
    vocab: int
    budgets_gib: tuple[int, ...]


MODELS = {
    model.name: model
    for model in (
        TrueSize(
            name="deepseek-v2-lite",
            source="tiny-deepseek_v2",
            vocab=102400,
            budgets_gib=(16, 24, 32),
        ),
        TrueSize(
            name="qwen1.5-moe-a2.7b",
            source="tiny-qwen2_moe",
            vocab=151936,
            budgets_gib=(16, 24, 32),
        ),
        TrueSize(name="phi-3.5-moe", source="tiny-phimoe", vocab=32064, budgets_gib=(32, 48)),
    )
}


def source_directory(data: Path, model: str) -> Path:
    """The small checkpoint: in the data directory, or among the tests' own data."""
    name = MODELS[model].source
    for folder in (data / name, Path(__file__).parents[2] / "tests" / "data" / name):
        if folder.is_dir():
            return folder
    raise SystemExit(f"{data / name}: no such directory; it must hold the small checkpoint")


def true_config(data: Path, model: str, num_layers: int | None = None) -> dict[str, Any]:
    """`config.json` of the model at its true size, or with fewer layers."""
    stretch = _stretch(data)
    source = stretch.read_config(source_directory(data, model))
    return stretch.target_config(source, model, vocab=MODELS[model].vocab, num_layers=num_layers)


def model_config(data: Path, model: str) -> ModelConfig:
    """The runtime's configuration of the model at its true size."""
    return ModelConfig.from_hf(true_config(data, model), {})


def true_checkpoint(
    data: Path, model: str, *, expert_format: str, num_workers: int, num_layers: int | None = None
) -> InMemoryCheckpoint:
    """The model, converted while it is loaded; make it before anything starts the GPU."""
    source = source_directory(data, model)
    config = true_config(data, model, num_layers)
    stretched = _stretch(data).Stretch(source, config, seed=0)

    def lazy(name: str) -> LazyTensor:
        shape = tuple(stretched.recipes[name].shape)
        return LazyTensor(
            shape=shape, dtype=np.dtype(ml_dtypes.bfloat16), read=lambda: stretched.build(name)
        )

    tensors = ArraySource(config, {name: lazy(name) for name in stretched.recipes}, identity=model)
    return InMemoryCheckpoint(
        tensors,
        tokenizer_path=source,
        num_workers=num_workers,
        processes=True,
        expert_format=expert_format,
    )


def _stretch(data: Path) -> Any:
    """The module `stretch_checkpoint` of the data directory."""
    if str(data) not in sys.path:
        sys.path.insert(0, str(data))
    import stretch_checkpoint

    return stretch_checkpoint
