"""What one iteration did and took, and the averages and laws by which depths are compared."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class IterationTiming:
    """What one iteration did and took: times in ms of wall time on the host.

    Counts are over the active rows of the batch, each of which gains its accepted tokens and one
    more. `judged` counts drafted tokens up to and including each row's first refusal; None derives
    it, exactly for one row.
    """

    depth: int
    new_tokens: int
    drafted: int
    accepted: int
    draft_ms: float
    wait_ms: float
    verify_ms: float
    total_ms: float
    bytes_loaded: int = 0
    judged: int | None = None

    @property
    def rows(self) -> int:
        """Active rows of the batch."""
        return max(self.new_tokens - self.accepted, 1)

    @property
    def tokens_per_row(self) -> float:
        """What a sequence gained on average."""
        return self.new_tokens / self.rows


def expected_tokens(alpha: float, depth: int) -> float:
    """Tokens one iteration yields: 1 + alpha + ... + alpha^depth."""
    if alpha >= 1.0:
        return depth + 1.0
    return (1.0 - alpha ** (depth + 1)) / (1.0 - alpha)


@dataclasses.dataclass
class Average:
    """A mean at first, an exponential average once 1 / rate values are in."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float, rate: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(rate, 1.0 / self.count)


@dataclasses.dataclass
class MeasuredDepth:
    """Averages of one depth's iterations."""

    total_ms: Average = dataclasses.field(default_factory=Average)
    draft_ms: Average = dataclasses.field(default_factory=Average)
    verify_ms: Average = dataclasses.field(default_factory=Average)
    wait_ms: Average = dataclasses.field(default_factory=Average)
    # Tokens per row over what the formula said at the time.
    tokens_ratio: Average = dataclasses.field(default_factory=Average)
    iterations: int = 0
    last_iteration: int = 0
    last_was_outlier: bool = False
    # A first cost was taken for a cold start and left out; that happens once per depth.
    refused_cold: bool = False


def extend_line(points: list[tuple[float, float]], x: float) -> float:
    """Piecewise linear through the points (x, y), read at `x`.

    Beyond them the outer slope goes on, never downwards; a single point is taken as constant.
    """
    points = sorted(points)
    if len(points) == 1:
        return points[0][1]
    right = next((i for i in range(1, len(points)) if points[i][0] >= x), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    slope = (y1 - y0) / (x1 - x0)
    if not x0 <= x <= x1:
        slope = max(slope, 0.0)
    anchor_x, anchor_y = (x1, y1) if x > x1 else (x0, y0)
    return max(anchor_y + slope * (x - anchor_x), 0.0)
