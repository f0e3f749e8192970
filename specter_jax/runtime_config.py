"""What the runtime is told besides the model: sizes of buffers and the shape buckets."""

from __future__ import annotations

import dataclasses

MAX_DEPTH = 16
"""Deepest speculation that is compiled for; verification then runs 17 positions."""

DTYPES = ("bfloat16", "float32")
"""Types of computation; the first is the usual one, the second checks it."""

KV_SLACK = MAX_DEPTH + 2
"""KV entries beyond the longest sequence: a verification may write past what is kept."""

MIN_VERIFY_TOKENS = 2
"""Verification never runs on one row alone: XLA takes a matrix-vector path for it that rounds
differently, and plain decoding must equal speculation bit for bit."""

# Few and far apart: a program of a large model takes long to compile, padding costs little.
_PREFILL_BUCKETS = (32, 128, 512, 2048)
_KV_BUCKETS = (256, 1024)
_KV_MULTIPLE = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Buffer sizes and schedule of one loaded model.

    num_slots: full-precision experts the cache holds.
    max_in_flight: experts that may be on their way at once (each has a staging buffer).
    chunk_tokens: draft steps between two meetings with the host, which predicts at each.
    max_context: longest prompt plus output, tokens.
    max_batch: most sequences decoded together.
    prefill_group: fewest experts computed together while a prefill streams the rest.
    prefill_tokens: most prompt tokens that go through a layer at once.
    one_dispatch_pending: verification runs as one program if no more than this many predicted
        experts are still on their way; otherwise it goes layer by layer behind the transfers.
    stretches: whether several layers of a verification run as one program where it is known what
        they need; None: on GPUs, where handing over a layer takes longer than the layer.
    """

    num_slots: int
    max_in_flight: int = 16
    chunk_tokens: int = 2
    max_context: int = 4096
    max_batch: int = 1
    prefill_group: int = 8
    prefill_tokens: int = 2048
    one_dispatch_pending: int = 24
    stretches: bool | None = None


def bucket(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `size`; past the last, the next multiple of the last."""
    for candidate in buckets:
        if size <= candidate:
            return candidate
    step = buckets[-1]
    return -(-size // step) * step


def prefill_bucket(num_tokens: int) -> int:
    """Padded length of a prefill of `num_tokens`."""
    return bucket(num_tokens, _PREFILL_BUCKETS)


def prefill_widths(longest: int, prefill_tokens: int) -> list[int]:
    """Padded widths of the chunks in which prompts of at most `longest` tokens are prefilled."""
    widths, done = [], 0
    while done < longest:
        widths.append(min(prefill_tokens, prefill_bucket(longest - done)))
        done += widths[-1]
    return widths


def kv_capacity(num_tokens: int, max_context: int) -> int:
    """KV entries per sequence for `num_tokens` of prompt and output, of `max_context` at most.

    Room for speculation is always that of the greatest depth, so that capacity, and with it the
    order of every sum over the KV, is the same at every depth. A prefill's padding may reach
    past the end: such writes are dropped.
    """
    needed = num_tokens + KV_SLACK
    for capacity in _KV_BUCKETS:
        if needed <= capacity and capacity < max_context:
            return capacity
    return -(-(max_context + KV_SLACK) // _KV_MULTIPLE) * _KV_MULTIPLE
