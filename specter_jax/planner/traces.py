"""Routing traces: what draft and target chose on the same text, the input of a replay.

The file format is that of `scripts/replay_traces.py`: an `.npz` with, for a kind of text ("greedy"
or "sampled"), `<kind>_target_experts` and `<kind>_draft_experts`, integers [M, prompts, positions,
k], `<kind>_target_argmax` and `<kind>_draft_argmax`, integers [prompts, outputs], and
`prompt_tokens`: position `prompt_tokens - 1 + j` is the one that yields output j. A file may also
have `num_experts`, those of a layer, and `source`, where it comes from in words.
"""

from __future__ import annotations

import dataclasses
import os
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from specter_jax.config import ModelConfig
from specter_jax.errors import InvalidRequestError

MIN_OUTPUTS = 2
"""Fewest outputs of a prompt: time per token is counted from the first one on."""

KINDS = ("greedy", "sampled")
_ARRAYS = ("target_experts", "draft_experts", "target_argmax", "draft_argmax")
_COUNTS = ("prompt_tokens", "num_experts")
_ZIP = b"PK"
BUNDLED = Path(__file__).with_name("traces")
"""Traces that come with the package."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutingTrace:
    """Routing of P prompts of equal length and their outputs.

    target_experts, draft_experts: integers [M, P, positions, k], positions = prompt_tokens +
        outputs; target_argmax, draft_argmax: integers [P, outputs], the most likely token of each
        output position; source: where it comes from, in words; num_experts: of a layer of the
        model, None if unknown: not all of them need be chosen.
    """

    target_experts: np.ndarray
    draft_experts: np.ndarray
    target_argmax: np.ndarray
    draft_argmax: np.ndarray
    prompt_tokens: int
    source: str
    num_experts: int | None = None

    @property
    def agree(self) -> np.ndarray:
        """bool [P, outputs]: the target would accept the draft's token."""
        return self.target_argmax == self.draft_argmax

    @property
    def num_prompts(self) -> int:
        """P."""
        return len(self.target_argmax)

    @property
    def num_layers(self) -> int:
        """M, MoE layers."""
        return len(self.target_experts)

    @property
    def highest_expert(self) -> int:
        """The highest id that either chose."""
        return int(max(self.target_experts.max(), self.draft_experts.max()))

    def select(self, num_prompts: int, num_outputs: int) -> RoutingTrace:
        """At most so many prompts, evenly spread, and so many outputs of each.

        Raises InvalidRequestError for no prompts, or fewer than `MIN_OUTPUTS` outputs.
        """
        if num_prompts < 1 or num_outputs < MIN_OUTPUTS:
            raise InvalidRequestError(
                f"{num_prompts} prompts of {num_outputs} new tokens: expected at least 1 of "
                f"{MIN_OUTPUTS}"
            )
        count = min(num_prompts, self.num_prompts)
        chosen = np.unique(np.linspace(0, self.num_prompts - 1, count).round().astype(int))
        outputs = min(num_outputs, self.target_argmax.shape[1])
        end = self.prompt_tokens + outputs
        taken = self.take(chosen)
        return dataclasses.replace(
            taken,
            target_experts=taken.target_experts[:, :, :end],
            draft_experts=taken.draft_experts[:, :, :end],
            target_argmax=taken.target_argmax[:, :outputs],
            draft_argmax=taken.draft_argmax[:, :outputs],
        )

    def take(self, prompts: np.ndarray) -> RoutingTrace:
        """The prompts of these numbers, int [n]."""
        return dataclasses.replace(
            self,
            target_experts=self.target_experts[:, prompts],
            draft_experts=self.draft_experts[:, prompts],
            target_argmax=self.target_argmax[prompts],
            draft_argmax=self.draft_argmax[prompts],
        )

    def fitted(self, config: ModelConfig) -> RoutingTrace:
        """The trace for a model with as many experts and choices, but perhaps more MoE layers.

        Layers are then repeated in place, as often as it takes, and `source` says so. A trace that
        does not know its experts fits a model that has all those it chose.

        Raises:
            InvalidRequestError: experts or choices per token differ, or the model has fewer layers.
        """
        highest, known = self.highest_expert, self.num_experts
        top_k = self.target_experts.shape[-1]
        layers = config.num_moe_layers
        same_experts = highest < config.num_experts and known in (None, config.num_experts)
        if not same_experts or top_k != config.top_k or self.num_layers > layers:
            of_experts = "" if known is None else f" of {known} experts"
            raise InvalidRequestError(
                f"the trace ({self.source}) has {self.num_layers} MoE layers, {top_k} choices a "
                f"token and expert ids up to {highest}{of_experts}; the model has {layers} layers, "
                f"{config.top_k} choices and {config.num_experts} experts"
            )
        if self.num_layers == layers:
            return self
        rows = np.arange(layers) * self.num_layers // layers
        return dataclasses.replace(
            self,
            target_experts=self.target_experts[rows],
            draft_experts=self.draft_experts[rows],
            source=f"{self.source}; {self.num_layers} layers stretched to {layers}",
        )


def load_trace(path: str | os.PathLike[str], kind: str = "greedy") -> RoutingTrace:
    """Reads one kind of text of a trace file.

    Raises:
        InvalidRequestError: it is no trace, lacks that kind, or its shapes contradict one another.
        OSError: the file cannot be opened.
    """
    path = Path(path)
    names = {name: f"{kind}_{name}" for name in _ARRAYS}
    try:
        found = read_arrays(path, (*names.values(), *_COUNTS, "source"))
        missing = {*names.values(), "prompt_tokens"} - set(found)
        if missing:
            raise InvalidRequestError(f"lacks {', '.join(sorted(missing))}")
        counts = {name: _whole_number(name, found[name]) for name in _COUNTS if name in found}
    except InvalidRequestError as error:
        raise InvalidRequestError(
            f"{path}: {error}; expected a routing trace of {kind} text, an .npz file such as "
            "`specter plan --record` writes"
        ) from None
    described = str(found["source"]) if "source" in found else path.name
    trace = RoutingTrace(
        **{field: found[name] for field, name in names.items()},
        **counts,
        source=f"{described}, {kind} text",
    )
    _check(trace, str(path))
    return trace


def read_arrays(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Those of the named arrays that an .npz file has.

    Raises InvalidRequestError with what the file is instead of one, OSError if it cannot be opened.
    """
    if path.is_dir():
        raise InvalidRequestError("is a directory")
    if path.exists() and not path.is_file():
        raise InvalidRequestError("is no regular file")
    with open(path, "rb") as file:
        start = file.read(len(_ZIP))
        if not start:
            raise InvalidRequestError("is empty")
        if start != _ZIP:
            raise InvalidRequestError("is no .npz file")
        if not zipfile.is_zipfile(file):
            raise InvalidRequestError("is cut short or damaged")
        file.seek(0)
        # NumPy lets through whatever damage does to the decompressor or to an array's header.
        try:
            with np.load(file, allow_pickle=False) as archive:
                found = {name: archive[name] for name in names if name in archive}
        except Exception:
            raise InvalidRequestError("is cut short or damaged") from None
    # An entry that is no array comes as bytes.
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}


def _whole_number(name: str, value: np.ndarray) -> int:
    """Raises InvalidRequestError if it is none."""
    if value.ndim != 0 or not np.issubdtype(value.dtype, np.integer):
        raise InvalidRequestError(f"{name} is no whole number")
    return int(value)


def save_trace(trace: RoutingTrace, path: str | os.PathLike[str], kind: str = "greedy") -> None:
    """Writes a trace file with one kind of text; raises OSError."""
    known = {} if trace.num_experts is None else {"num_experts": np.int64(trace.num_experts)}
    with open(path, "wb") as file:
        np.savez_compressed(
            file,
            prompt_tokens=np.int64(trace.prompt_tokens),
            source=np.str_(trace.source),
            **known,
            **{
                f"{kind}_target_experts": trace.target_experts,
                f"{kind}_draft_experts": trace.draft_experts,
                f"{kind}_target_argmax": trace.target_argmax,
                f"{kind}_draft_argmax": trace.draft_argmax,
            },
        )


def bundled_trace(config: ModelConfig) -> RoutingTrace:
    """The trace in the package that was recorded from a model of this shape.

    Raises:
        InvalidRequestError: there is none.
    """
    for path in sorted(BUNDLED.glob("*.npz")):
        try:
            trace = load_trace(path)
            # These choose every expert; where the model has more, the others would stay idle and
            # the figures be too good.
            known = dataclasses.replace(trace, num_experts=trace.highest_expert + 1)
            return known.fitted(config)
        except InvalidRequestError:
            continue
    raise InvalidRequestError(
        f"no trace in the package fits {config.num_moe_layers} MoE layers of {config.num_experts} "
        f"experts, {config.top_k} a token: give one with --trace, or record one with --record"
    )


def _check(trace: RoutingTrace, what: str) -> None:
    """Raises InvalidRequestError if shapes or experts contradict one another."""
    experts, tokens = trace.target_experts, trace.target_argmax
    consistent = (
        experts.ndim == 4
        and experts.size > 0
        and np.issubdtype(experts.dtype, np.integer)
        and trace.draft_experts.shape == experts.shape
        and np.issubdtype(trace.draft_experts.dtype, np.integer)
        and min(int(experts.min()), int(trace.draft_experts.min())) >= 0
        and tokens.ndim == 2
        and tokens.shape == trace.draft_argmax.shape == (experts.shape[1], tokens.shape[-1])
        and trace.prompt_tokens >= 1
        and tokens.shape[1] >= MIN_OUTPUTS
        and experts.shape[2] == trace.prompt_tokens + tokens.shape[1]
    )
    if not consistent:
        raise InvalidRequestError(
            f"{what}: shapes contradict one another: experts {experts.shape} and "
            f"{trace.draft_experts.shape}, tokens {tokens.shape} and {trace.draft_argmax.shape}, "
            f"{trace.prompt_tokens} prompt tokens"
        )
    num_experts, highest = trace.num_experts, trace.highest_expert
    if num_experts is not None and num_experts <= highest:
        raise InvalidRequestError(
            f"{what}: num_experts is {num_experts}, but expert {highest} is chosen"
        )
