"""What commands say beside their output: notes, progress without a terminal, a model's name."""

from specter_jax.cli.main import main
from specter_jax.cli.session import Progress
from tests.engine_cases import PROMPTS, QUARTER, load_tiny


def test_a_depth_that_the_policy_has_no_use_for_is_noted(capsys, tiny_directory):
    arguments = ["generate", str(tiny_directory), "--prompt", PROMPTS[0], "--quiet", "--dtype"]
    arguments += ["float32", "--max-new-tokens", "3", "--expert-slots", "40"]
    arguments += ["--max-context", "128"]
    assert main([*arguments, "--policy", "lru", "--depth", "8"]) == 0
    assert capsys.readouterr().err == "note: lru does not draft; --depth is not used\n"
    assert main([*arguments, "--policy", "lru"]) == 0
    assert capsys.readouterr().err == ""


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
