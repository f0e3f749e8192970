"""The scripts that compare outputs and policies, on a few prompts."""

import dataclasses
import json
from pathlib import Path

import pytest

import specter_jax as sj
from scripts import exactness, nested, policies
from scripts.prompt_sets import batches, read_cases
from specter_jax.cli import session
from specter_jax.offload import POLICIES
from tests.conftest import TINY_SOURCE

PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"


@pytest.fixture(autouse=True)
def environment_unchanged(monkeypatch):
    """The scripts run in this process, whose environment variables are not theirs to set."""
    monkeypatch.setattr(session, "ENVIRONMENT", {})


@pytest.fixture
def options(tiny_directory):
    return ["--model", str(tiny_directory), "--dataset", str(PROMPTS), "--prompt-tokens", "32"]


@pytest.mark.long
def test_speculative_output_of_sample_prompts_is_the_plain_one(options, capsys):
    assert exactness.main([*options, "--max-new-tokens", "24", "--depth", "8"]) == 0
    printed = capsys.readouterr().out
    assert "all outputs are identical" in printed
    table = [line for line in printed.splitlines() if line.startswith("| all ")]
    assert table[0].startswith("| all | 6 | 6 | 144 |")


def test_a_difference_is_found_and_named(options, capsys, monkeypatch):
    original = sj.generate

    def wrong(model, prompts, **settings):
        result = original(model, prompts, **settings)
        if not settings["depth"]:
            return result
        changed = [[*tokens[:3], tokens[3] + 1, *tokens[4:]] for tokens in result.tokens]
        return dataclasses.replace(result, tokens=changed)

    monkeypatch.setattr(sj, "generate", wrong)
    assert exactness.main([*options, "--max-new-tokens", "6", "--limit", "1"]) == 1
    printed = capsys.readouterr().out
    assert "prompt story differs from new token 3 on" in printed
    assert "1 outputs differ" in printed


@pytest.mark.long
def test_nested_output_is_compared_with_plain(capsys, tmp_path, monkeypatch):
    report = tmp_path / "report.json"
    options = ["--model", str(TINY_SOURCE), "--dataset", str(PROMPTS), "--limit", "1"]
    options += ["--cache-dir", str(tmp_path), "--json", str(report), "--repeats", "1"]
    options += ["--prompt-tokens", "32", "--max-new-tokens", "6", "--depth", "3"]
    assert nested.main(options) == 0
    figures = json.loads(report.read_text())
    assert (figures["prompts"], figures["identical"]) == (1, 1)
    assert figures["experts_per_gib_ratio"] > 1.8
    assert figures["plain"]["bits_per_weight_in_slots"] == 16
    assert figures["nested"]["bits_per_weight_in_slots"] < 9
    assert figures["encoding"]["both_mb_per_s"] > 0

    original = nested.generate_group

    def wrong(model, group, *arguments, **settings):
        tokens, stats = original(model, group, *arguments, **settings)
        if model.pool.store.is_nested:
            tokens = {name: [*row[:2], row[2] + 1, *row[3:]] for name, row in tokens.items()}
        return tokens, stats

    monkeypatch.setattr(nested, "generate_group", wrong)
    assert nested.main(options) == 1
    assert "prompt story differs from new token 2 on" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("expected", "got", "position"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([1], [1, 2], 1)],
)
def test_the_first_difference_is_a_position_or_none(expected, got, position):
    assert exactness.first_difference(expected, got) == position


def test_policies_are_compared_in_a_table(options, capsys):
    assert policies.main([*options, "--max-new-tokens", "8", "--limit", "2"]) == 0
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()[4:]]
    assert rows == list(POLICIES)


def test_cases_are_spread_over_the_data_set_and_cut(tiny_directory):
    cases = read_cases(PROMPTS, tiny_directory, limit=3, tokens=5)
    assert [case.name for case in cases] == ["story", "sum", "question"]
    assert [case.task for case in cases] == ["mt_bench", "math_reasoning", "qa"]
    assert {len(case.ids) for case in cases} == {5}
    assert [len(group) for group in batches(cases * 2, 2)] == [2, 2, 2]
