"""The `specter` command: output, files, errors and exit codes."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specter_jax.cli import session
from specter_jax.cli.generate import StreamPrinter
from specter_jax.cli.main import main

PROMPTS = ["The old man walked", "def f(x):"]
FAST = ["--expert-slots", "40", "--dtype", "float32", "--max-new-tokens", "10", "--depth", "2"]


@pytest.fixture(autouse=True)
def environment_unchanged(monkeypatch):
    """`main` runs in this process, whose environment variables are not its to set."""
    monkeypatch.setattr(session, "ENVIRONMENT", {})


def run(capsys, *arguments):
    """Exit code, standard output and standard error of a command line."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def expected(tiny_directory):
    """What the Python API gives for the prompts."""
    import specter_jax as sj

    model = sj.load(tiny_directory, expert_slots=40, dtype="float32")
    return sj.generate(model, PROMPTS, max_new_tokens=10, depth=2, batch_size=1)


def both_prompts():
    return [part for prompt in PROMPTS for part in ("--prompt", prompt)]


def test_text_goes_to_stdout_and_statistics_to_stderr(capsys, tiny_directory, expected):
    code, out, err = run(capsys, "generate", tiny_directory, *both_prompts(), *FAST)
    assert code == 0
    assert out == (
        f"--- 1/2: {PROMPTS[0]}\n{expected.texts[0]}\n--- 2/2: {PROMPTS[1]}\n{expected.texts[1]}\n"
    )
    for name in ("new_tokens", "hit_rate", "acceptance_rate", "depths"):
        assert name in err


def test_one_prompt_prints_its_text_only(capsys, tiny_directory, expected):
    code, out, err = run(
        capsys, "generate", tiny_directory, "--prompt", PROMPTS[0], *FAST, "--quiet"
    )
    assert (code, out, err) == (0, expected.texts[0] + "\n", "")


def test_json_prints_one_object_a_prompt_and_nothing_else(
    capsys, tiny_directory, expected, tmp_path
):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": PROMPTS[0]}, {"turns": [PROMPTS[1], "more"]}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    code, out, _ = run(capsys, "generate", tiny_directory, "--prompts", prompts, *FAST, "--json")
    assert code == 0
    objects = [json.loads(line) for line in out.splitlines()]
    assert [one["text"] for one in objects] == expected.texts
    assert [one["tokens"] for one in objects] == expected.tokens
    assert [one["stats"]["new_tokens"] for one in objects] == [10, 10]


def test_statistics_and_timeline_are_written(capsys, tiny_directory, tmp_path):
    stats, trace = tmp_path / "stats.json", tmp_path / "trace.json"
    code, *_ = run(
        capsys,
        *("generate", tiny_directory, *both_prompts(), *FAST),
        *("--stats", stats, "--trace", trace),
    )
    assert code == 0
    fields = json.loads(stats.read_text())
    assert fields["new_tokens"] == 20
    assert set(fields["depths"]) == {"2"}
    phases = {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"M", "X"} <= phases


def test_a_stop_string_ends_the_text(capsys, tiny_directory, expected):
    word = expected.texts[0].split()[1]
    _, out, _ = run(
        capsys,
        *("generate", tiny_directory, "--prompt", PROMPTS[0], *FAST, "--stop", word, "--json"),
    )
    assert json.loads(out)["text"] == expected.texts[0].partition(word)[0]


def test_a_hugging_face_directory_is_converted_once(capsys, tmp_path):
    from tests.conftest import TINY_SOURCE

    arguments = ("info", TINY_SOURCE, "--cache-dir", tmp_path, "--json")
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    (converted,) = tmp_path.iterdir()
    assert json.loads(out)["path"] == str(converted)
    before = (converted / "manifest.json").stat().st_mtime_ns
    run(capsys, *arguments)
    assert (converted / "manifest.json").stat().st_mtime_ns == before


def test_info_tells_what_a_budget_buys(capsys, tiny_directory):
    code, out, _ = run(
        capsys, "info", tiny_directory, "--json", "--gpu-memory", "900MiB", "--max-context", 256
    )
    assert code == 0
    fields = json.loads(out)
    assert fields["family"] == "deepseek_v2"
    assert fields["all_experts_bytes"] == 160 * fields["expert_bytes"]
    budgets = fields["budgets"]
    assert 900 * 2**20 in [row["gpu_memory_bytes"] for row in budgets]
    shares = [row["share"] for row in budgets]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert 0.25 in shares
    assert fields["expert_format"] == "nested"
    assert 8.2 < fields["bits_per_weight"] < 9
    assert 0.01 < fields["escape_share_mean"] < fields["escape_share_max"] < 0.025
    assert all((row["plain_share"] or 0) <= row["share"] for row in budgets)
    assert [row["plain_share"] for row in budgets][:: len(budgets) - 1] == [None, 1.0]
    code, out, _ = run(capsys, "info", tiny_directory)
    assert code == 0
    assert "25.0%" in out
    assert "share if plain" in out


GENERATE = ("generate", "{model}")
BAD = {
    "no command": ((), "required"),
    "unknown command": (("fly",), "invalid choice"),
    "no prompt": (GENERATE, "--prompt"),
    "two sources of prompts": ((*GENERATE, "--prompt", "a", "--prompts", "b"), "not allowed"),
    "empty prompt": ((*GENERATE, "--prompt", ""), "prompt 0 is empty"),
    "prompt that is not Unicode": (
        (*GENERATE, "--prompt", "fine", "--prompt", "hi\udcff"),
        "prompt 1 is not valid Unicode",
    ),
    "profile of no Unicode": (("profile", "{model}", "--prompt", "\udcff"), "not valid Unicode"),
    "nameless prompts": ((*GENERATE, "--prompts", ""), "name of the file of prompts is empty"),
    "nameless prompts of profile": (("profile", "{model}", "--prompts", ""), "is empty"),
    "prompts without a prompt": ((*GENERATE, "--prompts", "/dev/null"), "holds no prompts"),
    "stop that is not Unicode": ((*GENERATE, "--prompt", "a", "--stop", "\udcff"), "not valid"),
    "nameless statistics": ((*GENERATE, "--prompt", "a", "--stats", ""), "--stats"),
    "nameless plot": (("profile", "{model}", "--plot", ""), "cannot draw"),
    "no such model": (("generate", "nowhere", "--prompt", "a"), "nowhere: no such directory"),
    "no such prompts": ((*GENERATE, "--prompts", "gone.jsonl"), "gone.jsonl"),
    "depth": ((*GENERATE, "--prompt", "a", "--depth", "17"), "from 0 to 16"),
    "policy": ((*GENERATE, "--prompt", "a", "--policy", "magic"), "unknown policy 'magic'"),
    "dtype": ((*GENERATE, "--prompt", "a", "--dtype", "int4"), "invalid choice"),
    "temperature": ((*GENERATE, "--prompt", "a", "--temperature", "-1"), "temperature"),
    "top-p": ((*GENERATE, "--prompt", "a", "--top-p", "2"), "top_p"),
    "tokens": ((*GENERATE, "--prompt", "a", "--max-new-tokens", "0"), "above 0"),
    "endless tokens": ((*GENERATE, "--prompt", "a", "--max-new-tokens", "9" * 5000), "above 0"),
    "endless context": ((*GENERATE, "--prompt", "a", "--max-context", "9" * 12), "above 0"),
    "tokens of another script": ((*GENERATE, "--prompt", "a", "--batch-size", "\uff11"), "above 0"),
    "endless size": ((*GENERATE, "--prompt", "a", "--gpu-memory", "9" * 400), "memory size"),
    "endless top-k": ((*GENERATE, "--prompt", "a", "--top-k", "9" * 30, "--top-p", "2"), "top_p"),
    "endless seed": ((*GENERATE, "--prompt", "a", "--seed", "9" * 5000), "--seed"),
    "empty stop": ((*GENERATE, "--prompt", "a", "--stop", ""), "stop"),
    "size": ((*GENERATE, "--prompt", "a", "--gpu-memory", "lots"), "memory size"),
    "two budgets": (
        (*GENERATE, "--prompt", "a", "--gpu-memory", "1GiB", "--expert-slots", "4"),
        "not allowed",
    ),
    "stats nowhere": ((*GENERATE, "--prompt", "a", "--stats", "no/such/f.json"), "--stats"),
    "budget too small": ((*GENERATE, "--prompt", "a", "--gpu-memory", "1MiB"), "too small"),
    "slots too few": ((*GENERATE, "--prompt", "a", "--expert-slots", "1"), "one token needs 4"),
    "long prompt": (
        (*GENERATE, "--prompt", "a b c d e f g h", "--max-context", "4"),
        "context holds 4",
    ),
    "info budget": (("info", "{model}", "--gpu-memory", "1KiB"), "too small"),
    "profile without speculation": (("profile", "{model}", "--policy", "lru"), "speculate"),
    "plot of an unknown kind": (("profile", "{model}", "--plot", "x.gif"), "x.gif"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tiny_directory, case):
    arguments, complaint = BAD[case]
    code, out, err = run(capsys, *(part.format(model=tiny_directory) for part in arguments))
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert complaint in err


def test_damaged_models_are_one_line_and_exit_code_2(capsys, tmp_path, tiny_directory):
    damaged = tmp_path / "model"
    damaged.mkdir()
    for file in tiny_directory.iterdir():
        if file.name != "manifest.json":
            (damaged / file.name).symlink_to(file)
    manifest = json.loads((tiny_directory / "manifest.json").read_text())
    arguments = ("generate", damaged, "--prompt", "a", *FAST)

    (damaged / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    code, _, err = run(capsys, *arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert "version 99" in err

    name = next(iter(manifest["files"]))
    manifest["files"][name]["sha256"] = "0" * 64
    (damaged / "manifest.json").write_text(json.dumps(manifest))
    code, _, err = run(capsys, *arguments, "--verify", "checksums")
    assert (code, err.count("\n")) == (2, 1)
    assert name in err


def test_an_interruption_ends_with_130(capsys, monkeypatch, tiny_directory):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("specter_jax.cli.info.run", interrupt)
    code, _, err = run(capsys, "info", tiny_directory)
    assert code == 130
    assert err.strip() == "interrupted"


@pytest.mark.parametrize("package", ["numpy", "jax"])
def test_an_interruption_of_an_import_ends_with_130(tmp_path, tiny_directory, package):
    """Packages may turn the interruption into another exception, as NumPy does."""
    (tmp_path / f"{package}.py").write_text(
        "import signal\n"
        "try:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt:\n"
        "    raise ImportError('broken installation') from None\n"
    )
    root = Path(__file__).resolve().parents[1]
    finished = subprocess.run(
        [sys.executable, "-m", "specter_jax", "info", tiny_directory],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(root)))},
    )
    assert (finished.returncode, finished.stdout) == (130, "")
    assert finished.stderr == "interrupted\n"


def test_any_exception_after_an_interruption_counts_as_one(capsys, monkeypatch, tiny_directory):
    def hide(options):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise OSError("half written") from None

    monkeypatch.setattr("specter_jax.cli.info.run", hide)
    code, _, err = run(capsys, "info", tiny_directory)
    assert (code, err.strip()) == (130, "interrupted")


def test_a_full_device_is_explained(capsys, monkeypatch, tiny_directory):
    def overflow(options):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

    monkeypatch.setattr("specter_jax.cli.info.run", overflow)
    code, _, err = run(capsys, "info", tiny_directory)
    assert code == 2
    assert "--gpu-memory" in err


def python(program, **options):
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, **options
    )


def test_help_and_bad_arguments_do_not_load_jax():
    program = """
import sys
from specter_jax.cli.main import main
for arguments in (["--help"], ["generate", "x", "--prompt", "a", "--depth", "x"]):
    try:
        main(arguments)
    except SystemExit:
        pass
assert main(["generate", "no/such/model", "--prompt", "a", "--top-p", "0"]) == 2
assert main(["generate", "no/such/model", "--prompt", "a"]) == 2
heavy = {"jax", "transformers", "torch"} & set(sys.modules)
assert not heavy, heavy
"""
    finished = python(program)
    assert finished.returncode == 0, finished.stderr


def test_a_reader_that_goes_away_is_no_error():
    program = """
import sys
import specter_jax.cli.info
from specter_jax.cli.main import main
def chatter(options):
    while True:
        print("x" * 1000)
specter_jax.cli.info.run = chatter
sys.exit(main(["info", "model"]))
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 141


def printed(prompts, batch_size, events):
    """What a printer has written after each event, as increments, and at the end."""
    file = io.StringIO()
    printer = StreamPrinter(prompts, batch_size, file)
    pieces, seen = [], 0
    for index, text in events:
        printer(index, text)
        pieces.append(file.getvalue()[seen:])
        seen = len(file.getvalue())
    printer.finish()
    return pieces, file.getvalue()


def test_one_prompt_streams_as_it_comes():
    assert printed(["p"], 1, [(0, "a"), (0, "b")]) == (["a", "b"], "ab\n")


def test_prompts_of_a_batch_do_not_mix():
    pieces, whole = printed(["p", "q", "r"], 2, [(1, "B"), (0, "A"), (1, "b"), (0, "a"), (2, "C")])
    assert pieces[0] == pieces[2] == ""
    assert pieces[1] == "--- 1/3: p\nA"
    assert whole == "--- 1/3: p\nAa\n--- 2/3: q\nBb\n--- 3/3: r\nC\n"


def test_a_prompt_without_output_still_has_its_place():
    _, whole = printed(["p", "q"], 1, [(1, "B")])
    assert whole == "--- 1/2: p\n\n--- 2/2: q\nB\n"
    assert printed(["p", "q"], 1, [])[1] == "--- 1/2: p\n\n--- 2/2: q\n\n"


def test_long_prompts_are_shortened_to_one_line():
    _, whole = printed(["word\n" * 100, "q"], 1, [])
    first = whole.splitlines()[0]
    assert len(first) < 80
    assert first.endswith("...")


def test_the_module_runs_as_the_command():
    finished = subprocess.run(
        [sys.executable, "-m", "specter_jax", "generate", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).resolve().parents[1],
    )
    assert finished.returncode == 0
    for option in ("--depth", "--policy", "--expert-slots", "--stop", "--trace"):
        assert option in finished.stdout


def test_version_and_defaults_are_told(capsys):
    cases = ((["--version"], "specter "), (["generate", "--help"], "default 64"))
    for arguments, expected in cases:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert expected in capsys.readouterr().out
