"""What is said beside the output: notes, advice, progress without a terminal, a model's name."""

import os
import sys
import warnings
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import pytest

import specter_jax
from specter_jax.cli.main import main
from specter_jax.cli.session import Progress
from specter_jax.output import warnings_as_notes
from specter_jax.tokenizer import NoTokenizer, load_tokenizer
from tests.engine_cases import PROMPTS, QUARTER, load_tiny


def test_a_depth_that_the_policy_has_no_use_for_is_noted(capsys, tiny_directory):
    arguments = ["generate", str(tiny_directory), "--prompt", PROMPTS[0], "--quiet", "--dtype"]
    arguments += ["float32", "--max-new-tokens", "3", "--expert-slots", "40"]
    arguments += ["--max-context", "128"]
    assert main([*arguments, "--policy", "lru", "--depth", "8"]) == 0
    assert capsys.readouterr().err == "note: lru does not draft; --depth is not used\n"
    assert main([*arguments, "--policy", "lru"]) == 0
    assert capsys.readouterr().err == ""


def test_slots_that_no_expert_needs_are_noted(capsys, tiny_directory):
    arguments = ["generate", str(tiny_directory), "--prompt", PROMPTS[0], "--quiet"]
    arguments += ["--max-new-tokens", "2", "--expert-slots", "500", "--max-context", "128"]
    arguments += ["--depth", "0"]
    assert main(arguments) == 0
    assert capsys.readouterr().err == (
        "note: expert_slots is 500, but the model has 160 experts: 160 slots are used\n"
    )


def test_warnings_of_the_package_are_notes_and_others_stay(capsys):
    ours = str(Path(specter_jax.__file__).with_name("model.py"))
    before = warnings.showwarning
    with warnings.catch_warnings(record=True) as others, warnings_as_notes():
        warnings.simplefilter("always")
        warnings.warn_explicit("fewer\nslots", RuntimeWarning, ours, 1)
        warnings.warn_explicit("of another kind", UserWarning, "elsewhere.py", 1)
    assert capsys.readouterr().err == "note: fewer slots\n"
    assert [(str(other.message), other.filename) for other in others] == [
        ("of another kind", "elsewhere.py")
    ]
    assert warnings.showwarning is before


@pytest.mark.parametrize("before", [None, "", "0"])
def test_transformers_gives_no_advice_and_the_environment_stays(monkeypatch, tmp_path, before):
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    seen = []

    def attribute(_: str) -> MagicMock:
        seen.append(os.environ.get(name))
        return MagicMock()

    transformers = ModuleType("transformers")
    transformers.__getattr__ = attribute
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    tokenizer = '{"tokenizer_class": "Made"}'
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_text(tokenizer)
    assert not isinstance(load_tokenizer(tmp_path), NoTokenizer)
    assert set(seen) == {"1"}
    assert os.environ.get(name) == before


def test_long_work_is_told_in_lines_where_there_is_no_terminal(capsys):
    with Progress(lines=True) as progress:
        for what, done in (("loading", 0), ("loading", 1), ("compiling", 0), ("compiling", 1)):
            progress(what, done, 1)
    assert capsys.readouterr().err == "loading\ncompiling\n"
    with Progress() as progress:
        progress("loading", 0, 1)
    assert capsys.readouterr().err == ""


def test_a_model_shows_as_one_line(tiny_directory):
    shown = repr(load_tiny(tiny_directory))
    assert shown.count("\n") == 0
    assert f"{QUARTER} of 160 experts in slots" in shown
    assert "deepseek_v2, float32" in shown
