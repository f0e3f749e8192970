"""One iteration as it really ran, from the runtime's own trace: figure 9."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specter_jax.api import generate
from specter_jax.offload import DEFAULT_POLICY
from specter_jax.report import SMALL
from specter_jax.report.measure_runs import share_label
from specter_jax.report.prompts import Task, mixed, token_ids
from specter_jax.report.settings import Settings
from specter_jax.trace import Trace

if TYPE_CHECKING:
    from specter_jax.model import Model

Progress = Callable[[str], None]
Span = dict[str, Any]

DRAFT_TRACK = "draft"
PREFILL = "prefill"


def measure_timeline(
    model: Model, name: str, tasks: Sequence[Task], settings: Settings, progress: Progress
) -> dict[str, Any] | None:
    """The iteration of median length among those of one generation that drafted to full depth."""
    progress(f"{name}: timeline")
    texts = mixed(tasks, 1)
    prompts = token_ids(model.path, texts, settings.prompt_tokens)
    model.use_policy(DEFAULT_POLICY)
    model.reset_cache()
    options = {"max_new_tokens": settings.new_tokens, "depth": settings.depth, "ignore_eos": True}
    generate(model, prompts, batch_size=1, **options)
    trace = Trace()
    generate(model, prompts, batch_size=1, trace=trace, **options)
    spans = median_iteration(trace.to_dict()["traceEvents"])
    if spans is None:
        return None
    return {
        "model": name,
        "setting": SMALL,
        "depth": settings.depth,
        "policy": DEFAULT_POLICY,
        "budget": share_label(settings.share),
        "spans": spans,
    }


def median_iteration(events: Sequence[Mapping[str, Any]]) -> list[Span] | None:
    """The spans of one iteration, times in microseconds from its begin; None if there is none.

    events: of a trace in Chrome's format. Iterations begin where the draft runs its first chunk;
    of those with as many chunks as any, the one of median length is taken.
    """
    spans = sorted(spans_of(events), key=lambda span: span["begin_us"])
    begins = [
        span["begin_us"]
        for span in spans
        if span["track"] == DRAFT_TRACK and span["args"].get("first") == 0
    ]
    pieces = []
    for begin, end in zip(begins, [*begins[1:], float("inf")], strict=True):
        piece = [
            span for span in spans if begin <= span["begin_us"] < end and span["name"] != PREFILL
        ]
        pieces.append(piece)
    # The first iteration finds a cold cache, the last one drafts no more than is wanted.
    pieces = pieces[1:-1] or pieces
    if not pieces:
        return None
    chunks = [sum(span["track"] == DRAFT_TRACK for span in piece) for piece in pieces]
    full = [piece for piece, count in zip(pieces, chunks, strict=True) if count == max(chunks)]
    full.sort(key=lambda piece: max(span["end_us"] for span in piece) - piece[0]["begin_us"])
    chosen = full[len(full) // 2]
    begin = chosen[0]["begin_us"]
    return [
        {
            **span,
            "begin_us": round(span["begin_us"] - begin, 1),
            "end_us": round(span["end_us"] - begin, 1),
        }
        for span in chosen
    ]


def spans_of(events: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Complete and paired asynchronous events as spans: track, name, begin_us, end_us, args."""
    tracks = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    spans, open_spans = [], {}
    for event in events:
        track = tracks.get(event.get("tid"), "?")
        span = {"track": track, "name": event["name"], "args": dict(event.get("args") or {})}
        if event["ph"] == "X":
            span |= {"begin_us": event["ts"], "end_us": event["ts"] + event["dur"]}
            spans.append(span)
        elif event["ph"] == "b":
            open_spans[event["cat"], event["id"]] = span | {"begin_us": event["ts"]}
        elif event["ph"] == "e":
            begun = open_spans.pop((event["cat"], event["id"]), None)
            if begun is not None:
                spans.append(begun | {"end_us": event["ts"], "in_flight": True})
    return spans
