"""How many draft steps run between two meetings with the host.

A meeting costs the device a pause, in which the host chooses experts and starts their transfers.
Few meetings are enough where little has to be fetched; where much has, transfers should start as
soon as anything is known of what is needed.
"""

from __future__ import annotations

import dataclasses
import math

_MEMORY = 0.3
"""Weight of the newest iteration in the averages."""
_MARGIN = 1.5
"""Transfers should take no more than the steps left to them over this."""


def chunk_length(
    num_steps: int, least: int, *, loads: float, in_flight: int, load_ms: float, step_ms: float
) -> int:
    """Draft steps in a chunk, `least` to `num_steps`.

    As long as leaves, after the first chunk, time enough for the expected transfers, and meetings
    enough to hand them over half the staging buffers at a time.

    loads: experts that an iteration fetches. in_flight: staging buffers. load_ms, step_ms: time of
    one transfer and of one draft step.
    """
    least = min(least, num_steps)
    steps_of_loads = _MARGIN * loads * load_ms / step_ms if step_ms > 0 else math.inf
    in_time = max(least, num_steps - steps_of_loads)
    meetings = math.ceil(2 * loads / max(1, in_flight))
    return max(least, min(int(in_time), num_steps // (1 + meetings)))


@dataclasses.dataclass
class Pace:
    """Running averages of what `chunk_length` goes by; until the first iteration, chunks are short.

    loads: experts fetched per iteration. step_ms: time of a draft step without the meetings.
    """

    loads: float = math.inf
    step_ms: float = 0.0

    def observe(self, *, loads: int, steps: int, draft_ms: float) -> None:
        """Takes in one iteration: `steps` draft steps took `draft_ms` without the meetings."""
        step_ms = draft_ms / max(1, steps)
        if math.isinf(self.loads):
            self.loads, self.step_ms = float(loads), step_ms
            return
        self.loads += _MEMORY * (loads - self.loads)
        self.step_ms += _MEMORY * (step_ms - self.step_ms)

    def chunk(self, num_steps: int, least: int, *, in_flight: int, load_ms: float) -> int:
        """`chunk_length` by the averages."""
        if math.isinf(self.loads):
            return min(least, num_steps)
        return chunk_length(
            num_steps,
            least,
            loads=self.loads,
            in_flight=in_flight,
            load_ms=load_ms,
            step_ms=self.step_ms,
        )
