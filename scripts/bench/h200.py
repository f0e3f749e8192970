"""Everything that is measured on a GPU, by one command.

    python scripts/bench/h200.py --data DIR [--quick] [--parts cells kernels ...] [--limit-s S]

DIR holds the small trained checkpoints, `stretch_checkpoint.py` and `datasets/` (`true_size.py`).
Every part is a process of its own, so that host and device memory are free again after it, and what
it wrote goes into OUT/h200.json at once (`results_file.py` has the format): a run may be cut short
and go on another day with other `--models`, `--formats` or `--parts`. `--quick` takes fewer
policies, prompts and tokens. The table of README.md is made from that file by `table.py --write`.

cells: time per token for budgets and policies, prefill, overlap, per model and expert format.
steps: one draft step and one verification without transfers. kernels: each kernel alone.
baseline: transformers with accelerate. planner: predictions against the cells measured so far.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))

import results_file
import true_size

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parents[1]
PARTS = ("steps", "cells", "kernels", "baseline", "planner")
FORMATS = ("nested", "plain")
POLICIES = ("lookahead", "sp-l", "sp-e", "lru-s", "lru")
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers", "accelerate")
SPARE_S = 25.0
"""Kept back from a part's time limit, so that it ends by itself."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One process: its part, what it is about, and the arguments of its script.

    gathers: whether it takes `--out FILE`. has_limit: whether it takes `--limit-s`.
    """

    part: str
    model: str | None = None
    expert_format: str | None = None
    script: str
    arguments: tuple[str, ...] = ()
    gathers: bool = True
    has_limit: bool = False

    @property
    def name(self) -> str:
        """For the log."""
        return " ".join(word for word in (self.part, self.model, self.expert_format) if word)


def tasks(args: argparse.Namespace) -> Iterator[Task]:
    """What is to be run, in order: short and informative parts first."""
    data = ("--data", str(args.data))
    for part in sorted(args.parts, key=PARTS.index):
        if part == "kernels":
            yield Task(part=part, script="kernels.py")
        if part == "planner":
            results = str(args.out / "h200.json")
            options = (results, *data, "--out", results)
            yield Task(part=part, script="validate_planner.py", arguments=options, gathers=False)
        if part not in ("steps", "cells", "baseline"):
            continue
        for model in args.models:
            about = (*data, "--model", model)
            if part == "steps":
                yield Task(
                    part=part, model=model, script="steps.py", arguments=about, gathers=False
                )
            if part == "baseline":
                options = (*about, *_numbers("--budgets", args.budgets))
                options += () if args.quick else ("--prefill", "512", "2048")
                yield Task(
                    part=part,
                    model=model,
                    script="transformers_baseline.py",
                    arguments=options,
                    has_limit=True,
                )
            for form in args.formats if part == "cells" else ():
                yield Task(
                    part=part,
                    model=model,
                    expert_format=form,
                    script="cells.py",
                    arguments=(*about, "--format", form, *_cells_options(args)),
                    has_limit=True,
                )


def _cells_options(args: argparse.Namespace) -> tuple[str, ...]:
    """What `cells.py` measures: everything, or with `--quick` two policies and short outputs."""
    policies = args.policies or (POLICIES[:2] if args.quick else POLICIES)
    depths = args.depths or (["8"] if args.quick else ["8", "auto"])
    options = [*_numbers("--budgets", args.budgets), "--policies", *policies, "--depths", *depths]
    if args.quick:
        return *options, "--prompts", "2", "--new-tokens", "64"
    options += ["--prompts", "3", "--new-tokens", "128"]
    return *options, *_numbers("--prefill", (512, 2048)), "--overlap"


def _numbers(option: str, values: Sequence[int] | None) -> tuple[str, ...]:
    return (option, *map(str, values)) if values else ()


class Session:
    """Runs tasks within a time limit and keeps the result file up to date."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin = time.monotonic()
        self.path = args.out / "h200.json"
        self.failed: list[str] = []

    def say(self, *words: Any) -> None:
        """Prints with the time since the start."""
        print(f"== [{time.monotonic() - self.begin:6.1f} s]", *words, flush=True)

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return self.args.limit_s - (time.monotonic() - self.begin)

    def run(self, task: Task, folder: Path) -> None:
        """Runs a task and takes in what it wrote, also if it failed or ran out of time."""
        if self.left_s < 2 * SPARE_S:
            self.say(task.name, "left out: no time")
            return
        out = folder / f"{task.name.replace(' ', '-')}.json"
        command = [sys.executable, str(BENCH / task.script), *task.arguments]
        if task.gathers:
            command += ["--out", str(out)]
        if task.has_limit and self.left_s != float("inf"):
            command += ["--limit-s", f"{self.left_s - SPARE_S:.0f}"]
        self.say(shlex.join(command))
        code, output = self._execute(command, _environment(task))
        if code:
            self.failed.append(task.name)
            self.say(task.name, "ended with", code)
        self._take_in(task, out, output)

    def _execute(self, command: list[str], environment: dict[str, str]) -> tuple[int, str]:
        """Exit code and standard output, which is shown as it comes."""
        # A session of its own: what it started in turn ends with it.
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        lines: list[str] = []
        reader = threading.Thread(target=_show, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            code = process.wait(None if self.left_s == float("inf") else max(0.0, self.left_s))
        except BaseException as reason:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
            if not isinstance(reason, subprocess.TimeoutExpired):
                raise
        reader.join(timeout=5)
        return code, "".join(lines)

    def _take_in(self, task: Task, out: Path, output: str) -> None:
        """Merges what a task measured into the result file, which may have changed meanwhile."""
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        written = results_file.read(out) if out.exists() else {}
        if task.part == "cells":
            new = results_file.from_cells(written, task.model, task.expert_format, date)
            timeline = out.with_suffix(".timeline.json")
            if timeline.exists():
                self.args.out.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(timeline, self.args.out / f"{task.model}.timeline.json")
        elif task.part == "kernels":
            new = results_file.from_kernels(written, date) if written else {}
        elif task.part == "steps":
            new = results_file.from_steps(output, task.model, date)
        else:
            new = written
        if not any(new.values()):
            return
        new["meta"] = {
            "date": date,
            **_gpu(),
            "versions": _versions(),
            "command": shlex.join(["python", "scripts/bench/h200.py", *self.args.given]),
        }
        results_file.write(self.path, results_file.merged(results_file.read(self.path), new))


def _show(stream: IO[str], lines: list[str]) -> None:
    """Prints lines as they come, and keeps them."""
    for line in stream:
        print(line, end="", flush=True)
        lines.append(line)


def _environment(task: Task) -> dict[str, str]:
    """Of a part's process: this repository's modules; the planner runs on the CPU."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return environment | ({"JAX_PLATFORMS": "cpu"} if task.part == "planner" else {})


def _gpu() -> dict[str, str]:
    """Name and driver as the driver's own tool says, nothing where there is none."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        gpu, driver = lines.splitlines()[0].split(", ")
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return {}
    return {"gpu": gpu, "driver": driver}


def _versions() -> dict[str, str]:
    """Of Python and of what is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; `given` is what was given, for the record."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--models", nargs="+", choices=true_size.MODELS, help="default: all")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--budgets", type=int, nargs="+", help="GiB (default: each model's)")
    parser.add_argument("--policies", nargs="+", choices=POLICIES)
    parser.add_argument("--depths", nargs="+", help="default: 8, and auto without --quick")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="for all together")
    args = parser.parse_args(argv)
    args.models = args.models or list(true_size.MODELS)
    args.given = argv
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts; 1 if one of them failed."""
    args = parse(argv)
    session = Session(args)
    with tempfile.TemporaryDirectory() as folder:
        for task in tasks(args):
            session.run(task, Path(folder))
    session.say("done;", f"failed: {', '.join(session.failed)}" if session.failed else "no failure")
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())
