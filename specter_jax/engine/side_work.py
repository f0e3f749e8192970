"""One piece of host work beside the main thread.

Dispatching a draft chunk keeps the calling thread busy for about as long as the device computes
(one launch after the other, without Python's lock). What has to be decided about the chunk before
it can be done meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class SideWork:
    """Runs one function at a time in a thread of its own; use it as a context manager.

    Leaving the context waits for what is running, also after an interruption: nothing touches the
    engine's state any more then.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="specter-side")
        self._running: Future[Any] | None = None

    def __enter__(self) -> SideWork:
        return self

    def __exit__(self, *error: Any) -> None:
        interrupted: BaseException | None = None
        while True:
            try:
                self._thread.shutdown(wait=True)
                break
            except KeyboardInterrupt as again:
                # What is running would go on behind the engine's back.
                interrupted = again
        if interrupted is not None:
            raise interrupted

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Begins `function(*arguments)`; `wait` first for what was begun before."""
        self._running = self._thread.submit(function, *arguments)

    def wait(self) -> Any:
        """Waits for what was begun and returns what it returned, None if nothing was begun.

        Raises what it raised.
        """
        running, self._running = self._running, None
        return None if running is None else running.result()


class InlineWork(SideWork):
    """The same interface without a thread, for clocks that are simulated.

    Work is done by `wait`, that is after the next chunk was dispatched, as a thread would.
    """

    def __init__(self) -> None:
        self._work: Callable[[], Any] | None = None

    def __exit__(self, *error: Any) -> None:
        pass

    def start(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Keeps it for `wait`."""
        self._work = functools.partial(function, *arguments)

    def wait(self) -> Any:
        """Does what was begun and returns what it returned, None if nothing was."""
        work, self._work = self._work, None
        return None if work is None else work()
