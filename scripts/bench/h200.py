"""Everything that is measured on a GPU, by one command.

    python scripts/bench/h200.py --data DIR [--quick] [--parts cells kernels ...] [--limit-s S]
        [--gpus 0 1] [--missing [FILE]] [--cells-options "--systems mo specter --cell-s 10"]

DIR holds the small trained checkpoints, `stretch_checkpoint.py` and `datasets/` (`true_size.py`).
Every part is a process of its own, so that host and device memory are free again after it, and what
it wrote goes into OUT/h200.json at once (`results_file.py` has the format): a run may be cut short
and go on another day with other `--models`, `--formats` or `--parts`. Parts that know a time limit
share what `--limit-s` leaves, each leaving out what matters least (`cell_plan.py`). `--quick` takes
fewer policies, prompts and tokens; `--missing` what no run before has measured. With several
`--gpus` as many parts run side by side, each with its share of the cores. The table of
README.md is made from that file by `table.py --write`.

cells: time per token for budgets, policies, systems, depths and batches, prefill, overlap, per
model and expert format. steps: one draft step and one verification without transfers. kernels: each
kernel alone. formats: the draft's experts in other formats. baseline: transformers with accelerate.
planner: predictions against the cells measured so far.
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
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.bench import results_file, true_size
from scripts.bench.bench_tasks import FORMATS, PARTS, POLICIES, WEIGHTS, Task, tasks

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parents[1]
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers", "accelerate")
SPARE_S = 25.0
"""Kept back from a part's time limit, so that it ends by itself."""


class Session:
    """Runs tasks within a time limit and keeps the result file up to date."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.begin = time.monotonic()
        self.path = args.out / "h200.json"
        self.failed: list[str] = []
        self.lock = threading.Lock()
        self.running: set[subprocess.Popen[str]] = set()

    def say(self, *words: Any) -> None:
        """Prints with the time since the start."""
        print(f"== [{time.monotonic() - self.begin:6.1f} s]", *words, flush=True)

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return self.args.limit_s - (time.monotonic() - self.begin)

    def run_all(self, tasks: Sequence[Task], folder: Path) -> None:
        """Runs the tasks in order, as many at a time as there are GPUs; the planner's at the end.

        The planner reads what the others measured.
        """
        queue = [task for task in tasks if task.part != "planner"]
        last = [task for task in tasks if task.part == "planner"]
        workers = [
            threading.Thread(target=self._work, args=(queue, place, folder), daemon=True)
            for place in range(len(self.args.gpus or (None,)))
        ]
        try:
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        finally:
            # After an interruption: what was started ends with this process.
            queue.clear()
            for process in tuple(self.running):
                _kill(process)
        self._work(last, 0, folder)

    def _work(self, queue: list[Task], place: int, folder: Path) -> None:
        """Takes tasks from the queue until it is empty, for the GPU at `place`."""
        while True:
            with self.lock:
                if not queue:
                    return
                weights = [WEIGHTS.get(task.part, 1.0) for task in queue]
                task = queue.pop(0)
            lanes = len(self.args.gpus or (None,))
            share = min(1.0, lanes * weights[0] / sum(weights)) if weights[1:] else 1.0
            self.run(task, folder, place, share)

    def run(self, task: Task, folder: Path, place: int = 0, share: float = 1.0) -> None:
        """Runs a task and takes in what it wrote, also if it failed or ran out of time.

        place: of its GPU among `--gpus`. share: of the time left, for tasks that know a limit.
        """
        left_s = self.left_s
        if left_s < 2 * SPARE_S:
            self.say(task.name, "left out: no time")
            return
        out = folder / f"{task.name.replace(' ', '-')}.json"
        command = [sys.executable, str(BENCH / task.script), *task.arguments]
        if task.gathers:
            command += ["--out", str(out)]
        if task.has_limit and left_s != float("inf"):
            command += ["--limit-s", f"{max(left_s * share - SPARE_S, SPARE_S):.0f}"]
        self.say(shlex.join(command))
        code, output = self._execute(task, command, place)
        if code:
            self.failed.append(task.name)
            self.say(task.name, "ended with", code)
        with self.lock:
            self._take_in(task, out, output)

    def _execute(self, task: Task, command: list[str], place: int) -> tuple[int, str]:
        """Exit code and standard output, which is shown as it comes."""
        gpus = self.args.gpus or ()
        environment = _environment(task)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = str(gpus[place])
        # A session of its own: what it started in turn ends with it.
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.running.add(process)
        if len(gpus) > 1 and hasattr(os, "sched_setaffinity"):
            cores = sorted(os.sched_getaffinity(0))
            each = len(cores) // len(gpus)
            with contextlib.suppress(OSError):
                os.sched_setaffinity(process.pid, cores[place * each :][:each] or cores)
        prefix = f"{task.name}: " if len(gpus) > 1 else ""
        lines: list[str] = []
        reader = threading.Thread(target=_show, args=(process.stdout, lines, prefix), daemon=True)
        reader.start()
        try:
            process.wait(None if self.left_s == float("inf") else max(0.0, self.left_s))
        except subprocess.TimeoutExpired:
            _kill(process)
        code = process.wait()
        self.running.discard(process)
        reader.join(timeout=5)
        return code, "".join(lines)

    def _take_in(self, task: Task, out: Path, output: str) -> None:
        """Merges what a task measured into the result file, which may have changed meanwhile."""
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        written = results_file.read(out) if out.exists() else {}
        if task.part == "cells":
            new = results_file.from_cells(written, task.model, task.expert_format, date)
            timeline = out.with_suffix(".timeline.json")
            kept = self.args.out / f"{task.model}.timeline.json"
            # One per model: of the format that is the usual one, if it was run.
            if timeline.exists() and (task.expert_format == FORMATS[0] or not kept.exists()):
                self.args.out.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(timeline, kept)
        elif task.part in ("kernels", "formats"):
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


def _kill(process: subprocess.Popen[str]) -> None:
    """Ends a process and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _show(stream: IO[str], lines: list[str], prefix: str = "") -> None:
    """Prints lines as they come, and keeps them."""
    for line in stream:
        print(prefix + line, end="", flush=True)
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
    parser.add_argument("--depths", nargs="+", help="at every budget (default: 8)")
    parser.add_argument("--gpus", type=int, nargs="+", help="numbers; parts run side by side")
    parser.add_argument("--cells-options", default="", help="further options of cells.py, as text")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="for all together")
    parser.add_argument(
        "--missing",
        type=Path,
        nargs="?",
        const=True,
        metavar="FILE",
        help="of cells and baseline only what this result file lacks (without FILE: OUT/h200.json)",
    )
    args = parser.parse_args(argv)
    if args.missing is True:
        args.missing = args.out / "h200.json"
    args.models = args.models or list(true_size.MODELS)
    args.given = argv
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts; 1 if one of them failed."""
    args = parse(argv)
    session = Session(args)
    with tempfile.TemporaryDirectory() as folder:
        session.run_all(list(tasks(args)), Path(folder))
    session.say("done;", f"failed: {', '.join(session.failed)}" if session.failed else "no failure")
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())
