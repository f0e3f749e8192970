"""Reading a device profile: what ran on the GPU's streams, and nothing else."""

import gzip
import json

import pytest

from scripts.bench import device_profile, overlap


@pytest.fixture
def folder(tmp_path):
    names = [
        ("process_name", 1, 0, "/device:GPU:0"),
        ("process_name", 2, 0, "/host:CPU"),
        ("thread_name", 1, 7, "Stream #7(Compute)"),
        ("thread_name", 1, 8, "Stream #8(MemcpyH2D)"),
        ("thread_name", 1, 9, "XLA Modules"),
        ("thread_name", 2, 7, "Stream of the host"),
    ]
    events = [
        {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": text}}
        for name, pid, tid, text in names
    ]
    spans = [
        ("gemm_1", 1, 7, 0.0, 4.0),
        ("gemm_2", 1, 7, 3.0, 3.0),
        ("copy", 1, 8, 5.0, 2.0),
        ("module", 1, 9, 0.0, 9.0),
        ("host", 2, 7, 0.0, 9.0),
    ]
    events += [
        {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": duration}
        for name, pid, tid, start, duration in spans
    ]
    (tmp_path / "plugins").mkdir()
    packed = gzip.compress(json.dumps({"traceEvents": events}).encode())
    (tmp_path / "plugins" / "machine.trace.json.gz").write_bytes(packed)
    return tmp_path


def test_only_what_ran_on_the_devices_streams_counts(folder):
    names = [event["name"] for event in device_profile.stream_events(folder)]
    assert names == ["gemm_1", "gemm_2", "copy"]
    assert len(device_profile.stream_events(folder, "(Compute")) == 2


def test_copies_and_kernels_overlap_where_they_run_together():
    kernels = overlap.merged([(3.0, 6.0), (0.0, 4.0), (8.0, 9.0)])
    assert kernels == [(0.0, 6.0), (8.0, 9.0)]
    assert overlap.total(kernels) == 7.0
    assert overlap.overlap([(5.0, 8.5)], kernels) == 1.5
