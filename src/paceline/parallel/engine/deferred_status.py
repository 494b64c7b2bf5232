"""Round statuses on an accelerator, read one step late, so that the host never waits for the device within a step.

The summed status is copied to page-locked memory of the host, behind all that the stream does. The host reads it when
the next backward ends, by which time the device has long been given the next forward and backward to do. Until then:

    weights           are computed on the device, from the summed status
    used parameters   are those of the rounds before, which were read in time, and must stay the same

[Note: known late] Whatever else a status reports (a rank whose backward failed, mixed calls, a changed model, other
used parameters) is raised on all ranks when it is read, by its own step. That step's update has run by then, so the
engine refuses to go on: the run resumes from a checkpoint. Where the set of used parameters has changed before, where
hooks fire several times, in torch's join context and under ``sync="auto"``, every status is read in time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import SyncError
from paceline.parallel.engine import round_status
from paceline.parallel.engine.round_status import RoundSummary
from paceline.world.accelerator import current_stream, host_buffer

__all__ = ["DeferredStatus", "StatusMemory", "report_unread"]

log = logging.getLogger("paceline.parallel")


@dataclass(frozen=True)
class DeferredStatus:
    """A status on its way to the host.

    Attributes:
        step: its round.
        used: which parameters were taken to be used.
        changes: of the model on this rank; see `model_changes`.
        numbers: the summed status, once `copied`.
        copied: the event after the copy.
    """

    step: int
    used: tuple[bool, ...]
    changes: Mapping[str, str]
    numbers: torch.Tensor
    copied: Any

    def read(self, ranks: int) -> RoundSummary:
        """Return the summary; waits for the device only if that is more than a step behind."""
        if not self.copied.query():
            self.copied.synchronize()
        return round_status.decode(self.numbers.tolist(), ranks)


def report_unread(unread: Sequence[DeferredStatus], rank: int, ranks: int) -> None:
    """Log an error of the latest round, which no further round has raised, when its engine ends."""
    for deferred in unread:
        try:
            deferred.read(ranks).raise_for_status(rank, deferred.step)
        except SyncError as error:
            log.error("the last update was wrong: %s", error)


class StatusMemory:
    """Page-locked memory for one status at a time, on its way to the device and back.

    Args:
        place: of this rank's status on the device.

    Attributes:
        sent: for the status of this rank; may be written once the one before has been read.
    """

    def __init__(self, place: torch.Tensor) -> None:
        self.sent = host_buffer(place.shape, place.dtype, place.device)
        self._summed = host_buffer(place.shape, torch.float64, place.device)

    def defer(
        self, summed: torch.Tensor, step: int, used: tuple[bool, ...], changes: Mapping[str, str]
    ) -> DeferredStatus:
        """Start copying a summed status [numbers], float64, to the host."""
        self._summed.copy_(summed, non_blocking=True)
        copied = current_stream(summed.device).record_event()
        return DeferredStatus(step, used, changes, self._summed, copied)
