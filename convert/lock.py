"""The lock on a directory that a conversion grows in: one process at a time."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from specter_jax.errors import ConversionError


def lock_directory(path: Path, destination: Path, on_wait: Callable[[], None] | None) -> int:
    """Creates the directory and locks it; the lock ends with the process or the descriptor.

    Args:
        path: the directory.
        destination: what messages say is being written.
        on_wait: called once before waiting for another process; without it, its lock is an error.

    Raises:
        ConversionError: another process has the lock and `on_wait` is None.
    """
    told = False
    while True:
        path.mkdir(exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue  # another run published or removed it in between
        try:
            if not try_lock(descriptor):
                if on_wait is None:
                    raise ConversionError(
                        f"{destination}: another conversion into it is running (it holds {path}); "
                        "wait for it or choose another destination"
                    )
                if not told:
                    on_wait()
                    told = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # what was locked is no longer what has this name


def try_lock(descriptor: int) -> bool:
    """Locks without waiting; false if another process has the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # A file system without locks: go on, as there is nothing better to be had.
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
    return True
