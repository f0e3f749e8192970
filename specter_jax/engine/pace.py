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
_CHUNK_MS = 3.0
"""What one chunk more costs: updating the graph, and host work beside it that slows dispatching.
Five chunks instead of one cost 12 ms on an H200 with 16 GiB of DeepSeek-V2-Lite shapes."""
_LAG = 2
"""A chunk's transfers start when the chunk behind it has run as well, which is dispatched before
they are: their destinations are allocated on the compute stream."""


def chunk_length(
    num_steps: int, least: int, *, loads: float, in_flight: int, load_ms: float, step_ms: float
) -> int:
    """Draft steps in a chunk, `least` to `num_steps`.

    The number of chunks that costs least: each costs something, and hides the transfers of the
    earlier ones, as many as staging buffers take.

    loads: experts that an iteration could fetch before its draft ends. in_flight: staging buffers.
    load_ms, step_ms: time of one transfer and of one draft step.
    """
    least = min(least, num_steps)
    best, best_ms = num_steps, 0.0
    for length in range(num_steps - 1, least - 1, -1):
        count = math.ceil(num_steps / length)
        hiding_ms = max(0, num_steps - _LAG * length) * step_ms
        handed_over = min(loads, max(0, count - _LAG) * in_flight)
        cost_ms = (count - 1) * _CHUNK_MS - min(handed_over * load_ms, hiding_ms)
        if cost_ms < best_ms:
            best, best_ms = length, cost_ms
    return best


@dataclasses.dataclass
class Pace:
    """Running averages of what `chunk_length` goes by; until the first iteration, chunks are short.

    loads: experts an iteration could fetch in time. step_ms: time of a draft step, without the
    meetings.
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
