"""Rotary position embedding options, from the old and the new style of config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specter_jax.config.checks import as_number
from specter_jax.config.fields import HfFields
from specter_jax.errors import UnsupportedModelError

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Everything that decides the rotation angles of one model.

    kind: one of `ROPE_KINDS`. dim: number of rotated channels of a head (even). theta: base
    wavelength. attention_factor: multiplies cos and sin; None means the kind's own rule.
    original_max: context length before scaling, in tokens. interleaved: pairs are channels
    (2i, 2i+1) instead of (i, i + dim/2). short_mscale and long_mscale replace the attention factor
    where a family says so (phimoe). long_frequencies: whether positions beyond `original_max` use
    `long_factor`.
    """

    kind: str = "default"
    dim: int
    theta: float
    interleaved: bool = False
    max_context: int
    original_max: int
    factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    long_frequencies: bool = True
    short_mscale: float | None = None
    long_mscale: float | None = None

    @property
    def depends_on_length(self) -> bool:
        """Whether a token's rotation depends on more than its position (see `models/rope.py`)."""
        return bool(self.long_factor) or self.long_mscale is not None


def rope_from_hf(
    fields: HfFields, *, dim: int, max_context: int, default_theta: float, interleaved: bool
) -> RopeConfig:
    """Reads `rope_parameters`, or `rope_scaling` with `rope_theta`, as transformers does.

    `rope_scaling` wins over `rope_parameters`; `rope_theta` inside the dictionary wins over the
    top-level one; a top-level `original_max_position_embeddings` wins over the one inside.
    Raises `UnsupportedModelError` naming the field.
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    scaling = fields.get(name, {})
    if not isinstance(scaling, dict):
        raise fields.reject(name, "an object")
    rope = HfFields(fields.family, _prefixed(name, scaling))
    if any(isinstance(value, dict) for value in scaling.values()):
        raise fields.reject(name, "one set of parameters for all layers")

    def key(field: str) -> str:
        return f"{name}.{field}"

    kind = rope.get(key("rope_type"), rope.get(key("type"), "default"))
    if kind not in ROPE_KINDS:
        field = "rope_type" if rope.get(key("rope_type")) is not None else "type"
        raise rope.reject(key(field), "one of " + ", ".join(ROPE_KINDS))
    partial = rope.number(key("partial_rotary_factor"), fields.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModelError(
            f"{fields.family}: config field partial_rotary_factor={partial} is not supported; "
            "expected 1.0"
        )
    if dim % 2:
        raise UnsupportedModelError(
            f"{fields.family}: rotary embedding needs an even head size, got {dim}"
        )
    theta = rope.number(key("rope_theta"), fields.number("rope_theta", default_theta))
    common: dict[str, Any] = {
        "kind": kind,
        "dim": dim,
        "theta": theta,
        "interleaved": interleaved,
        "max_context": max_context,
        "original_max": max_context,
    }
    if kind == "default":
        return RopeConfig(**common)
    if kind in ("yarn", "longrope", "llama3"):
        original = fields.optional_integer("original_max_position_embeddings")
        common["original_max"] = original or rope.integer(
            key("original_max_position_embeddings"), max_context
        )
    options = _scaling_options(kind, rope, key, common["original_max"], dim, max_context)
    if fields.family == "phimoe":
        options |= _phimoe_options(rope, key)
        if kind not in ("yarn", "longrope", "llama3"):
            # transformers compares lengths with this field, so it must be there.
            common["original_max"] = rope.integer(key("original_max_position_embeddings"))
    return RopeConfig(**common, **options)


def _prefixed(name: str, scaling: dict[str, Any]) -> dict[str, Any]:
    """Keys as they should read in an error, e.g. `rope_scaling.factor`."""
    return {f"{name}.{key}": value for key, value in scaling.items()}


def _scaling_options(
    kind: str,
    rope: HfFields,
    key: Callable[[str], str],
    original_max: int,
    dim: int,
    max_context: int,
) -> dict[str, Any]:
    """The fields of `RopeConfig` that belong to one kind of scaling."""
    ratio = max_context / original_max
    may_infer = kind in ("yarn", "longrope")
    if not may_infer and rope.get(key("factor")) is None:
        raise rope.reject(key("factor"), f"a number (rope type {kind})")
    options: dict[str, Any] = {"factor": rope.number(key("factor"), ratio)}
    if kind == "yarn":
        options |= {
            # 0 counts as absent in the next four, as in transformers.
            "beta_fast": rope.number(key("beta_fast"), 0.0, positive=False) or 32.0,
            "beta_slow": rope.number(key("beta_slow"), 0.0, positive=False) or 1.0,
            "mscale": rope.number(key("mscale"), 0.0, positive=False),
            "mscale_all_dim": rope.number(key("mscale_all_dim"), 0.0, positive=False),
            "truncate": rope.flag(key("truncate"), True),
        }
    if kind == "llama3":
        for field in ("low_freq_factor", "high_freq_factor"):
            if rope.get(key(field)) is None:
                raise rope.reject(key(field), "a number (rope type llama3)")
            options[field] = rope.number(key(field), 1.0)
    if kind == "longrope":
        for field in ("short_factor", "long_factor"):
            value = rope.get(key(field))
            if not isinstance(value, list) or len(value) != dim // 2:
                raise rope.reject(key(field), f"a list of {dim // 2} numbers")
            try:
                options[field] = tuple(as_number(field, v, positive=True) for v in value)
            except ValueError:
                raise rope.reject(key(field), f"{dim // 2} positive finite numbers") from None
    if may_infer and rope.get(key("attention_factor")) is not None:
        options["attention_factor"] = rope.number(key("attention_factor"), 1.0)
    return options


def _phimoe_options(rope: HfFields, key: Callable[[str], str]) -> dict[str, Any]:
    """phimoe multiplies cos and sin by short_mscale or long_mscale whatever the kind.

    Its transformers implementation recomputes the frequencies without a length, so it always uses
    the short factors; only the multiplier changes beyond the original context.
    """
    options: dict[str, Any] = {"long_frequencies": False}
    for field in ("short_mscale", "long_mscale"):
        if rope.get(key(field)) is None:
            raise rope.reject(key(field), "a number (phimoe with a rope type other than default)")
        options[field] = rope.number(key(field), 1.0)
    return options
