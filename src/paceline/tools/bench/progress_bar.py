"""Progress of a measurement: a bar on a terminal, about ten plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["ProgressBar"]

_PLAIN_LINES = 10


class ProgressBar:
    """Progress bar on standard error; entering it returns the function to call after each step.

    Args:
        title: shown before the count.
        total: number of steps.
        shown: False on ranks that print nothing.
        console: where to print; standard error by default.
    """

    def __init__(self, title: str, total: int, *, shown: bool = True, console: Console | None = None) -> None:
        self._title, self._total, self._done = title, total, 0
        self._console = console or Console(stderr=True, quiet=not shown, highlight=False)
        self._live = shown and self._console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._live,
            transient=True,
        )

    def __enter__(self) -> Callable[[], None]:
        self._task = self._bar.add_task(self._title, total=self._total)
        self._bar.start()
        return self._advance

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _advance(self) -> None:
        self._done += 1
        self._bar.update(self._task, completed=self._done)
        every = max(1, self._total // _PLAIN_LINES)
        if not self._live and (self._done % every == 0 or self._done == self._total):
            self._console.print(f"{self._title}: {self._done}/{self._total}", markup=False, soft_wrap=True)
