"""The transformers baseline of the bench: its weights, and how long a cell may take."""

import importlib
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

random_weights = importlib.import_module("scripts.bench.random_weights")
baseline = importlib.import_module("scripts.bench.transformers_baseline")


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one = torch.nn.Linear(3, 5, device="meta")
        self.other = torch.nn.Linear(3, 5, device="meta")
        self.other.weight = self.one.weight


def test_weights_are_made_once_and_survive_a_move(monkeypatch):
    monkeypatch.setattr(random_weights, "BLOCK", 4)
    weights = {}
    first, second = Tied(), Tied()
    random_weights.fill(first, weights)
    random_weights.fill(second, weights)
    assert sorted(weights) == ["one.bias", "one.weight", "other.bias"]
    assert first.one.weight is first.other.weight
    assert first.one.weight.data_ptr() == second.one.weight.data_ptr()
    # The block over and over.
    flat = first.one.weight.view(-1)
    assert flat.shape == (15,)
    assert torch.equal(flat[:4], flat[4:8])
    first.to("meta")
    assert second.one.weight.device.type == "cpu"
    assert all(tensor.device.type == "cpu" for tensor in weights.values())


@pytest.mark.parametrize(("step_s", "expected"), [(0.1, 6), (2.5, 4), (100.0, 3)])
def test_a_slow_cell_ends_early(monkeypatch, step_s, expected):
    clock = iter(range(100))
    timer = SimpleNamespace(perf_counter=lambda: next(clock) * step_s)
    monkeypatch.setattr(baseline, "time", timer)
    monkeypatch.setattr(baseline, "_tokens", lambda model, prompt: iter(range(100)))
    first, later = baseline.generate(None, None, 6, 8.0)
    assert 1 + len(later) == expected
    assert (first, later[0]) == pytest.approx((step_s, step_s))


def test_budgets_that_a_result_file_has_are_left_out():
    args = SimpleNamespace(model="m", prefill=[128, 512], prefill_at=[24])
    mine = {"model": "m", "system": "transformers"}
    cells = [mine | {"budget_gib": budget} for budget in (16, 24)]
    prompts = [mine | {"budget_gib": 24, "prompt_tokens": length} for length in (128, 512)]
    known = {"baseline": cells, "prefill": prompts}
    assert baseline.missing([16, 24, 32], {}, args) == [16, 24, 32]
    assert baseline.missing([16, 24, 32], known, args) == [32]
    assert baseline.missing([16, 24, 32], known | {"prefill": prompts[:1]}, args) == [24, 32]
    # The runtime's own prompts are of another system.
    others = [entry | {"system": "specter"} for entry in prompts]
    assert baseline.missing([16, 24], known | {"prefill": others}, args) == [24]
    assert baseline.missing([16], known, SimpleNamespace(**{**vars(args), "model": "n"})) == [16]
