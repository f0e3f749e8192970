"""Tabulates predictions over memory budgets and depths, and compares them with measurements."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from specter_jax.errors import BudgetError, InvalidRequestError
from specter_jax.offload import DEFAULT_POLICY, get_policy
from specter_jax.planner.calibration import Calibration
from specter_jax.planner.model import PlannedModel
from specter_jax.planner.policies import check_policy
from specter_jax.planner.replay import replay
from specter_jax.planner.timing import Hardware, Timing
from specter_jax.planner.traces import RoutingTrace
from specter_jax.sizes import format_size
from specter_jax.stats import Stats

MAX_BUDGET = 16 * 2**40
"""Bytes; more than any accelerator has, and what a table shows in full."""

_MAX_TPOT_MS = 1e9
"""Twelve days; beyond, the calibration is at fault, for the hardware's figures are checked."""

CELL_KEYS = ("model", "gpu_memory_bytes", "policy", "depth")
"""What tells cells apart when predictions are compared with measurements."""

Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """A prediction for one budget and depth; `depth` is a number or "auto"."""

    gpu_memory_bytes: int
    expert_slots: int
    depth: int | str
    stats: Stats

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; what a replay yields is called predicted."""
        stats = self.stats
        iterations = max(stats.iterations, 1)
        return {
            "gpu_memory_bytes": self.gpu_memory_bytes,
            "expert_slots": self.expert_slots,
            "depth": self.depth,
            "predicted_tpot_ms": stats.tpot_ms,
            "predicted_hit_rate": stats.hit_rate,
            "predicted_acceptance_rate": stats.acceptance_rate,
            "predicted_tokens_per_iteration": 1.0 + (stats.mean_accepted or 0.0),
            "predicted_bytes_per_token": stats.bytes_host_to_device / max(stats.new_tokens, 1),
            "predicted_draft_ms": stats.draft_ms / iterations,
            "predicted_verify_ms": stats.verify_ms / iterations,
            "predicted_wait_ms": stats.wait_ms / iterations,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Cells by budget, then depth, and what they rest on."""

    model: PlannedModel
    hardware: Hardware
    calibration: Calibration
    trace: RoutingTrace
    policy: str
    cells: tuple[Cell, ...]

    @property
    def budgets(self) -> list[int]:
        """Bytes, ascending."""
        return sorted({cell.gpu_memory_bytes for cell in self.cells})

    def at(self, budget: int) -> list[Cell]:
        """The cells of one budget."""
        return [cell for cell in self.cells if cell.gpu_memory_bytes == budget]

    def best(self, budget: int) -> Cell:
        """The cell of the least time per token among those of fixed depth, if there are any."""
        cells = self.at(budget)
        fixed = [cell for cell in cells if isinstance(cell.depth, int)]
        return min(fixed or cells, key=lambda cell: cell.stats.tpot_ms)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "kind": "predicted",
            "model": str(self.model.path),
            "family": self.model.config.family,
            "expert_format": self.model.expert_format,
            "expert_bytes": self.model.expert_bytes,
            "bandwidth_bytes_per_s": self.hardware.bandwidth,
            "link_bytes_per_s": self.hardware.link,
            "policy": self.policy,
            "trace": self.trace.source,
            "calibration": dataclasses.asdict(self.calibration),
            "cells": [cell.to_dict() for cell in self.cells],
            "best": [
                {"gpu_memory_bytes": budget, "predicted_best_depth": self.best(budget).depth}
                for budget in self.budgets
            ],
        }


def predict(
    model: PlannedModel,
    trace: RoutingTrace,
    hardware: Hardware,
    calibration: Calibration,
    *,
    budgets: Sequence[int],
    depths: Sequence[int | str],
    policy: str = DEFAULT_POLICY,
    max_context: int | None = None,
    progress: Progress | None = None,
) -> Prediction:
    """Replays the trace once for every budget and depth.

    Args:
        budgets: device memory, bytes. depths: 0 to 16, or "auto"; a policy that does not speculate
            has depth 0 only.
        max_context: tokens that memory is set aside for, as for `load`.
        progress: called as `(what, done, total)`.

    Raises:
        BudgetError: a budget cannot hold the model's fixed parts.
        InvalidRequestError: trace and model do not fit together, or an argument is out of range.
    """
    if not get_policy(policy).speculative:
        depths = (0,)
    if not depths:
        raise InvalidRequestError("give at least one depth")
    sizes = check_request(model, budgets=budgets, policy=policy, max_context=max_context)
    fitted = trace.fitted(model.config)
    timing = Timing(model=model.read_bytes(), hardware=hardware, calibration=calibration)
    todo = [(budget, depth) for budget in budgets for depth in depths]
    cells = []
    for done, (budget, depth) in enumerate(todo):
        if progress is not None:
            progress("replaying", done, len(todo))
        num_slots, max_in_flight = sizes[budget]
        stats = replay(
            model.config,
            fitted,
            timing,
            num_slots=num_slots,
            max_in_flight=max_in_flight,
            depth=depth,
            policy=policy,
        )
        if not 0 < stats.tpot_ms < _MAX_TPOT_MS:
            raise InvalidRequestError(
                f"the predicted time per token is {stats.tpot_ms:g} ms; expected 0 to "
                f"{_MAX_TPOT_MS:g}: the calibration's figures are out of range"
            )
        cells.append(
            Cell(gpu_memory_bytes=budget, expert_slots=num_slots, depth=depth, stats=stats)
        )
    if progress is not None:
        progress("replaying", len(todo), len(todo))
    return Prediction(
        model=model,
        hardware=hardware,
        calibration=calibration,
        trace=fitted,
        policy=policy,
        cells=tuple(cells),
    )


def check_request(
    model: PlannedModel, *, budgets: Sequence[int], policy: str, max_context: int | None = None
) -> dict[int, tuple[int, int]]:
    """What `predict` can refuse without a trace, to be asked before one is recorded.

    Returns expert slots and transfers in flight by budget. Raises as `predict` does.
    """
    check_policy(policy)
    if not budgets:
        raise InvalidRequestError("give at least one budget")
    if max(budgets) > MAX_BUDGET:
        raise InvalidRequestError(
            f"a budget of {format_size(max(budgets))} is more than any device has; expected at "
            f"most {format_size(MAX_BUDGET)}"
        )
    return {budget: model.sizes(budget, max_context) for budget in budgets}


def feasible(model: PlannedModel, budgets: Iterable[int], max_context: int | None) -> list[int]:
    """Those budgets that can hold the model's fixed parts, ascending, up to the first that holds
    everything."""
    total = model.config.num_moe_layers * model.config.num_experts
    found = []
    for budget in sorted(set(budgets)):
        try:
            num_slots = model.sizes(budget, max_context)[0]
        except BudgetError:
            continue
        found.append(budget)
        if num_slots == total:
            break
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Predicted against measured time per token.

    cells: per cell its keys, `predicted_tpot_ms`, `measured_tpot_ms` and `error`, predicted over
    measured less 1; mean_error: mean of the errors' magnitudes.
    """

    cells: tuple[dict[str, Any], ...]
    mean_error: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"cells": list(self.cells), "mean_error": self.mean_error}


def compare(
    predicted: Iterable[Mapping[str, Any]],
    measured: Iterable[Mapping[str, Any]],
    keys: Sequence[str] = CELL_KEYS,
) -> Comparison:
    """Errors of predicted times per token, over the cells that were both predicted and measured.

    Args:
        predicted: cells with `keys` and `predicted_tpot_ms`. measured: with `keys` and `tpot_ms`.
            A key that a cell lacks counts as None.

    Raises:
        InvalidRequestError: no cell is in both, a cell is there twice, or a time is not above 0.
    """
    guesses = _by_key(predicted, keys, "predicted_tpot_ms")
    truths = _by_key(measured, keys, "tpot_ms")
    common = [key for key in truths if key in guesses]
    if not common:
        raise InvalidRequestError(
            f"no cell is both predicted ({len(guesses)}) and measured ({len(truths)}); cells are "
            f"told apart by {', '.join(keys)}"
        )
    cells = []
    for key in common:
        cells.append(
            dict(zip(keys, key, strict=True))
            | {
                "predicted_tpot_ms": guesses[key],
                "measured_tpot_ms": truths[key],
                "error": guesses[key] / truths[key] - 1,
            }
        )
    return Comparison(
        cells=tuple(cells), mean_error=math.fsum(abs(c["error"]) for c in cells) / len(cells)
    )


def _by_key(
    cells: Iterable[Mapping[str, Any]], keys: Sequence[str], value: str
) -> dict[tuple[Any, ...], float]:
    found: dict[tuple[Any, ...], float] = {}
    for cell in cells:
        key, time = tuple(cell.get(name) for name in keys), cell.get(value)
        if not isinstance(time, int | float) or not 0 < time < math.inf:
            raise InvalidRequestError(f"{value} of cell {key} is {time!r}; expected ms above 0")
        if key in found:
            raise InvalidRequestError(f"cell {key} is there twice")
        found[key] = float(time)
    return found
