"""Ctrl-C in a command: always exit code 130, also while modules are being imported.

Code between the interrupt and the command may turn a KeyboardInterrupt into something else: NumPy's
import reports it as a broken installation (ImportError), modules that were half imported raise what
they like afterwards, and event loops wrap it. So it is the signal that counts, not the exception.

Imports nothing but small parts of the standard library.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

EXIT_INTERRUPTED = 130
"""What a shell reports for a process ended by Ctrl-C."""
_STDERR = 2

Handler = Callable[[int, FrameType | None], object]


@contextlib.contextmanager
def importing(signals: Sequence[int] = (signal.SIGINT,)) -> Iterator[None]:
    """Around a command's imports, before it writes anything: a signal ends the process at once.

    The exit code is `EXIT_INTERRUPTED` and "interrupted" stands on standard error. No exception is
    raised, for the imported modules may swallow it and leave a half imported one behind.
    """
    with _handling(signals, _end_process):
        yield


@contextlib.contextmanager
def interrupts(signals: Sequence[int] = (signal.SIGINT,)) -> Iterator[None]:
    """Around a command: once a signal has come, whatever leaves the block is a KeyboardInterrupt.

    A second signal ends the process at once with `EXIT_INTERRUPTED`.

    Args:
        signals: treated like Ctrl-C, for example also `signal.SIGTERM`.

    Raises:
        KeyboardInterrupt: a signal came and an exception, of any type, left the block.
    """
    received = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if received:
            _end_process(number, frame)
        received = True
        raise KeyboardInterrupt

    with _handling(signals, interrupt):
        try:
            yield
        except BaseException as error:
            if received and not isinstance(error, KeyboardInterrupt):
                raise KeyboardInterrupt from error
            raise


@contextlib.contextmanager
def _handling(signals: Sequence[int], handler: Handler) -> Iterator[None]:
    """Handles signals within the block; only the main thread can, elsewhere nothing changes."""
    previous: dict[int, object] = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.getsignal(number) for number in signals}
    try:
        for number in previous:
            signal.signal(number, handler)
        yield
    finally:
        for number, before in previous.items():
            if before is not None:  # None: set by something other than Python
                signal.signal(number, before)


def _end_process(*_: object) -> None:
    with contextlib.suppress(OSError):
        os.write(_STDERR, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)
