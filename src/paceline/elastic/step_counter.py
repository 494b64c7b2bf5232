"""Counts the optimizer steps of a run, and the failures between them."""

from __future__ import annotations

from collections.abc import Sequence
from types import FrameType

import torch

from paceline.errors import UsageError, WorldError

__all__ = ["StepCounter"]

_MAX_FAILURES = 20
"""Failures since a step was applied, more than which mean that none will be."""


class StepCounter:
    """Counts a step once all optimizers have updated.

    Args:
        optimizers: whose updates make a step.
        step: number of steps so far.

    Attributes:
        step: number of steps.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], step: int) -> None:
        self.step, self._failures = step, 0
        self._count, self._updated = len(optimizers), set[int]()
        self._place = ""
        for number, optimizer in enumerate(optimizers):
            optimizer.register_step_post_hook(lambda *_, number=number: self._updated.add(number))

    def check_place(self, caller: FrameType) -> None:
        """Check that all steps begin at one place in the program.

        Raises:
            UsageError: they don't.
        """
        place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        if self._place not in ("", place):
            raise UsageError(
                f"attempts in two places, {self._place} and {place}, of which a newcomer begins with the first",
                remedy="use one per step, and in it conditions on elastic.step; Elastic(checkpoint=…) saves by itself",
            )
        self._place = place

    def begin(self) -> None:
        """Forget what has been updated: a step begins."""
        self._updated.clear()

    def end(self, *, held: bool) -> bool:
        """Count the step if its update was applied; return whether it was.

        Args:
            held: the update waits until the others' progress is known.

        Raises:
            WorldError: only some optimizers have updated.
        """
        if not self._updated or held:
            return False
        if len(self._updated) < self._count:
            raise WorldError(
                f"a failure between the updates of {self._count} optimizers",
                step=self.step,
                remedy="call their step() one right after the other",
            )
        self.advance()
        return True

    def advance(self) -> None:
        """Count a step."""
        self.step, self._failures = self.step + 1, 0

    def fail(self, error: BaseException) -> None:
        """Count a failure.

        Raises:
            WorldError: too many have followed each other.
        """
        self._failures += 1
        if self._failures > _MAX_FAILURES:
            why = str(error).partition("\n")[0]
            raise WorldError(f"{_MAX_FAILURES} failures in a row: {why}", step=self.step) from error
