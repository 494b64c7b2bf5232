"""Writes a worker's updates to its outbox; while the disk refuses that, they wait in memory and training goes on."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from paceline.async_dp.wal.worker_outbox import Outbox, PendingUpdate
from paceline.errors import CheckpointError
from paceline.transport.envelope import Bytes

__all__ = ["OutboxWriter"]

log = logging.getLogger("paceline.async_dp")

_RETRY_SECONDS = 1.0


class OutboxWriter:
    """An outbox on a disk that may be full; holds at most one update per fragment in memory.

    Args:
        outbox: of the worker.
        name: of the worker, for people.

    Attributes:
        due: when `retry` has something to do; infinity: no update waits.
    """

    def __init__(self, outbox: Outbox, name: str) -> None:
        self._outbox, self._name, self._failed = outbox, name, False
        self._waiting: dict[int, tuple[Mapping[str, Any], bytes]] = {}
        self.due = math.inf

    def put(
        self, fragment: int, values: Mapping[str, Any], payload: Bytes, now: float
    ) -> PendingUpdate | None:
        """Store an update under the next round of its fragment; None: it waits for `retry`."""
        try:
            round = self._outbox.next_round(fragment)
            self._outbox.put(round, fragment, values, payload)
        except CheckpointError as error:
            self._waiting[fragment] = values, bytes(payload)
            self.due = now + _RETRY_SECONDS
            self._warn("an update waits", error)
            return None
        self._waiting.pop(fragment, None)
        self._failed = False
        return self._outbox.get(fragment)

    def retry(self, now: float) -> list[PendingUpdate]:
        """Store the updates that wait, if it is time; return those that are stored now."""
        if now < self.due:
            return []
        self.due = math.inf
        waiting = list(self._waiting.items())
        stored = [self.put(fragment, *update, now) for fragment, update in waiting]
        found = [update for update in stored if update is not None]
        if found and not self._waiting:
            log.info("worker %s: the updates that waited are stored", self._name)
        return found

    def acknowledge(self, round: int, fragment: int) -> bool:
        """Remove an acknowledged update; return whether it was pending and is removed."""
        try:
            return self._outbox.acknowledge(round, fragment)
        except CheckpointError as error:
            self._warn("an acknowledged update stays", error)
            return False

    def bind(self, run: str) -> bool:
        """Set the run that this worker serves; return False if that can't be written now.

        Raises:
            UsageError: updates for another run are pending.
        """
        try:
            self._outbox.bind(run)
        except CheckpointError as error:
            self._warn("it can't join yet", error)
            return False
        return True

    def pending(self) -> list[PendingUpdate]:
        """Return the stored updates by fragment."""
        return self._outbox.pending()

    def get(self, fragment: int) -> PendingUpdate:
        """Return the stored update of a fragment."""
        return self._outbox.get(fragment)

    def _warn(self, effect: str, error: CheckpointError) -> None:
        """Log a failure, once until something was stored again."""
        if not self._failed:
            self._failed = True
            reason = " ".join(str(error).split())
            log.warning("worker %s: %s, and training goes on: %s", self._name, effect, reason)
