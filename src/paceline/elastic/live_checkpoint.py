"""Checkpoints of a live run, between its steps: a save that fails with another rank is repeated in the next world."""

from __future__ import annotations

import logging
from collections.abc import Callable

from paceline.checkpoint.api import Checkpoint
from paceline.elastic.step_counter import StepCounter
from paceline.health.watchdog import is_symptom
from paceline.world.control_collectives import rank_and_size

__all__ = ["LiveCheckpoint"]

log = logging.getLogger("paceline.elastic")


class LiveCheckpoint:
    """The checkpoint of a live run; without one, nothing is saved.

    Args:
        checkpoint: of the program; None: it has none.
        steps: counts the failures.
    """

    def __init__(self, checkpoint: Checkpoint | None, steps: StepCounter) -> None:
        self._checkpoint, self._steps = checkpoint, steps

    @property
    def newest_step(self) -> int | None:
        """The step of the newest complete checkpoint; None: there is none."""
        return None if self._checkpoint is None else self._checkpoint.newest_step

    def save_if_due(self) -> bool:
        """Save if it is due; return whether that did not fail with another rank."""
        return self._checkpoint is None or self._try(self._checkpoint.save_if_due)

    def save_last(self) -> bool:
        """Save what the last ranks have trained, before they leave; return whether that did not fail with a rank."""
        checkpoint = self._checkpoint
        if checkpoint is None:
            return True
        if self._steps.step > 0 and not self._try(lambda: checkpoint.save(wait=True)):
            return False
        if rank_and_size()[0] == 0:
            log.warning("the last ranks leave after step %d, which is saved", self._steps.step)
        checkpoint.close()
        return True

    def leave(self) -> None:
        """Leave it to the other ranks."""
        if self._checkpoint is not None:
            self._checkpoint.leave()

    def _try(self, save: Callable[[], None]) -> bool:
        try:
            save()
        except BaseException as error:
            if not is_symptom(error):
                raise
            self._steps.fail(error)
            return False
        return True
