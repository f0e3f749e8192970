"""How depth pays off on this machine: time per token, working set and acceptance over depth.

A deeper draft shares one verification among more tokens, but every further token brings experts of
its own and is accepted less often; the best depth lies in between. Specter calls this the depth
profile (Wang et al., "Specter: Fast MoE Inference via Quantization-Enabled Multi-Step Speculative
Offloading").
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from specter_jax.controller import DEPTH_BUCKETS
from specter_jax.errors import InvalidRequestError
from specter_jax.offload import DEFAULT_POLICY, get_policy

if TYPE_CHECKING:
    from specter_jax.model import Model


Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DepthPoint:
    """What was measured at one depth."""

    depth: int
    # Time per output token after the first, ms.
    tpot_ms: float
    # Of drafted tokens that the target judged, the share it accepted; None for plain decoding.
    acceptance_rate: float | None
    # Tokens per verification of one sequence, the target's own included.
    tokens_per_iteration: float
    # Distinct experts that one verification uses, mean over layers: the working set.
    experts_per_layer: float
    # Share of expert uses that never waited, and bytes moved to the device per new token.
    hit_rate: float | None
    bytes_per_token: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """A depth profile: points by depth, and what they were measured on."""

    points: tuple[DepthPoint, ...]
    family: str
    num_experts: int
    top_k: int
    expert_slots: int
    policy: str
    device: str

    @property
    def best(self) -> DepthPoint:
        """The point with the least time per token."""
        return min(self.points, key=lambda point: point.tpot_ms)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields, and the best depth."""
        return {**dataclasses.asdict(self), "best_depth": self.best.depth}


def profile(
    model: "Model",
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    depths: Sequence[int] = DEPTH_BUCKETS,
    policy: str = DEFAULT_POLICY,
    progress: Progress | None = None,
) -> Profile:
    """Generate greedily from the prompts at every depth.

    Args:
        max_new_tokens: per prompt, at least 2; ends of sequence are ignored, so that all depths
            generate the same tokens.
        depths: 0 is plain decoding.
        policy: a speculative one.
        progress: called as `(what, done, total)`.

    Raises:
        InvalidRequestError: the policy does not speculate, an argument is out of range, or the
            context leaves every prompt only one new token.
    """
    from specter_jax.api import generate

    require_speculative(policy)
    require_measurable(max_new_tokens)
    points = []
    for number, depth in enumerate(depths):
        if progress is not None:
            progress(f"depth {depth}", number, len(depths))
        # Twice, and the second run counts: the first compiles, for exactly these shapes.
        for _ in range(2):
            result = generate(
                model,
                prompts,
                max_new_tokens=max_new_tokens,
                depth=depth,
                policy=policy,
                ignore_eos=True,
            )
        points.append(_point(depth, result.stats, model.config.num_moe_layers))
    return Profile(
        points=tuple(points),
        family=model.config.family,
        num_experts=model.config.num_experts,
        top_k=model.config.top_k,
        expert_slots=model.runtime.num_slots,
        policy=policy,
        device=model.device.device_kind,
    )


def require_speculative(policy: str) -> None:
    """Raises InvalidRequestError for a policy without speculation, which has no depth."""
    if not get_policy(policy).speculative:
        raise InvalidRequestError(
            f"policy {policy} does not speculate, so it has no depth; choose another one"
        )


def require_measurable(max_new_tokens: int) -> None:
    """Raises InvalidRequestError for outputs too short for a time per token."""
    if max_new_tokens < 2:
        raise InvalidRequestError(
            f"max_new_tokens is {max_new_tokens}; expected at least 2, to have a time per token"
        )


def _point(depth: int, stats, num_moe_layers: int) -> DepthPoint:
    if stats.tpot_ms is None:
        raise InvalidRequestError(
            "every output is one token long, which has no time per token; give a larger "
            "max_context, a larger max_new_tokens or shorter prompts"
        )
    uses = stats.resident_hits + stats.prefetch_hits + stats.demand_misses
    steps = max(stats.iterations, 1)
    return DepthPoint(
        depth=depth,
        tpot_ms=stats.tpot_ms,
        acceptance_rate=stats.acceptance_rate,
        tokens_per_iteration=1.0 + (stats.mean_accepted or 0.0),
        experts_per_layer=uses / (steps * num_moe_layers),
        hit_rate=stats.hit_rate,
        bytes_per_token=stats.bytes_host_to_device / max(stats.new_tokens, 1),
    )
