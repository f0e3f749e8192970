"""Files a user asked for, complete or not at all, and notes beside a command's output."""

import contextlib
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Files below these stand for open files and devices, even where they look like regular files:
# /dev/stdout is one when the shell writes the output to a file.
_SPECIAL_ROOTS = ("/dev", "/proc")


_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@contextlib.contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Around a command: this package's warnings are one line each on standard error, "note: ...".

    Warnings of other packages, and which are shown at all, stay as they are.
    """
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type, filename: str, *rest: Any) -> None:
            if not os.path.abspath(filename).startswith(_PACKAGE):
                others(message, category, filename, *rest)
                return
            # On a terminal a line of progress may stand there.
            clear = "\r\033[K" if sys.stderr.isatty() else ""
            print(f"{clear}note: {' '.join(str(message).split())}", file=sys.stderr, flush=True)

        warnings.showwarning = show
        yield


def write_text_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file by way of a temporary one beside it, so that no reader sees half of it.

    A symbolic link stays one: the file it names is written. Devices, pipes and open files are
    written to directly. A file that is replaced keeps its permissions.

    Raises:
        OSError: the folder does not exist or the file cannot be written.
    """
    if is_special(path):
        # Appending: an output that the shell writes to a file must not lose its beginning.
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)
        return
    target = Path(os.path.realpath(path))
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".specter-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, _permissions(target))
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def is_special(path: str | os.PathLike[str]) -> bool:
    """Whether there is something that must not be replaced by a regular file.

    Raises OSError for a path that leads nowhere, such as a circle of links.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    named = os.path.abspath(path)
    return not stat.S_ISREG(mode) or any(named.startswith(f"{root}/") for root in _SPECIAL_ROOTS)


def is_writable(path: str | os.PathLike[str]) -> bool:
    """Whether `write_text_atomically` can be expected to work; nothing is changed."""
    try:
        special = is_special(path)
    except (OSError, ValueError):  # the latter for a zero byte
        return False
    if os.path.exists(path) and (os.path.isdir(path) or not os.access(path, os.W_OK)):
        return False
    folder = os.path.dirname(os.path.realpath(path))
    return special or (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK))


def _permissions(target: Path) -> int:
    """Those of the file, or those that a plain open would give a new one; mkstemp's are private."""
    try:
        return stat.S_IMODE(target.stat().st_mode)
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        return 0o666 & ~umask
