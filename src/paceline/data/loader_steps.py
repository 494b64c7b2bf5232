"""Serves a loader's batches by optimizer step, through changes of its ranks or position."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from itertools import chain
from typing import Any

from paceline.errors import UsageError

__all__ = ["LoaderSteps"]

_END = object()


class LoaderSteps:
    """Serves the steps of a loader up to the end of an epoch, see `Loader.steps`.

    Args:
        begin: starts an iteration from the loader's position; all ranks call it together.
        iteration: returns the number of the latest iteration; it also changes when the loader or its position is moved.
        next_epoch: returns the epoch of the next step.
        ahead: fetch the first batch of each step before the step is served, as the end is not known otherwise.
    """

    def __init__(
        self,
        begin: Callable[[], Generator[Any, None, None]],
        iteration: Callable[[], int],
        next_epoch: Callable[[], int],
        *,
        ahead: bool,
    ) -> None:
        self._begin, self._latest, self._next_epoch, self._ahead = begin, iteration, next_epoch, ahead
        self._batches: Generator[Any, None, None] | None = None  # of the iteration of this number:
        self._iteration = iteration()
        self._complete = True  # all batches of the present step were served

    def serve(self, epochs: int) -> Iterator[Iterator[Any]]:
        """Yield an iterator over the batches of each step.

        Args:
            epochs: the first epoch that is not served.

        Raises:
            UsageError: the batches of a step were not all used.
        """
        try:
            while self._next_epoch() < epochs:
                if self._iteration != self._latest():
                    self._close()
                self._complete = False
                step = self._serve_step(epochs)
                if self._ahead:
                    if (first := next(step, _END)) is _END:
                        continue
                    step = chain([first], step)
                yield step
                if not self._complete and self._iteration == self._latest():
                    raise UsageError(
                        "the batches of a step were not all used before the next step",
                        remedy="run `for batch in batches` to its end; or break out of the loop over steps, too",
                    )
            if self._batches is not None and self._iteration == self._latest():
                next(self._batches, None)  # ends the iteration
        finally:
            self._close()

    def _serve_step(self, epochs: int) -> Iterator[Any]:
        """Yield the batches of the next step; nothing happens before the first is requested."""
        batches, batch = self._batches, _END
        if batches is not None and self._iteration == self._latest():
            batch = next(batches, _END)
        if batches is None or (batch is _END and self._next_epoch() < epochs):
            self._close()
            batches = self._batches = self._begin()
            self._iteration = self._latest()
            batch = next(batches, _END)
        while batch is not _END:
            self._complete = getattr(batch, "ends_step", True)
            yield batch
            batch = _END if self._complete else next(batches, _END)

    def _close(self) -> None:
        """End the present iteration, and its workers."""
        if self._batches is not None:
            self._batches.close()
        self._batches, self._iteration = None, self._latest()
