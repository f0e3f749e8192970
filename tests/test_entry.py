"""Ctrl-C is exit code 130 whatever the interrupted code makes of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specter_jax.entry import EXIT_INTERRUPTED, importing, interrupts

ROOT = Path(__file__).parents[1]

# What NumPy's import makes of an interrupt, without its seconds.
INTERRUPTED_PACKAGE = """
import os, signal, time
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
except KeyboardInterrupt:
    raise ImportError("numpy._core.multiarray failed to import") from None
"""


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Runs Python where `import orbax` and `import numpy` are interrupted."""
    for name in ("orbax", "numpy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(INTERRUPTED_PACKAGE)
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )


def test_conversion_interrupted_while_importing_is_one_line(tmp_path: Path) -> None:
    finished = run(tmp_path, "-m", "convert", "source", "out")
    assert (finished.returncode, finished.stdout) == (EXIT_INTERRUPTED, "")
    assert finished.stderr == "interrupted\n"


def test_swallowed_interrupt_of_an_import_still_ends_the_process(tmp_path: Path) -> None:
    program = """if True:
        from specter_jax.entry import importing
        with importing():
            try:
                import numpy
            except ImportError:
                numpy = None
        print("went on")
    """
    finished = run(tmp_path, "-c", program)
    assert (finished.returncode, finished.stdout) == (EXIT_INTERRUPTED, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_any_exception_after_the_signal_is_an_interrupt(number: signal.Signals) -> None:
    def hide_the_interrupt() -> None:
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            raise AttributeError("partially initialized module") from None

    with pytest.raises(KeyboardInterrupt), interrupts((signal.SIGINT, signal.SIGTERM)):
        hide_the_interrupt()


def test_without_a_signal_exceptions_and_handlers_stay() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(AttributeError), interrupts(), importing():
        raise AttributeError
    assert signal.getsignal(signal.SIGINT) is before


def test_second_signal_ends_the_process(tmp_path: Path) -> None:
    program = """if True:
        import signal
        from specter_jax.entry import interrupts
        with interrupts():
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            print("went on")
    """
    finished = run(tmp_path, "-c", program)
    assert (finished.returncode, finished.stdout) == (EXIT_INTERRUPTED, "")
