"""Replays of made-up and recorded routing through the runtime's cache and eviction code."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from specter_jax.offload import LookaheadEviction, LruEviction

SCRIPT = Path(__file__).parents[1] / "scripts" / "replay_traces.py"
TRACES = Path(os.environ.get("SPECTER_TRACES", "traces"))


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("replay_traces", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def make_sweeps(script, used: np.ndarray, tokens: int = 4) -> list:
    """Sweeps of bool [I, M, E] whose draft is right and whose tokens are all accepted."""
    sweeps = []
    for step in used:
        per_layer = [np.resize(np.flatnonzero(row), (tokens, 4)) for row in step]
        routing = np.stack(per_layer)[:, None]
        sweeps.append(script.Sweep(used=step, routing=routing, num_tokens=tokens))
    return sweeps


def hot_and_random(seed: int = 0) -> np.ndarray:
    """bool [60, 6, 16]: per layer 3 experts always, 3 of the others now and then."""
    rng = np.random.default_rng(seed)
    used = np.zeros((60, 6, 16), bool)
    used[:, :, :3] = True
    for step in used:
        for row in step:
            row[3 + rng.permutation(13)[:3]] = True
    return used


def test_recency_thrashes_where_lookahead_keeps_the_hot_experts(script):
    sweeps = make_sweeps(script, hot_and_random())
    # 6 layers x 6 uses = 36 a sweep; 24 slots hold the 18 hot ones but not a whole sweep.
    lru = script.replay(sweeps, 24, LruEviction(6, 16))
    ours = script.replay(sweeps, 24, LookaheadEviction(6, 16))
    optimum = script.replay(sweeps, 24, script.Belady(sweeps))
    assert lru == pytest.approx(36 / 4)
    assert optimum <= ours < 0.6 * lru
    assert ours < 1.2 * optimum


def test_everything_fits_then_each_expert_is_loaded_once(script):
    used = hot_and_random()
    sweeps = make_sweeps(script, used)
    for order in (LruEviction(6, 16), LookaheadEviction(6, 16), script.Belady(sweeps)):
        loads = script.replay(sweeps, 6 * 16, order) * len(sweeps) * 4
        assert loads == pytest.approx(used.any(0).sum())


def test_belady_is_never_beaten(script):
    rng = np.random.default_rng(2)
    for trial in range(5):
        used = rng.random((25, 4, 8)) < rng.uniform(0.2, 0.5)
        used[:, :, trial % 8] = True
        sweeps = make_sweeps(script, used)
        best = script.replay(sweeps, 14, script.Belady(sweeps))
        for order in (
            LruEviction(4, 8),
            LookaheadEviction(4, 8),
            script.ExpectedNextUse(4, 8),
        ):
            assert best <= script.replay(sweeps, 14, order) + 1e-9


def write_trace(folder: Path) -> Path:
    """A small trace in the recorded format: 2 prompts, 8 + 20 positions."""
    rng = np.random.default_rng(3)
    arrays = {"prompt_tokens": np.int64(8)}
    for kind in ("greedy", "sampled"):
        experts = rng.integers(0, 10, (3, 2, 28, 2)).astype(np.uint8)
        arrays[f"{kind}_target_experts"] = arrays[f"{kind}_draft_experts"] = experts
        argmax = rng.integers(0, 50, (2, 20)).astype(np.uint16)
        arrays[f"{kind}_target_argmax"] = argmax
        arrays[f"{kind}_draft_argmax"] = argmax.copy()
    arrays["greedy_draft_argmax"][0, 1] += 1
    path = folder / "small.npz"
    np.savez(path, **arrays)
    return path


def test_sweeps_advance_by_what_is_accepted(script, tmp_path):
    path = write_trace(tmp_path)
    sweeps, num_experts = script.load_sweeps(path, "greedy", depth=4)
    assert num_experts == 10
    # Prompt 0 rejects its second draft: 2 tokens, then 5 each while 5 positions remain.
    assert [s.num_tokens for s in sweeps[:4]] == [2, 5, 5, 5]
    assert all(s.routing.shape == (3, 1, 5, 2) for s in sweeps)
    with np.load(path) as trace:
        first = trace["greedy_target_experts"][:, 0, 7:12]
    assert np.flatnonzero(sweeps[0].used[1]).tolist() == np.unique(first[1]).tolist()


def test_command_line_prints_json_for_every_policy(script, tmp_path, capsys):
    write_trace(tmp_path)
    for policy in ("lookahead", "lru"):
        assert script.main([str(tmp_path), "--depth", "4", "--json", "--policy", policy]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert {row["kind"] for row in rows} == {"greedy", "sampled"}
        assert all(row["belady"] <= row["policy"] <= row["uses"] for row in rows)
        if policy == "lru":
            assert all(row["policy"] == row["lru"] for row in rows)


def test_a_missed_target_fails_the_check(script, tmp_path, monkeypatch):
    path = write_trace(tmp_path)
    monkeypatch.setattr(script, "DEFAULT_DEPTH", 4)
    for limit, code in ((100.0, 0), (0.01, 1)):
        targets = {(path.stem, kind): {9: (limit, limit)} for kind in ("greedy", "sampled")}
        monkeypatch.setattr(script, "TARGETS", targets)
        assert script.main([str(tmp_path), "--depth", "4", "--check"]) == code


@pytest.mark.long
@pytest.mark.skipif(not list(TRACES.glob("*.npz")), reason=f"no recorded traces in {TRACES}")
def test_recorded_traces_meet_their_targets(script, capsys):
    assert script.main([str(TRACES), "--check"]) == 0, capsys.readouterr().out
