"""A worker of several ranks: rank 0 decides and exchanges with the hub, and the others do the same in the same step.

    rank 0      AsyncWorker decides ── commands ──▶  read, write, score, reset …, end (with the state of the worker)
    the others  follow() ◀──────────── one by one, until the end: the same state, and the step of the next meeting

[Note: meetings] Ranks of a group meet only after steps at which something may be due, which all of them know from the
meeting before: where an update is sent, where parameters are applied, where a score is reported. In all other steps
there is no communication beyond that of the gradients. A meeting at which nothing arrived costs one broadcast of 512
bytes; where parameters are applied, they are broadcast too, in the model's dtype. While an answer of the hub is overdue
(the network is slow, or the hub is gone) ranks meet 1, 2, 4, … steps later, at most k: an absent hub costs a broadcast
per k steps, and late parameters are applied at most twice as late. With k = 20 and d = 5 that is two meetings per 20
steps. Without meetings, an all-reduce per step would have to carry a flag that is almost never set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

from paceline.async_dp.protocol.parameter_layout import FragmentLayout
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.async_dp.worker.async_worker import WorkerCounts
from paceline.async_dp.worker.fragment_replica import FragmentReplica
from paceline.async_dp.worker.group_tensors import GroupTensors
from paceline.errors import CheckpointError, CollectiveError, PacelineError, SyncError, UsageError
from paceline.parallel.gradient_collectives import Comm
from paceline.world.control_collectives import broadcast_text, gather_rows

__all__ = ["GroupReplica", "RankGroup", "WorkerState"]

_ERRORS = {"UsageError": UsageError, "CheckpointError": CheckpointError}


class WorkerState(msgspec.Struct, kw_only=True):
    """What all ranks of a worker know after a meeting.

    Attributes:
        counts: of the worker.
        lr_scale: factor for the learning rate.
        every: k.
        delay: d.
        samples: that the global parameters were trained on, as far as known.
        next: steps until the next meeting.
        finished: whether the model holds the global parameters, after `finish`.
    """

    counts: WorkerCounts = msgspec.field(default_factory=WorkerCounts)
    lr_scale: float = 1.0
    every: int
    delay: int
    samples: float = 0.0
    next: int = 1
    finished: bool = False


class _Command(msgspec.Struct, omit_defaults=True):
    """What all ranks do next."""

    what: str
    fragment: int = 0
    kind: str = ""  # of an error
    text: str = ""
    state: WorkerState | None = None


class RankGroup:
    """The ranks of a worker; see [Note: meetings].

    Args:
        comm: the ranks.
        tensors: of the model.
        score: returns this rank's score; called on all ranks at the same time, and the worker's is their mean.
        reset_optimizer: called on all ranks.
    """

    def __init__(
        self,
        comm: Comm,
        tensors: GroupTensors,
        *,
        score: Callable[[], float],
        reset_optimizer: Callable[[], None],
    ) -> None:
        self.leads, self.size = comm.rank == 0, comm.size
        self._group, self._tensors = comm.group, tensors
        self._score, self._reset_optimizer = score, reset_optimizer
        self._score_error: Exception | None = None

    # ------------------------------------------------------------------ rank 0

    @contextlib.contextmanager
    def lead(self, state: Callable[[], WorkerState]) -> Iterator[None]:
        """Meet: the block gives commands; at its end all ranks get the state, or raise what the block raised."""
        try:
            yield
        except (SyncError, CollectiveError):
            raise  # another rank is gone
        except Exception as error:
            with contextlib.suppress(Exception):
                self._command(_Command("error", kind=type(error).__name__, text=str(error)))
            raise
        self._command(_Command("end", state=state()))

    def read(self, fragment: int) -> Any:
        """Return the tensors of a fragment, whole."""
        if self._tensors.sharded:
            self._command(_Command("read", fragment))
        return self._tensors.read(fragment)

    def write(self, fragment: int) -> None:
        """Write the tensors of a fragment, as `read` returned them, on all ranks."""
        self._command(_Command("write", fragment))
        self._tensors.write(fragment)

    def score(self) -> float:
        """Return the mean of all ranks' scores."""
        self._command(_Command("score"))
        rows = self._gather_scores()
        if self._score_error is not None:
            raise self._score_error
        failed = [rank for rank, (_, failure) in enumerate(rows) if failure]
        if failed:
            raise UsageError(
                "score= raised on this rank", rank=failed[0], remedy="see the error of that rank"
            )
        return sum(score for score, _ in rows) / len(rows)

    def reset_optimizer(self) -> None:
        """Drop the optimizer's state on all ranks."""
        self._command(_Command("reset"))
        self._reset_optimizer()

    def keep_waiting(self) -> None:
        """Have the others wait on: no collective is pending for longer than between two calls."""
        self._command(_Command("wait"))

    def _command(self, command: _Command) -> None:
        broadcast_text(msgspec.json.encode(command).decode(), self._group)

    # ------------------------------------------------------------------ the other ranks

    def follow(self) -> WorkerState:
        """Carry out rank 0's commands until the end of the meeting, and return the state.

        Raises:
            PacelineError: what rank 0 raised.
        """
        while True:
            command = msgspec.json.decode(broadcast_text(group=self._group), type=_Command)
            if command.what == "end":
                assert command.state is not None
                return command.state
            if command.what == "error":
                raise self._score_error or _error_of(command)
            if command.what == "read":
                self._tensors.read(command.fragment)
            elif command.what == "write":
                self._tensors.write(command.fragment)
            elif command.what == "score":
                self._gather_scores()
            elif command.what == "reset":
                self._reset_optimizer()

    def _gather_scores(self) -> list[tuple[float, bool]]:
        """Return every rank's score, and whether it raised instead."""
        self._score_error, score = None, 0.0
        try:
            with torch.no_grad():
                score = self._score()
        except Exception as error:  # noqa: BLE001 - raised once all ranks know
            self._score_error = error
        row = torch.tensor([score, float(self._score_error is not None)], dtype=torch.float64)
        return [
            (score, failed > 0) for score, failed in (row.tolist() for row in gather_rows(row, self._group))
        ]


def _error_of(command: _Command) -> PacelineError:
    """Return the error that rank 0 raised, or one that quotes it."""
    known = _ERRORS.get(command.kind)
    if known is not None:
        return known(command.text)
    return PacelineError(f"rank 0 of this worker raised {command.kind}: {command.text}")


class GroupReplica(FragmentReplica):
    """A fragment of a worker of several ranks, on rank 0: what it writes is written on all ranks.

    Args:
        number: of the fragment.
        group: the ranks.
        fragment: its layout.
        codec: of updates.
    """

    def __init__(self, number: int, group: RankGroup, fragment: FragmentLayout, codec: UpdateCodec) -> None:
        self._number, self._group = number, group
        super().__init__(fragment, group.read(number), codec)

    def snapshot(self) -> None:
        """Copy the parameters of the group."""
        self.bind(self._group.read(self._number))
        super().snapshot()

    def apply_received(self) -> None:
        """Apply received parameters on all ranks."""
        self.bind(self._group.read(self._number))
        super().apply_received()
        self._group.write(self._number)

    def swap_received(self) -> None:
        """Exchange the model's parameters with the received ones, on all ranks."""
        self.bind(self._group.read(self._number))
        super().swap_received()
        self._group.write(self._number)
