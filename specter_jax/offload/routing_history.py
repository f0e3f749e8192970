"""What followed the last time: use of experts predicted from similar moments in the past.

Text repeats itself, in whole phrases and in kinds of words, and tokens alike are routed alike.
A token's routing over all layers is its fingerprint: the history keeps one bit per (layer,
expert) for every committed token, finds the earlier tokens whose fingerprint (and whose
predecessors') is most like the newest one's, and lets each vote for the experts that the tokens
after it used. This is prompt lookup, with routing in the place of token ids, so a close match
that is not an exact one still counts.

The likeness of the history's token j to the newest token t is the share of common choices,

    s_j = sum_a w_a |h_(j-a) & h_(t-a)| / (M k sum_a w_a),    a = 0, 1, 2

and the votes of the best `NUM_NEIGHBOURS` are weighted by exp(SHARPNESS (s_j - max s)).
"""

from __future__ import annotations

import numpy as np

RECENCY_WEIGHTS = (1.0, 0.7, 0.5)
"""w_a: weight of the newest token and of the two before it."""
NUM_NEIGHBOURS = 128
SHARPNESS = 15.0
"""A neighbour with 1/15 fewer common choices than the best has exp(-1) of its weight."""
CAPACITY = 2048
"""Tokens remembered, over all sequences (about 200 bytes each at 1,664 experts)."""
MIN_TOKENS = 16
"""With fewer tokens there is nothing worth asking."""


class RoutingHistory:
    """Fingerprints of the committed tokens of each sequence (row of the batch).

    Args:
        num_layers: M.
        num_experts: E.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.num_layers = num_layers
        self.num_experts = num_experts
        self._num_words = -(-num_layers * num_experts // 64)
        self._rows: list[np.ndarray] = []  # per sequence: uint64 [tokens, words]

    def pack(self, routing: np.ndarray) -> np.ndarray:
        """Fingerprints uint64 [B, T, words] of int [M, B, T, k]; masked tokens give zeros."""
        num_layers, batch, tokens, top_k = routing.shape
        # One spare bit per layer takes the masked tokens' id, num_experts.
        bits = np.zeros((batch * tokens, num_layers, self.num_experts + 1), bool)
        ids = routing.reshape(num_layers, -1, top_k).transpose(1, 0, 2)
        np.put_along_axis(bits, ids.astype(np.int64), True, axis=2)
        flat = np.zeros((batch * tokens, self._num_words * 64), bool)
        flat[:, : num_layers * self.num_experts] = bits[:, :, : self.num_experts].reshape(
            batch * tokens, -1
        )
        packed = np.packbits(flat, axis=1).view(np.uint64)
        return packed.reshape(batch, tokens, self._num_words)

    def commit(self, fingerprints: np.ndarray, num_committed: np.ndarray) -> None:
        """Append the first `num_committed[b]` tokens of each row b of uint64 [B, T, words].

        A batch of another size than before starts over.
        """
        batch = len(fingerprints)
        if len(self._rows) != batch:
            self._rows = [np.zeros((0, self._num_words), np.uint64) for _ in range(batch)]
        limit = max(MIN_TOKENS, CAPACITY // batch)
        for row, count in enumerate(np.asarray(num_committed).tolist()):
            if count:
                joined = np.concatenate([self._rows[row], fingerprints[row, :count]])
                self._rows[row] = joined[-limit:]

    def chances(
        self, provisional: np.ndarray | None, windows: tuple[int, ...]
    ) -> tuple[np.ndarray, float] | None:
        """Chance that an expert is used by one of the next tokens, for several window lengths.

        Args:
            provisional: uint64 [B, T, words], tokens drafted after the committed ones, or None.
            windows: how many tokens of each sequence to look ahead, W numbers.

        Returns:
            (float [W, M, E], likeness 0..1 of the best match averaged over sequences), or None
            when there is too little history. Over sequences the chances combine as if independent.
        """
        unused, likenesses = None, []
        for row, tokens in enumerate(self._rows):
            if provisional is not None and len(provisional) == len(self._rows):
                drafted = provisional[row]
                tokens = np.concatenate([tokens, drafted[drafted.any(axis=1)]])
            found = _neighbours(tokens, windows[0])
            if found is None:
                continue
            best, weight, likeness = found
            votes = np.stack([self._vote(tokens, best, weight, size) for size in windows])
            unused = 1 - votes if unused is None else unused * (1 - votes)
            likenesses.append(likeness)
        if unused is None:
            return None
        chances = (1 - unused).reshape(len(windows), self.num_layers, self.num_experts)
        return chances, float(np.mean(likenesses))

    def _vote(
        self, tokens: np.ndarray, best: np.ndarray, weight: np.ndarray, window: int
    ) -> np.ndarray:
        """float [M * E]: weighted share of neighbours whose next `window` tokens use the expert."""
        after = np.minimum(best[:, None] + 1 + np.arange(window), len(tokens) - 1)
        follows = np.bitwise_or.reduce(tokens[after], axis=1)
        bits = np.unpackbits(follows.view(np.uint8), axis=1)
        return weight @ bits[:, : self.num_layers * self.num_experts]


def _neighbours(tokens: np.ndarray, num_ahead: int) -> tuple[np.ndarray, np.ndarray, float] | None:
    """Indices and weights (sum 1) of the tokens most like the last one, and the best likeness."""
    total = len(tokens)
    # Neighbours need successors; half a sweep of them will do.
    num_candidates = total - max(1, num_ahead // 2)
    if total < MIN_TOKENS or num_candidates < MIN_TOKENS // 2:
        return None
    likeness = np.zeros(num_candidates, np.float32)
    for age, weight in enumerate(RECENCY_WEIGHTS):
        common = np.bitwise_count(tokens[: num_candidates - age] & tokens[total - 1 - age])
        likeness[age:] += weight * common.sum(axis=1)
    likeness /= sum(RECENCY_WEIGHTS) * max(1, int(np.bitwise_count(tokens[-1]).sum()))
    count = min(NUM_NEIGHBOURS, num_candidates)
    best = np.argpartition(-likeness, count - 1)[:count]
    highest = float(likeness[best].max())
    weight = np.exp(SHARPNESS * (likeness[best] - highest))
    return best, weight / weight.sum(), highest
