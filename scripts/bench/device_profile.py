"""What ran on the device, from the trace that `jax.profiler.trace` leaves in a folder."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def stream_events(folder: str | Path, stream: str = "Stream") -> list[dict[str, Any]]:
    """Kernels and copies: events with `name`, `ts` and `dur` in microseconds, as they stand.

    stream: part of the name of the streams looked at, for example "(Compute".
    """
    path = next(Path(folder).rglob("*.trace.json.gz"))
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    devices = {
        event["pid"]
        for event in events
        if event.get("name") == "process_name" and "GPU" in event["args"]["name"]
    }
    streams = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("name") == "thread_name" and stream in event["args"]["name"]
    }
    return [
        event
        for event in events
        if event.get("ph") == "X"
        and event["pid"] in devices
        and (event["pid"], event.get("tid")) in streams
    ]
