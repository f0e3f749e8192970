"""Evict what is expected to be used last: the draft's prediction first, learned chances after it.

The optimum (Belady 1966) evicts what will be used furthest in the future. Of that future an
online order knows two things.

*This sweep.* The draft's routing names the experts of the layers still to come, almost without
error. An expert predicted for layer `lay` when `next_layer` is the first not yet executed is used
in `lay - next_layer` layers' time.

*Later sweeps.* Everything else returns in the next sweep at the earliest. If p is its chance of
use per sweep, the expected wait is M (1/p - 1) layers on top of the way to its layer,
M - next_layer + lay; together M/p + (lay - next_layer). The second term is scaled down by
`DISTANCE_WEIGHT`: p is only an estimate and changes, and what a place in the sweep saves is one
part of a turn, while an expert with a high p earns its slot turn after turn.

For p stands the discounted chance of reuse v: a use in the next sweep counts 1, one in the sweep
after it g, then g^2. So v = y + (1 - y) g v' with y = 1 if the next sweep uses the expert and v'
the v of one sweep later. The discount is per token, g = exp(-T / `HORIZON_TOKENS`) with T tokens
in a sweep: after a sweep of nine tokens nearly all that counts is the next one, after a sweep of
one token the next few count together.

*While the draft still runs*, its prediction covers a share c of the tokens. An expert not named
so far is named by the rest with chance r = 1 - (1 - q)^(1 - c), q being its chance of use in this
sweep, q = v (1 - g) / (1 - g v) for a v that stays as it is; its distance is the mixture of both
cases.

The value v is a logistic function of seven features of (layer, expert): the log-odds of a fast
and of a slow moving average of use, the time since the last use, the vote of similar moments in
the past for the next sweep (`routing_history`), that vote times how good the match was, the vote
for the next `VOTE_TOKENS` tokens, and a constant. The weights start from values fitted on
recorded routing and are refined by one Newton step per sweep on the log-loss against
y + (1 - y) g v' (temporal difference learning with a recursive least-squares step and
forgetting), so each model and each kind of use gets its own.
"""

from __future__ import annotations

import numpy as np

from specter_jax.offload.routing_history import RoutingHistory

DISTANCE_WEIGHT = 0.3
FAST_DECAY, SLOW_DECAY = 0.3, 0.98
"""Of the moving averages of use, per sweep."""
FORGETTING = 0.995
"""Per sweep: the weights answer to about the last 200 sweeps."""
PRIOR_STRENGTH = 400.0
"""Curvature that stands for the initial weights; one sweep of 1,664 experts adds about 200."""
INITIAL_WEIGHTS = (0.0, 0.2, 0.1, -0.25, 0.6, 0.2, 0.2)
"""Constant, fast, slow, time since use, vote, vote times likeness, longer vote."""
HORIZON_TOKENS = 6.0
VOTE_TOKENS = 9
INITIAL_RATE = 0.3


class LookaheadEviction:
    """The default eviction order; see the module's text. Implements `EvictionPolicy`."""

    ranks_absent = True
    per_layer = False

    def __init__(self, num_layers: int, num_experts: int) -> None:
        shape = (num_layers, num_experts)
        self._shape = shape
        self._layer = np.arange(num_layers, dtype=np.float64)[:, None]
        self._history = RoutingHistory(num_layers, num_experts)
        # What was learned from finished sweeps.
        self._fast = np.full(shape, INITIAL_RATE)
        self._slow = np.full(shape, INITIAL_RATE)
        self._since = np.full(shape, 3.0)
        self._weights = np.array(INITIAL_WEIGHTS)
        self._curvature = np.eye(len(INITIAL_WEIGHTS)) * PRIOR_STRENGTH
        self._pending: np.ndarray | None = None  # features that v was computed from last sweep
        # The sweep under way.
        self._used = np.zeros(shape, bool)
        self._predicted = np.zeros(shape, bool)
        self._executed = np.zeros(num_layers, bool)
        self._stale = np.ones(num_layers, bool)
        self._asked = False
        self._coverage = 0.0
        self._fingerprints: np.ndarray | None = None
        self._tokens_per_sweep = 1
        self._vote: tuple[np.ndarray, float] | None = None
        self._vote_is_current = False
        self._chance_now: np.ndarray | None = None
        # The last answer of `retention`, as long as nothing has been reported since.
        self._retention: tuple[int, np.ndarray] | None = None
        self._features = np.zeros((*shape, len(INITIAL_WEIGHTS)))
        self._turns = np.ones(shape)  # M / v, in layers

    def begin_iteration(
        self,
        predicted: np.ndarray | None = None,
        *,
        coverage: float = 1.0,
        routing: np.ndarray | None = None,
    ) -> None:
        """A new sweep is coming; see `EvictionPolicy`."""
        self._retention = None
        self._used[:] = False
        self._executed[:] = False
        self._asked = False
        self._fingerprints = None
        self._chance_now = None
        if predicted is None:
            predicted, coverage = np.zeros(self._shape, bool), 0.0
        self.update_prediction(predicted, coverage=coverage, routing=routing)

    def update_prediction(
        self,
        predicted: np.ndarray,
        *,
        coverage: float = 1.0,
        routing: np.ndarray | None = None,
    ) -> None:
        """The prediction grew; the arithmetic waits until `retention` asks for it."""
        self._retention = None
        self._predicted = np.array(predicted, bool)
        self._coverage = float(coverage)
        if routing is not None:
            self._fingerprints = self._history.pack(np.asarray(routing))
            if coverage > 0:
                self._tokens_per_sweep = round(self._fingerprints.shape[1] / coverage)
        self._vote_is_current = False
        self._stale[:] = True

    def observe_layer(self, layer: int, used: np.ndarray) -> None:
        """The sweep uses these experts in this layer."""
        self._retention = None
        self._used[layer, np.asarray(used, np.int64)] = True
        self._executed[layer] = True
        # A complete prediction is as good as the observation; a partial one is not.
        if self._coverage < 1:
            self._stale[layer] = True

    def end_iteration(
        self, committed: np.ndarray | None = None, *, routing: np.ndarray | None = None
    ) -> None:
        """Learn from the sweep: weights, averages of use, history."""
        self._retention = None
        # Without evictions nobody asked, and there is nothing to learn from.
        if self._asked:
            if self._stale.any():
                self._refresh()
            if self._pending is not None:
                self._learn(self._pending, self._used)
            self._pending = self._features.copy()
        else:
            self._pending = None
        used = self._used
        self._fast += (1 - FAST_DECAY) * (used - self._fast)
        self._slow += (1 - SLOW_DECAY) * (used - self._slow)
        self._since = np.where(used, 0.0, self._since + 1)
        fingerprints = self._fingerprints
        if routing is not None:
            fingerprints = self._history.pack(np.asarray(routing))
            self._tokens_per_sweep = fingerprints.shape[1]
        if committed is not None and fingerprints is not None:
            self._history.commit(fingerprints, committed)
        self._fingerprints = None

    def loaded(self, layer: int, expert: int) -> None:
        """Nothing to do: being placed does not make an expert more useful."""

    def retention(self, next_layer: int) -> np.ndarray:
        """float [M, E]: minus the expected distance of the next use, in layers."""
        self._asked = True
        if self._stale.any():
            self._refresh()
        if self._retention is not None and self._retention[0] == next_layer:
            return self._retention[1]
        ahead = self._layer - next_layer
        distance = self._turns + DISTANCE_WEIGHT * ahead
        to_come = ahead >= 0
        if self._coverage < 1:
            rest = np.where(to_come, self._rest(), 0.0)
            distance = rest * ahead + (1 - rest) * distance
        retention = -np.where(self._predicted & to_come, ahead, distance)
        retention.flags.writeable = False
        self._retention = (next_layer, retention)
        return retention

    def chance(self) -> np.ndarray:
        """float [M, E]: estimated chance that the sweep after this one uses each expert."""
        if self._stale.any():
            self._refresh()
        return self._undiscounted(len(self._layer) / self._turns)

    def _discount(self) -> float:
        """g: what a use one sweep later counts for."""
        return float(np.exp(-self._tokens_per_sweep / HORIZON_TOKENS))

    def _undiscounted(self, value: np.ndarray) -> np.ndarray:
        """Chance of use in the next sweep alone, of an expert whose value stays as it is."""
        discount = self._discount()
        return value * (1 - discount) / (1 - discount * value)

    def _votes(self, fingerprints: np.ndarray | None) -> tuple[np.ndarray, float] | None:
        """What followed similar moments: chances float [2, M, E], and the likeness."""
        sweep = self._tokens_per_sweep
        return self._history.chances(fingerprints, (sweep, max(sweep, VOTE_TOKENS)))

    def _refresh(self) -> None:
        """Recompute the value for the layers that changed."""
        if not self._vote_is_current:
            self._vote = self._votes(self._fingerprints)
            self._vote_is_current = True
        rows = np.flatnonzero(self._stale)
        known = self._predicted[rows].astype(np.float64)
        if self._coverage < 1:
            known = np.maximum(known, self._rest()[rows])
            executed = self._executed[rows][:, None]
            known = np.where(executed, self._used[rows], known)
        features = _features(
            FAST_DECAY * self._fast[rows] + (1 - FAST_DECAY) * known,
            SLOW_DECAY * self._slow[rows] + (1 - SLOW_DECAY) * known,
            (self._since[rows] + 1) * (1 - known),
            self._vote,
            rows,
        )
        self._features[rows] = features
        self._turns[rows] = len(self._layer) / _sigmoid(features @ self._weights)
        self._stale[:] = False

    def _rest(self) -> np.ndarray:
        """float [M, E]: chance that the tokens not drafted yet will need the expert."""
        if self._chance_now is None:
            rows = np.arange(len(self._layer))
            features = _features(self._fast, self._slow, self._since, self._votes(None), rows)
            self._chance_now = self._undiscounted(_sigmoid(features @ self._weights))
        return 1 - (1 - self._chance_now) ** (1 - self._coverage)

    def _learn(self, features: np.ndarray, used: np.ndarray) -> None:
        """One Newton step on the log-loss of the values that these features gave.

        Args:
            features: float [M, E, 7], of the sweep before this one.
            used: bool [M, E], what this sweep used.
        """
        later = len(self._layer) / self._turns
        target = np.where(used, 1.0, self._discount() * later).reshape(-1)
        x = features.reshape(-1, features.shape[-1])
        value = _sigmoid(x @ self._weights)
        self._curvature *= FORGETTING
        self._curvature += (x * (value * (1 - value))[:, None]).T @ x
        self._weights = self._weights + np.linalg.solve(self._curvature, x.T @ (target - value))


def _features(
    fast: np.ndarray,
    slow: np.ndarray,
    since: np.ndarray,
    vote: tuple[np.ndarray, float] | None,
    rows: np.ndarray,
) -> np.ndarray:
    """float [rows, E, 7]; without a vote the averages stand in for it, with no confidence."""
    if vote is None:
        voted = longer = _log_odds((fast + slow) / 2)
        confidence = 0.0
    else:
        voted, longer = _log_odds(vote[0][0, rows]), _log_odds(vote[0][1, rows])
        confidence = 2 * vote[1] - 1
    columns = (
        np.ones_like(fast),
        _log_odds(fast),
        _log_odds(slow),
        np.log1p(since),
        voted,
        voted * confidence,
        longer,
    )
    return np.stack(columns, axis=-1)


def _log_odds(chance: np.ndarray) -> np.ndarray:
    """log(p / (1 - p)) with p kept 2 % away from 0 and 1, so that no evidence is final."""
    chance = 0.02 + 0.96 * chance
    return np.log(chance / (1 - chance))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), kept in 0.001..1 so that distances stay finite."""
    return np.maximum(1 / (1 + np.exp(-x)), 1e-3)
