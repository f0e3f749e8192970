"""Progress of a conversion: a callback, and the bar on the terminal that is one."""

from collections.abc import Callable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

ProgressCallback = Callable[[str, int, int], None]
"""Called with the part being written (such as "experts/layers_03"), steps done, steps in all."""


class TerminalProgress:
    """A bar on standard error, as a context manager; silent where that is no terminal."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("reading headers", total=None)

    def __call__(self, part: str, done: int, total: int) -> None:
        """See `ProgressCallback`."""
        self._bar.update(self._task, description=part, completed=done, total=total)

    def __enter__(self) -> "TerminalProgress":
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
