"""What a generation did and what it cost: counters while it runs, a frozen summary after it."""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specter_jax.sizes import format_size

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """Statistics of one generation, or of several merged ones.

    A rate or mean whose denominator is 0 is None, for example `acceptance_rate` when nothing was
    drafted. Times are wall time on the host, in milliseconds.
    """

    # Sequences generated, and tokens they gained, the one after each prompt included.
    sequences: int
    new_tokens: int
    # Verifications after the prefill; one plain decoding step counts as one.
    iterations: int
    # The same, counted once for every sequence that took part.
    row_iterations: int
    # Tokens drafted; those the target judged (up to and including a row's first refusal; what was
    # drafted behind a refusal is never judged); those it accepted.
    drafted: int
    judged: int
    accepted: int
    # accepted / row_iterations: drafted tokens of a sequence accepted per verification.
    mean_accepted: float | None
    # accepted / judged: how often the target agrees with a drafted token whose prefix it accepted,
    # which does not depend on depth (alpha in Leviathan et al. 2023).
    acceptance_rate: float | None
    # accepted / drafted: the share of drafting work that was of use; falls with depth.
    draft_yield: float | None
    # The target's (token, layer, expert) choices at positions that the draft also ran, and those
    # that the draft's routing had named for the same token; their ratio.
    expert_choices: int
    expert_matches: int
    expert_match_rate: float | None
    # Expert uses of verification, one per distinct (layer, expert) of an iteration: the weights
    # were there before the iteration, came by prefetch in time, or had to be waited for.
    resident_hits: int
    prefetch_hits: int
    demand_misses: int
    # (resident_hits + prefetch_hits) / all three: uses that never waited.
    hit_rate: float | None
    # Verifications that had to be resumed after a miss.
    resumes: int
    # Expert weights moved from host to device, prefill included, in bytes; and the prefill's part.
    bytes_host_to_device: int
    prefill_bytes_host_to_device: int
    # From the start of a batch (compiled, and no other running) to its first tokens; the prefill is
    # the part on the device.
    ttft_ms: float
    prefill_ms: float
    # From the first token to the last; per token of one sequence: decode_ms / (its tokens - 1).
    decode_ms: float
    tpot_ms: float | None
    # Drafting and verification, which make up decode_ms but for bookkeeping. wait_ms is part of
    # them: the host waiting for expert transfers. boundary_ms is part of draft_ms: waiting,
    # after a chunk, for the choice of experts and the start of their transfers, which run beside.
    wait_ms: float
    boundary_ms: float
    draft_ms: float
    verify_ms: float
    # Most device memory in use at any time, in bytes; where the device does not report it (CPU),
    # the bytes of all arrays on it at the end.
    peak_device_bytes: int
    # depth -> iterations run at that depth.
    depths: Mapping[int, int]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields under their own names; depths get string keys, as JSON requires."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["depths"] = {str(depth): count for depth, count in sorted(self.depths.items())}
        return fields


@dataclasses.dataclass(kw_only=True)
class StatsRecorder:
    """The counters an engine increments while it generates one batch; `summary` closes them.

    The one mutable object of this module. Counters carry the names of `Stats`.
    """

    clock: Callable[[], float] = time.perf_counter
    sequences: int = 1
    new_tokens: int = 0
    iterations: int = 0
    row_iterations: int = 0
    drafted: int = 0
    judged: int = 0
    accepted: int = 0
    expert_choices: int = 0
    expert_matches: int = 0
    resident_hits: int = 0
    prefetch_hits: int = 0
    demand_misses: int = 0
    resumes: int = 0
    bytes_host_to_device: int = 0
    prefill_bytes_host_to_device: int = 0
    prefill_ms: float = 0.0
    wait_ms: float = 0.0
    boundary_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    peak_device_bytes: int = 0
    depths: Counter[int] = dataclasses.field(default_factory=Counter)
    started: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None

    def __post_init__(self) -> None:
        if self.started is None:
            self.started = self.clock()

    def first_token(self) -> None:
        """Mark the moment the batch's first tokens are known; only the first call counts."""
        if self.first_token_at is None:
            self.first_token_at = self.clock()

    def finish(self) -> None:
        """Mark the moment the batch's last token is known."""
        self.finished_at = self.clock()

    def record_iteration(
        self, depth: int, num_drafted: Sequence[int], num_accepted: Sequence[int]
    ) -> None:
        """Count one verification.

        Args:
            depth: the depth bucket it ran at.
            num_drafted, num_accepted: per active row of the batch.
        """
        drafted = np.asarray(num_drafted, np.int64)
        accepted = np.asarray(num_accepted, np.int64)
        self.iterations += 1
        self.row_iterations += len(drafted)
        self.depths[int(depth)] += 1
        self.drafted += int(drafted.sum())
        self.accepted += int(accepted.sum())
        # The first refused token was judged too, unless there was none left to refuse.
        self.judged += int(np.minimum(accepted + 1, drafted).sum())

    @contextlib.contextmanager
    def timed(self, counter: str) -> Iterator[None]:
        """Add the time spent inside to one of the `_ms` counters, also when it raises."""
        begin = self.clock()
        try:
            yield
        finally:
            setattr(self, counter, getattr(self, counter) + (self.clock() - begin) * 1e3)

    def summary(self) -> Stats:
        """The statistics so far; an unfinished generation is taken to end now."""
        first = self.first_token_at
        end = self.finished_at if self.finished_at is not None else self.clock()
        ttft_ms = ((first if first is not None else end) - self.started) * 1e3
        decode_ms = (end - first) * 1e3 if first is not None else 0.0
        later_tokens = self.new_tokens - self.sequences
        # Sequences of a batch advance together: each waits decode_ms for its own tokens.
        tpot_ms = _ratio(decode_ms * self.sequences, later_tokens)
        uses = self.resident_hits + self.prefetch_hits + self.demand_misses
        return Stats(
            sequences=self.sequences,
            new_tokens=self.new_tokens,
            iterations=self.iterations,
            row_iterations=self.row_iterations,
            drafted=self.drafted,
            judged=self.judged,
            accepted=self.accepted,
            mean_accepted=_ratio(self.accepted, self.row_iterations),
            acceptance_rate=_ratio(self.accepted, self.judged),
            draft_yield=_ratio(self.accepted, self.drafted),
            expert_choices=self.expert_choices,
            expert_matches=self.expert_matches,
            expert_match_rate=_ratio(self.expert_matches, self.expert_choices),
            resident_hits=self.resident_hits,
            prefetch_hits=self.prefetch_hits,
            demand_misses=self.demand_misses,
            hit_rate=_ratio(self.resident_hits + self.prefetch_hits, uses),
            resumes=self.resumes,
            bytes_host_to_device=self.bytes_host_to_device,
            prefill_bytes_host_to_device=self.prefill_bytes_host_to_device,
            ttft_ms=ttft_ms,
            prefill_ms=self.prefill_ms,
            decode_ms=decode_ms,
            tpot_ms=tpot_ms,
            wait_ms=self.wait_ms,
            boundary_ms=self.boundary_ms,
            draft_ms=self.draft_ms,
            verify_ms=self.verify_ms,
            peak_device_bytes=self.peak_device_bytes,
            depths=dict(sorted(self.depths.items())),
        )


def merge(stats: Sequence[Stats]) -> Stats:
    """Statistics of several generations run one after another.

    Counters and times add up, rates are formed again from the summed counters, `ttft_ms` is the
    mean per sequence, `tpot_ms` the mean per token after a first one, the peak the largest.

    Raises:
        ValueError: `stats` is empty.
    """
    if not stats:
        raise ValueError("merge needs at least one Stats; got none")

    def total(name: str) -> Any:
        return sum(getattr(one, name) for one in stats)

    depths: Counter[int] = Counter()
    for one in stats:
        depths.update(one.depths)
    hits = total("resident_hits") + total("prefetch_hits")
    return Stats(
        sequences=total("sequences"),
        new_tokens=total("new_tokens"),
        iterations=total("iterations"),
        row_iterations=total("row_iterations"),
        drafted=total("drafted"),
        judged=total("judged"),
        accepted=total("accepted"),
        mean_accepted=_ratio(total("accepted"), total("row_iterations")),
        acceptance_rate=_ratio(total("accepted"), total("judged")),
        draft_yield=_ratio(total("accepted"), total("drafted")),
        expert_choices=total("expert_choices"),
        expert_matches=total("expert_matches"),
        expert_match_rate=_ratio(total("expert_matches"), total("expert_choices")),
        resident_hits=total("resident_hits"),
        prefetch_hits=total("prefetch_hits"),
        demand_misses=total("demand_misses"),
        hit_rate=_ratio(hits, hits + total("demand_misses")),
        resumes=total("resumes"),
        bytes_host_to_device=total("bytes_host_to_device"),
        prefill_bytes_host_to_device=total("prefill_bytes_host_to_device"),
        ttft_ms=_weighted((one.ttft_ms, one.sequences) for one in stats) or 0.0,
        prefill_ms=total("prefill_ms"),
        decode_ms=total("decode_ms"),
        tpot_ms=_weighted((one.tpot_ms, one.new_tokens - one.sequences) for one in stats),
        wait_ms=total("wait_ms"),
        boundary_ms=total("boundary_ms"),
        draft_ms=total("draft_ms"),
        verify_ms=total("verify_ms"),
        peak_device_bytes=max(one.peak_device_bytes for one in stats),
        depths=dict(sorted(depths.items())),
    )


def merge_recorders(recorders: Sequence[StatsRecorder]) -> Stats:
    """`merge` of the recorders' summaries."""
    return merge([recorder.summary() for recorder in recorders])


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None


def _weighted(pairs: Iterator[tuple[float | None, int]]) -> float | None:
    """Weighted mean of the values that exist."""
    known = [(value, weight) for value, weight in pairs if value is not None and weight > 0]
    return _ratio(sum(v * w for v, w in known), sum(w for _, w in known))


def render_table(stats: Stats, title: str = "Statistics") -> "Table":
    """A two-column rich table: name and value, in the order of `Stats`."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("statistic", no_wrap=True)
    table.add_column("value", justify="right")
    for name in (field.name for field in dataclasses.fields(stats)):
        table.add_row(name, format_value(name, getattr(stats, name)))
    return table


def format_value(name: str, value: Any) -> str:
    """A statistic as people read it: rates in percent, times in ms, bytes in binary units."""
    if value is None:
        return "-"
    if name == "depths":
        return " ".join(f"{depth}:{count}" for depth, count in sorted(value.items())) or "-"
    if name.endswith("_rate") or name == "draft_yield":
        return f"{value:.1%}"
    if name.endswith("_ms"):
        return f"{value:,.2f} ms"
    if "bytes" in name:
        return format_size(value)
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
