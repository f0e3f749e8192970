"""Types, ranges and relations that every `ModelConfig` has, wherever it came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from specter_jax.config.checks import as_choice, as_count, as_list, as_number, shown

MAX_SIZE = 2**31 - 1
"""Of every single dimension: what an int32 index reaches."""
MAX_LAYERS = 4096
MAX_EXPERTS = 65536

_CHOICES: dict[str, tuple[str, ...]] = {
    "norm": ("rms", "layer"),
    "attention": ("gqa", "mla"),
    "qk_norm": ("none", "head", "full"),
    "routing": ("softmax", "group_limited", "sparse_mixer"),
}
_MAXIMA = {"num_layers": MAX_LAYERS, "num_experts": MAX_EXPERTS}
_MAY_BE_ZERO = {
    "bos_token_id",
    "eos_token_ids",
    "windows",
    "moe_layers",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "dense_intermediate_size",
    "shared_intermediate_size",
}
_POSITIVE_NUMBERS = {
    "norm_eps",
    "qkv_clip",
    "softmax_scale",
    "theta",
    "factor",
    "attention_factor",
    "low_freq_factor",
    "high_freq_factor",
    "short_factor",
    "long_factor",
}


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)}, expected true or false")
    return value


def _integer(name: str, value: Any) -> int:
    field = name.removeprefix("rope.")
    return as_count(
        name,
        value,
        minimum=0 if field in _MAY_BE_ZERO else 1,
        maximum=_MAXIMA.get(field, MAX_SIZE),
    )


def _number(name: str, value: Any) -> float:
    return as_number(name, value, positive=name.removeprefix("rope.") in _POSITIVE_NUMBERS)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "int": _integer,
    "float": _number,
    "bool": _flag,
    "tuple[int, ...]": lambda name, value: [_integer(name, one) for one in as_list(name, value)],
    "tuple[float, ...]": lambda name, value: [_number(name, one) for one in as_list(name, value)],
}
"""By a field's annotation."""


def check_fields(config: Any, choices: dict[str, tuple[str, ...]], prefix: str = "") -> None:
    """Checks each field of a configuration by its annotation and name.

    Args:
        config: a `ModelConfig` or `RopeConfig`.
        choices: valid values of the text fields.
        prefix: of the fields' names in messages.

    Raises:
        ValueError: names the first bad field.
    """
    for field in dataclasses.fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        kind = str(field.type)
        if kind.endswith(" | None"):
            if value is None:
                continue
            kind = kind.removesuffix(" | None")
        if kind == "str":
            as_choice(name, value, choices[field.name])
        elif kind in _CHECKS:
            _CHECKS[kind](name, value)


def check_config(config: Any, families: tuple[str, ...], rope_kinds: tuple[str, ...]) -> None:
    """Checks a `ModelConfig`; raises ValueError with one line that names the field."""
    check_fields(config, {**_CHOICES, "family": families})
    check_fields(config.rope, {"kind": rope_kinds}, "rope.")
    layers = config.moe_layers
    if not layers or list(layers) != sorted(set(layers)) or layers[-1] >= config.num_layers:
        raise ValueError(
            f"moe_layers={shown(list(layers))}, expected ascending decoder layers below "
            f"{config.num_layers}, at least one"
        )
    if len(config.windows) != config.num_layers:
        raise ValueError(
            f"windows has {len(config.windows)} entries, expected {config.num_layers} (num_layers)"
        )
    for name, holds, expected in _relations(config):
        if not holds:
            value = getattr(config.rope if "rope." in name else config, name.split(".")[-1])
            raise ValueError(f"{name}={shown(value)}, expected {expected}")


def _relations(config: Any) -> list[tuple[str, bool, str]]:
    """(field, whether it fits the others, what is expected)."""
    rope = config.rope
    latent = config.attention == "mla"
    rotated = config.head_dim - config.qk_nope_head_dim if latent else config.head_dim
    groups = config.num_groups
    return [
        ("top_k", config.top_k <= config.num_experts, f"at most {config.num_experts} (experts)"),
        (
            "num_kv_heads",
            config.num_heads % config.num_kv_heads == 0,
            f"a divisor of {config.num_heads} (num_heads)",
        ),
        ("num_groups", config.num_experts % groups == 0, f"a divisor of {config.num_experts}"),
        ("top_groups", config.top_groups <= groups, f"at most {groups} (num_groups)"),
        ("kv_lora_rank", not latent or config.kv_lora_rank > 0, "at least 1 with attention mla"),
        ("rope.dim", rope.dim % 2 == 0, "an even number"),
        ("rope.dim", rope.dim == rotated, f"{rotated}, the rotated part of a head"),
        *(
            (
                f"rope.{name}",
                len(getattr(rope, name)) == (rope.dim // 2 if rope.kind == "longrope" else 0),
                "one number for each rotated pair with longrope, none otherwise",
            )
            for name in ("short_factor", "long_factor")
        ),
        (
            "rope.high_freq_factor",
            rope.kind != "llama3" or rope.high_freq_factor > rope.low_freq_factor,
            f"more than {rope.low_freq_factor} (low_freq_factor)",
        ),
    ]
