"""Commits a hub's journal: takes snapshots when they are due, and pauses the hub while the disk refuses writes (pure).

While it is paused the hub takes in nothing and answers nothing: workers keep their updates and send them again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.async_dp.wal.memory_journal import MemoryJournal
from paceline.errors import CheckpointError

__all__ = ["DurableCommit"]

_RETRY_SECONDS = 1.0


class DurableCommit:
    """Decides when the hub may answer.

    Args:
        journal: of the hub.
        take_snapshot: takes one.
        updates: returns the number of updates since the last snapshot.
        snapshot_every: updates between two snapshots; fewer if the journal gets long.

    Attributes:
        begun: whether initial parameters were chosen that are in no snapshot yet.
        error: why nothing is answered; empty if nothing is wrong.
    """

    def __init__(
        self,
        journal: HubJournal | MemoryJournal,
        take_snapshot: Callable[[], object],
        updates: Callable[[], int],
        snapshot_every: int,
    ) -> None:
        self._journal, self._take_snapshot = journal, take_snapshot
        self._updates, self._snapshot_every = updates, snapshot_every
        self.begun, self.error = False, ""
        self._retry_at = -math.inf

    @property
    def paused(self) -> bool:
        """Whether nothing may be taken in."""
        return bool(self.error or self._journal.problem)

    def commit(self, now: float) -> bool:
        """Write all records to disk, and a snapshot if one is due; return whether the hub may answer."""
        if self.error and now < self._retry_at:
            return False
        try:
            self._journal.commit()
            updates = self._updates()
            if self.begun or updates >= self._snapshot_every or (updates and self._journal.snapshot_due):
                self._take_snapshot()
                self.begun = False
        except CheckpointError as error:
            self.fail(error, now)
            return False
        self.error = ""
        return True

    def fail(self, error: CheckpointError, now: float) -> None:
        """Pause the hub: the journal could not be written."""
        self.error, self._retry_at = str(error), now + _RETRY_SECONDS
