"""What the runtime is told besides the model: sizes of buffers and the shape buckets."""

from __future__ import annotations

import dataclasses

MAX_DEPTH = 16
"""Deepest speculation that is compiled for; verification then runs 17 positions."""

KV_SLACK = MAX_DEPTH + 2
"""KV entries beyond the longest sequence: a verification may write past what is kept."""

MIN_VERIFY_TOKENS = 2
"""Verification never runs on one row alone: XLA takes a matrix-vector path for it that rounds
differently, and plain decoding must equal speculation bit for bit."""

_PREFILL_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_KV_BUCKETS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Buffer sizes and schedule of one loaded model.

    num_slots: full-precision experts the cache holds.
    max_in_flight: experts that may be on their way at once (each has a staging buffer).
    chunk_tokens: draft steps per device program; the host predicts at every chunk's end.
    max_context: longest prompt plus output, tokens.
    max_batch: most sequences decoded together.
    prefill_group: experts computed together while a prefill streams the rest.
    prefill_tokens: most prompt tokens that go through a layer at once.
    one_dispatch_pending: verification runs as one program if no more than this many predicted
        experts are still on their way; otherwise it goes layer by layer behind the transfers.
    """

    num_slots: int
    max_in_flight: int = 16
    chunk_tokens: int = 2
    max_context: int = 4096
    max_batch: int = 1
    prefill_group: int = 8
    prefill_tokens: int = 2048
    one_dispatch_pending: int = 8


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


def kv_capacity(lengths: list[int], num_tokens: int, prefill_tokens: int) -> int:
    """KV entries per sequence for prompts of `lengths` and `num_tokens` of prompt plus output.

    Room for speculation is always that of the greatest depth, so that capacity, and with it the
    order of every sum over the KV, is the same at every depth. A chunk of a prefill writes its
    full width behind each prompt, also behind one that has ended; nothing valid lies there, but
    the entries must exist, since a write past the end would be moved back over valid ones.
    """
    needed, done = num_tokens + KV_SLACK, 0
    for width in prefill_widths(max(lengths), prefill_tokens):
        starts = [done if length > done else length for length in lengths]
        needed = max(needed, max(starts) + width)
        done += width
    return bucket(needed, _KV_BUCKETS)
