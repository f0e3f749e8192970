"""The timing model: what each piece of work takes, from bytes, bandwidths and fixed costs.

Decoding reads weights and does little else, so a program's time is its bytes over the bandwidth
that it reaches, plus a fixed time for every layer (launches, small kernels). Nothing here knows
routing, caches or the order of events; times are seconds.
"""

from __future__ import annotations

import dataclasses

from specter_jax.errors import InvalidRequestError
from specter_jax.planner.calibration import Calibration
from specter_jax.planner.cards import Card

_MICRO = 1e-6

FIGURES = {"bandwidth": ("TB/s", 1e12, 1e-3, 1e3), "link": ("GB/s", 1e9, 1e-3, 1e4)}
"""Of each figure of hardware: the unit people write, in bytes per second, least and most of them.

Wide enough for any machine; beyond, predictions are numbers without a meaning."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """What one model's programs read, in bytes.

    layer: shared parameters of a decoder layer, mean over layers; head: the output matrix;
    draft_expert: an INT4 expert; expert: a full-precision expert on the link and in a slot;
    expert_read: what verification reads of an expert (nested ones need the draft's too);
    is_nested: whether it is put together from both.
    """

    num_layers: int
    layer: float
    head: float
    draft_expert: float
    expert: float
    expert_read: float
    is_nested: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """Nominal bandwidths in bytes per second, of device memory and of the link, one direction.

    Raises InvalidRequestError for a figure beyond the range in `FIGURES`.
    """

    bandwidth: float
    link: float

    def __post_init__(self) -> None:
        for name, (unit, size, least, most) in FIGURES.items():
            value = getattr(self, name)
            if not least * size <= value <= most * size:
                raise InvalidRequestError(
                    f"{name} is {value / size:g} {unit}; expected {least:g} to {most:g} {unit}"
                )

    @classmethod
    def of_card(cls, card: Card) -> Hardware:
        """The nominal figures of a card."""
        return cls(bandwidth=card.bandwidth * 1e12, link=card.link * 1e9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Times in seconds on `hardware`, as far as `calibration` says it is used."""

    model: ModelBytes
    hardware: Hardware
    calibration: Calibration

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a device copy reaches."""
        return self.hardware.bandwidth * self.calibration.memory_efficiency

    @property
    def link(self) -> float:
        """Bytes per second that transfers from pinned memory reach."""
        return self.hardware.link * self.calibration.link_efficiency

    def draft_step(self, num_experts: int) -> float:
        """One step of the draft that reads `num_experts` experts, over all layers."""
        model = self.model
        shared = self._read(model.num_layers * model.layer + model.head)
        experts = num_experts * model.draft_expert
        fixed = model.num_layers * self.calibration.draft_layer_us * _MICRO
        return shared + experts / (self.bandwidth * self.calibration.draft_efficiency) + fixed

    def verification(self, num_experts: int) -> float:
        """The target in one program, with `num_experts` distinct (layer, expert) read."""
        return self.model.num_layers * self.layer() + self.experts(num_experts) + self.head()

    def layer(self) -> float:
        """One layer of the target but for its routed experts."""
        fixed = self.calibration.verify_layer_us * _MICRO
        return self._read(self.model.layer) + fixed

    def experts(self, num_experts: int) -> float:
        """Full-precision experts, each read once."""
        calibration = self.calibration
        nested = self.model.is_nested
        share = calibration.nested_efficiency if nested else calibration.verify_efficiency
        return num_experts * self.model.expert_read / (self.bandwidth * share)

    def head(self) -> float:
        """The output matrix."""
        return self._read(self.model.head)

    def _read(self, num_bytes: float) -> float:
        """What the target's programs need for so many bytes of weights that are not nested."""
        return num_bytes / (self.bandwidth * self.calibration.verify_efficiency)

    def commit(self, num_experts: int) -> float:
        """Writing arrived experts into slots, by one program: read and written once each."""
        each = 2 * self.model.expert / self.bandwidth
        each += self.calibration.commit_expert_us * _MICRO
        return self.calibration.commit_call_us * _MICRO + num_experts * each

    def transfer(self) -> float:
        """One expert's way over a busy link; an idle one adds `latency` before the first."""
        return self.model.expert / self.link + self.calibration.transfer_expert_us * _MICRO

    @property
    def latency(self) -> float:
        """From issuing a transfer on an idle link until its bytes flow."""
        return self.calibration.transfer_latency_us * _MICRO

    @property
    def issue(self) -> float:
        """Host time for each expert fetched: to choose a slot for it and start its transfer."""
        return self.calibration.issue_us * _MICRO

    @property
    def poll(self) -> float:
        """Host time for asking whether a transfer has arrived."""
        return self.calibration.poll_us * _MICRO

    @property
    def dispatch(self) -> float:
        """Host time for each program dispatched."""
        return self.calibration.dispatch_us * _MICRO

    @property
    def draft_call(self) -> float:
        """Host time to hand over a program of draft steps, with all its layers' arrays."""
        return self.calibration.draft_call_us * _MICRO

    @property
    def verify_call(self) -> float:
        """Host time to hand over the verification of all layers."""
        return self.calibration.verify_call_us * _MICRO

    @property
    def meeting(self) -> float:
        """Host time from a program's end until its small results are read."""
        return self.calibration.meeting_us * _MICRO

    @property
    def boundary(self) -> float:
        """Host time for the end of a draft chunk, besides what its transfers take."""
        return self.calibration.boundary_us * _MICRO

    @property
    def host_layer(self) -> float:
        """Host time for one layer of a verification that goes layer by layer, besides transfers."""
        return self.calibration.host_layer_us * _MICRO
