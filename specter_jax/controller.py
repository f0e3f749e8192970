"""How many tokens to draft: fixed, or chosen from what this run has measured.

In a dense model a deeper draft is nearly free to verify. In a mixture of experts every further
token brings experts of its own, so time per output token has a minimum inside, or at 0 where
drafting does not pay at all. The controller estimates, for every depth K of a few buckets,

    tpot(K) = (draft(K) + verify(K) + wait(K) + rest) / tokens(K)
    tokens(K) = (1 - alpha^(K + 1)) / (1 - alpha)      (Leviathan et al. 2023, equation 1)

with alpha the acceptance rate. Measured depths use their measured cost; for others drafting grows
in proportion to K, verification with the number of positions, waiting with log2(K + 1), as the
number of distinct experts roughly does.
"""

import math
from collections.abc import Sequence
from typing import Any

from specter_jax.arguments import as_integer
from specter_jax.config.checks import shown
from specter_jax.depth_costs import IterationTiming, MeasuredDepth, expected_tokens, extend_line
from specter_jax.errors import InvalidRequestError
from specter_jax.runtime_config import MAX_DEPTH

PLAIN_DEPTH = 0
DEPTH_BUCKETS = (PLAIN_DEPTH, 1, 2, 4, 8, 16)

# Depths of the first iterations. The first one's cost is not used: the cache is cold then.
PROBES = (4, PLAIN_DEPTH, 4, PLAIN_DEPTH)
COLD_ITERATIONS = 1
# A first cost this many times above what is to be expected was a cold start as well.
COLD_FACTOR = 4.0

# Another depth must promise this much less time per token before it is taken; plain decoding,
# which drafting must never be slower than, needs to promise less.
HYSTERESIS = 0.03
PLAIN_HYSTERESIS = 0.01

# Share of all time that trying other depths may cost beyond what the chosen one would have taken,
# and iterations for which a measurement counts as fresh, and can speak against trying again.
EXPLORE_SHARE = 0.02
FRESH_ITERATIONS = 16
FORGET_ITERATIONS = 160

# Averages forget. A new cost counts 1/16, and more the longer its depth was not run, up to 1/2: an
# old average says little about now. Tokens count 1/128, for they scatter far more: at alpha 0.95
# and depth 16 by half of their mean.
COST_RATE = 1 / 16
STALE_COST_RATE = 1 / 2
COST_RATE_PER_IDLE_ITERATION = 1 / 32
TOKENS_RATE = 1 / 128
# The measured token count of a depth is trusted like the formula's after this many iterations.
TOKENS_PRIOR_ITERATIONS = 64
# A single cost above this multiple of the average enters as that multiple: a hiccup of the host. A
# second one in a row is believed.
OUTLIER_FACTOR = 2.0
OUTLIER_MIN_COUNT = 3
# Judged tokens that alpha remembers, and the belief it starts from.
ALPHA_MEMORY = 800.0
PRIOR_ALPHA, PRIOR_JUDGED = 0.9, 16.0


AUTO = "auto"


def parse_depth(depth: int | str) -> int | None:
    """A requested depth, as a number or its digits: 0 to MAX_DEPTH, or None for "auto".

    Raises:
        InvalidRequestError: anything else.
    """
    if isinstance(depth, str):
        if depth == AUTO:
            return None
        number: object = int(depth) if depth.isascii() and depth.isdigit() else depth
    else:
        number = depth
    try:
        return as_integer("depth", number, PLAIN_DEPTH, MAX_DEPTH)
    except InvalidRequestError:
        raise InvalidRequestError(
            f"depth is {shown(depth)}; expected an integer from 0 to {MAX_DEPTH} (0 does not "
            'speculate), or "auto"'
        ) from None


class DepthController:
    """Chooses the depth of the next iteration; deterministic given what it observed.

    `next_depth()` says what to run, `observe(...)` is told how it went. With `fixed` it always says
    that. Keep one controller for as long as its measurements hold: one model, policy and batch
    size; several generations may share it.
    """

    def __init__(self, fixed: int | None = None, buckets: Sequence[int] = DEPTH_BUCKETS):
        """Raises InvalidRequestError if `fixed` is out of range."""
        self._fixed = None if fixed is None else parse_depth(fixed)
        self._buckets = tuple(sorted({PLAIN_DEPTH, *buckets}))
        self._measured = {depth: MeasuredDepth() for depth in self._buckets}
        self._iteration = 0
        self._chosen = self._nearest(PROBES[0])
        self._next = self._chosen
        self._accepted, self._judged = PRIOR_ALPHA * PRIOR_JUDGED, PRIOR_JUDGED
        self._elapsed_ms = 0.0
        self._explored_ms = 0.0

    @property
    def auto(self) -> bool:
        """True unless the depth is fixed."""
        return self._fixed is None

    @property
    def chosen(self) -> int:
        """The depth held to be best; single iterations may try others."""
        return self._chosen if self._fixed is None else self._fixed

    @property
    def alpha(self) -> float:
        """Estimated probability that the target accepts a drafted token it judges."""
        return self._accepted / self._judged

    @property
    def exploration_ms(self) -> float:
        """Time lost so far to trying depths other than the chosen one, after the first probes."""
        return self._explored_ms

    def next_depth(self) -> int:
        """The depth to run next; the same until the next `observe`."""
        return self._next if self._fixed is None else self._fixed

    def likely_depth(self) -> int:
        """The depth after the next `observe`, unless that changes the choice or tries another."""
        if self._fixed is not None:
            return self._fixed
        if self._iteration + 1 < len(PROBES):
            return self._nearest(PROBES[self._iteration + 1])
        return self._chosen

    def observe(self, timing: IterationTiming) -> None:
        """Take in one iteration and decide on the next."""
        self._update_alpha(timing)
        if self._fixed is not None or timing.depth not in self._measured:
            return
        exploring = self._iteration >= len(PROBES) and timing.depth != self._chosen
        if exploring:
            usual_ms = timing.tokens_per_row * self._tpot_ms(self._chosen)
            excess = timing.total_ms - usual_ms
            self._explored_ms += max(excess, 0.0)
        if self._iteration >= COLD_ITERATIONS:
            self._update_costs(timing)
            # What was compiled along the way buys no exploration.
            self._elapsed_ms += min(timing.total_ms, OUTLIER_FACTOR * self._cost_ms(timing.depth))
        self._iteration += 1
        if self._iteration < len(PROBES):
            self._next = self._nearest(PROBES[self._iteration])
            return
        self._choose()
        tried = self._exploration()
        self._next = self._chosen if tried is None else tried

    def table(self) -> list[dict[str, Any]]:
        """One row per depth for reports: measured or predicted cost, tokens and time per token."""
        return [
            {
                "depth": depth,
                "iterations": self._measured[depth].iterations,
                "source": "measured" if self._has_cost(depth) else "predicted",
                "cost_ms": self._cost_ms(depth),
                "tokens": self._tokens(depth),
                "tpot_ms": self._tpot_ms(depth),
                "chosen": depth == self.chosen,
            }
            for depth in self._buckets
        ]

    def _nearest(self, depth: int) -> int:
        return min(self._buckets, key=lambda bucket: (abs(bucket - depth), bucket))

    def _has_cost(self, depth: int) -> bool:
        return self._measured[depth].total_ms.count > 0

    def _update_alpha(self, timing: IterationTiming) -> None:
        judged = timing.judged
        if judged is None:
            judged = min(timing.accepted + timing.rows, timing.drafted)
        kept = max(0.0, 1.0 - judged / ALPHA_MEMORY)
        self._accepted = self._accepted * kept + timing.accepted
        self._judged = self._judged * kept + judged

    def _update_costs(self, timing: IterationTiming) -> None:
        measured = self._measured[timing.depth]
        average = measured.total_ms
        if self._first_was_cold(timing):
            measured = self._measured[timing.depth] = MeasuredDepth(refused_cold=True)
            average = measured.total_ms
        elif self._is_cold(timing):
            measured.refused_cold = True
            measured.last_iteration = self._iteration
            return
        ceiling = OUTLIER_FACTOR * average.value
        outlier = average.count >= OUTLIER_MIN_COUNT and timing.total_ms > ceiling
        believed = not outlier or measured.last_was_outlier
        scale = 1.0 if believed else ceiling / timing.total_ms
        idle = self._iteration - measured.last_iteration
        rate = min(max(COST_RATE, idle * COST_RATE_PER_IDLE_ITERATION), STALE_COST_RATE)
        for name in ("total_ms", "draft_ms", "verify_ms", "wait_ms"):
            getattr(measured, name).add(getattr(timing, name) * scale, rate)
        measured.iterations += 1
        measured.last_iteration = self._iteration
        measured.last_was_outlier = outlier
        ratio = timing.tokens_per_row / expected_tokens(self.alpha, timing.depth)
        measured.tokens_ratio.add(ratio, TOKENS_RATE)

    def _is_cold(self, timing: IterationTiming) -> bool:
        """A depth's first cost is far above what other depths predict: something was compiled or
        read for the first time."""
        measured = self._measured[timing.depth]
        # Plain decoding alone does not tell what drafting costs.
        informed = any(depth > PLAIN_DEPTH and self._has_cost(depth) for depth in self._buckets)
        predicted = self._predicted_ms(timing.depth) if informed else 0.0
        first = measured.total_ms.count == 0 and not measured.refused_cold
        return first and 0 < predicted * COLD_FACTOR < timing.total_ms

    def _first_was_cold(self, timing: IterationTiming) -> bool:
        """A depth's second cost is far below its first."""
        measured = self._measured[timing.depth]
        second = measured.total_ms.count == 1 and not measured.refused_cold
        return second and timing.total_ms * COLD_FACTOR < measured.total_ms.value

    def _tokens(self, depth: int) -> float:
        """Expected tokens per row: the formula, corrected by what the depth really yielded."""
        ratio = self._measured[depth].tokens_ratio
        trust = ratio.count / (ratio.count + TOKENS_PRIOR_ITERATIONS)
        correction = 1.0 + trust * (ratio.value - 1.0)
        return max(1.0, expected_tokens(self.alpha, depth) * correction)

    def _cost_ms(self, depth: int) -> float:
        """Time of one iteration at this depth: measured, else predicted."""
        if self._has_cost(depth):
            return self._measured[depth].total_ms.value
        return self._predicted_ms(depth)

    def _predicted_ms(self, depth: int) -> float:
        """Time of one iteration at this depth from what other depths took, lately if possible."""
        others = {d: m for d, m in self._measured.items() if d != depth and self._has_cost(d)}
        known = {d: m for d, m in others.items() if self._age(d) < FORGET_ITERATIONS} or others
        if not known:
            return self._measured[depth].total_ms.value
        per_token = [m.draft_ms.value / d for d, m in known.items() if d > 0]
        draft = depth * (sum(per_token) / len(per_token) if per_token else 0.0)
        verify = extend_line([(d, m.verify_ms.value) for d, m in known.items()], depth)
        wait = extend_line(
            [(math.log2(d + 1), m.wait_ms.value) for d, m in known.items()], math.log2(depth + 1)
        )
        rest = [
            m.total_ms.value - m.draft_ms.value - m.verify_ms.value - m.wait_ms.value
            for m in known.values()
        ]
        return max(draft + verify + wait + sum(rest) / len(rest), 0.0)

    def _tpot_ms(self, depth: int) -> float:
        return self._cost_ms(depth) / self._tokens(depth)

    def _choose(self) -> None:
        current = self._tpot_ms(self._chosen)
        best = min(self._buckets, key=lambda depth: (self._tpot_ms(depth), depth))
        if self._chosen != PLAIN_DEPTH:
            plain = self._tpot_ms(PLAIN_DEPTH)
            if best == PLAIN_DEPTH and plain < (1.0 - PLAIN_HYSTERESIS) * current:
                self._chosen = PLAIN_DEPTH
                return
        if self._tpot_ms(best) < (1.0 - HYSTERESIS) * current:
            self._chosen = best

    def _age(self, depth: int) -> int:
        """Iterations since this depth was run."""
        return self._iteration - self._measured[depth].last_iteration

    def _exploration(self) -> int | None:
        """A depth worth one iteration: plain decoding, a neighbour of the chosen one or the second
        best, whichever is most overdue, if what it is likely to cost fits the budget."""
        place = self._buckets.index(self._chosen)
        others = [depth for depth in self._buckets if depth != self._chosen]
        neighbours = self._buckets[max(place - 1, 0) : place + 2]
        candidates = {PLAIN_DEPTH, *neighbours, min(others, key=self._tpot_ms)} - {self._chosen}
        budget = EXPLORE_SHARE * self._elapsed_ms - self._explored_ms
        best_tpot = self._tpot_ms(self._chosen)

        def overdue(depth: int) -> float:
            # What was twice as slow is tried four times as rarely.
            slower = max(self._tpot_ms(depth) / best_tpot, 1.0) if best_tpot > 0 else 1.0
            return self._age(depth) / (FRESH_ITERATIONS * slower**2)

        for depth in sorted(candidates, key=lambda depth: (-overdue(depth), depth)):
            if overdue(depth) < 1.0:
                return None
            stale = self._age(depth) >= FORGET_ITERATIONS
            cost = self._predicted_ms(depth) if stale else self._cost_ms(depth)
            excess = cost - self._tokens(depth) * best_tpot
            if max(excess, 0.0) <= budget:
                return depth
        return None
