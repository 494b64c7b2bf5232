"""Every error that Paceline raises on purpose.

    PacelineError
    ├── UsageError            an argument or option is wrong; nothing was started yet
    │   ├── MismatchError     ranks disagree about something that must be the same on all
    │   └── UnevenData        ranks have unequal numbers of batches, which the policy refuses
    ├── WorldError            the environment describes no consistent world of ranks
    │   └── MissingRanks      a world did not complete in time; names the missing ranks
    ├── DataError             a dataset raised, or contradicted its own length; names rank and batch
    ├── SyncError             gradients can't be synchronised
    │   ├── UnsyncedGradients optimizer.step() would have used gradients of one rank only
    │   ├── BackwardFailed    another rank raised during this backward
    │   ├── NonFiniteGradient a gradient is NaN or infinite; names parameters and ranks
    │   └── ReplicasDiverged  parameters that must be equal on all ranks differ; names one and the ranks
    ├── CollectiveError       a collective can't be completed
    │   ├── PeerLost          a rank ended or left while others waited for it; names it
    │   ├── CollectiveTimeout a rank did not join in time; names it
    │   └── PeerFailed        a rank raised, ended, stopped or hangs; names it, its host and what it was doing
    ├── CheckpointError       a checkpoint can't be written or read
    │   └── DamagedCheckpoint it is not what was written; names the file
    ├── EnvelopeError         an envelope can't be delivered; names its source and number
    │   ├── DamagedEnvelope   its bytes are not those that were sent; names the part
    │   ├── TruncatedEnvelope it ends too early; names where
    │   ├── RepeatedEnvelope  it was received before
    │   ├── ForeignEnvelope   it is of another run, from an unknown source, or for another recipient
    │   ├── MisplacedEnvelope it is out of order
    │   └── MissingEnvelope   it never arrived, or not in time
    ├── RankFailed            a process that Paceline started ended with an error
    └── HostFailed            a program on a host of the lab ended with an error, or did not end in time

A message contains what was passed, what is valid and what to do. If known, the rank and the optimizer step are
attributes and part of the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TypedDict, Unpack

__all__ = [
    "BackwardFailed",
    "CheckpointError",
    "CollectiveError",
    "CollectiveTimeout",
    "DamagedCheckpoint",
    "DamagedEnvelope",
    "DataError",
    "EnvelopeError",
    "ForeignEnvelope",
    "HostFailed",
    "MismatchError",
    "MisplacedEnvelope",
    "MissingEnvelope",
    "MissingRanks",
    "NonFiniteGradient",
    "PacelineError",
    "PeerFailed",
    "PeerLost",
    "RankFailed",
    "RepeatedEnvelope",
    "ReplicasDiverged",
    "SyncError",
    "TruncatedEnvelope",
    "UnevenData",
    "UnsyncedGradients",
    "UsageError",
    "WorldError",
    "require",
    "unknown",
]


class _Known(TypedDict, total=False):
    """Arguments of every error besides its message, see `PacelineError`."""

    rank: int | None
    step: int | None
    remedy: str


class PacelineError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: what happened, what is valid.
        rank: the rank concerned, if known.
        step: the optimizer step concerned, if known: counted from 0 by a model, from 1 by ``paceline train`` and its
            log.
        remedy: what the user can do, in one sentence.

    Example:
        >>> print(PacelineError("the disk is full", rank=1, step=20, remedy="make room"))
        [rank 1, step 20] the disk is full
          → make room
    """

    def __init__(
        self, message: str, *, rank: int | None = None, step: int | None = None, remedy: str = ""
    ) -> None:
        self.rank, self.step, self.remedy = rank, step, remedy
        where = ", ".join(
            f"{name} {value}" for name, value in (("rank", rank), ("step", step)) if value is not None
        )
        text = f"[{where}] {message}" if where else message
        super().__init__(f"{text}\n  → {remedy}" if remedy else text)


class UsageError(PacelineError, ValueError):
    """An argument or option is wrong; nothing was started or overwritten."""


class MismatchError(UsageError):
    """Ranks disagree about something that must be the same on all of them."""


class UnevenData(UsageError):
    """Ranks have unequal numbers of batches, which the policy refuses."""


class WorldError(PacelineError, RuntimeError):
    """The environment describes no consistent world of ranks."""


class MissingRanks(WorldError, TimeoutError):
    """A world did not complete in time; the message names the missing ranks."""


class DataError(PacelineError, RuntimeError):
    """A dataset raised, or contradicted its own length; the message names the rank and the batch."""


class SyncError(PacelineError, RuntimeError):
    """Gradients can't be synchronised."""


class UnsyncedGradients(SyncError):
    """``optimizer.step()`` would have used gradients that were not synchronised."""


class BackwardFailed(SyncError):
    """Another rank raised during this backward, so this step has no global gradient."""


class NonFiniteGradient(SyncError):
    """The synchronised gradient is NaN or infinite; no rank took the step."""


class ReplicasDiverged(SyncError):
    """Parameters that must be equal on all ranks differ."""


class CollectiveError(PacelineError, RuntimeError):
    """A collective can't be completed; its group can't be used any more.

    Args:
        message: as for every error; `rank` and `step`, too, are those of the rank at fault.
        host: of that rank.
        exit_code: of its process; −n if signal n ended it, None if not known.
    """

    def __init__(
        self, message: str, *, host: str = "", exit_code: int | None = None, **known: Unpack[_Known]
    ) -> None:
        super().__init__(message, **known)
        self.host, self.exit_code = host, exit_code


class PeerLost(CollectiveError):
    """A rank ended, or left its group, while others waited for it."""


class CollectiveTimeout(CollectiveError, TimeoutError):
    """A rank did not join a collective in time."""


class CheckpointError(PacelineError, RuntimeError):
    """A checkpoint can't be written or read; earlier complete ones are kept."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is not what was written."""


class PeerFailed(CollectiveError):
    """A rank failed, so training can't go on; raised on the other ranks by `paceline.Watchdog`.

    Args:
        message: as for a CollectiveError, like `host` and `exit_code`; `rank` is None if no single rank is at fault.
        pid: its process id.
        phase: its phase of the step, see `paceline._core.step_state`.
        bucket: the bucket that it waited for, −1: none.
        kind: of failure, see `paceline.health.attribution`.
        stack: its traceback or present stack; empty if not known.
    """

    def __init__(
        self,
        message: str,
        *,
        host: str = "",
        exit_code: int | None = None,
        pid: int = 0,
        phase: str = "",
        bucket: int = -1,
        kind: str = "",
        stack: str = "",
        **known: Unpack[_Known],
    ) -> None:
        super().__init__(message, host=host, exit_code=exit_code, **known)
        self.pid, self.phase, self.bucket, self.kind, self.stack = pid, phase, bucket, kind, stack


class EnvelopeError(PacelineError, RuntimeError):
    """An envelope can't be delivered.

    Args:
        message: as for every error; `rank`, too, is that of its sender.
        source: its sender, if known: a rank, or the number of a worker.
        sequence: its number among those of its source, if known.
        part: its damaged part: ``"begin mark"``, ``"header"``, ``"payload"``, ``"end mark"``, or "".
    """

    def __init__(
        self,
        message: str,
        *,
        source: int | None = None,
        sequence: int | None = None,
        part: str = "",
        **known: Unpack[_Known],
    ) -> None:
        super().__init__(message, **known)
        self.source, self.sequence, self.part = source, sequence, part


class DamagedEnvelope(EnvelopeError):
    """An envelope's bytes are not those that were sent."""


class TruncatedEnvelope(EnvelopeError):
    """An envelope ends before it is whole."""


class RepeatedEnvelope(EnvelopeError):
    """An envelope was received before."""


class ForeignEnvelope(EnvelopeError):
    """An envelope is of another run, from an unknown source, or for another recipient."""


class MisplacedEnvelope(EnvelopeError):
    """An envelope is out of order."""


class MissingEnvelope(EnvelopeError, TimeoutError):
    """An envelope never arrived, or not in time."""


class RankFailed(PacelineError, RuntimeError):
    """A process that Paceline started ended with an error.

    Args:
        message: as for every error.
        exit_code: with which the process that started it is to end.
    """

    def __init__(self, message: str, *, exit_code: int = 1, **known: Unpack[_Known]) -> None:
        super().__init__(message, **known)
        self.exit_code = exit_code


class HostFailed(PacelineError, RuntimeError):
    """A program on a host of the lab ended with an error, or did not end in time.

    Args:
        message: as for every error.
        host: number of the host that failed first.
    """

    def __init__(self, message: str, *, host: int | None = None, **known: Unpack[_Known]) -> None:
        super().__init__(message, **known)
        self.host = host


def require(condition: bool, given: str, remedy: str) -> None:
    """Raise a `UsageError` about what was `given` unless `condition` holds."""
    if not condition:
        raise UsageError(given, remedy=remedy)


def unknown(kind: str, given: object, valid: Iterable[str]) -> UsageError:
    """Return the error for a name that is none of `valid`; it suggests the nearest one.

    Example:
        >>> raise unknown("strategy", "bukketed", ["naive", "bucketed"])
        Traceback (most recent call last):
        paceline.errors.UsageError: unknown strategy 'bukketed'; valid: naive, bucketed
          → did you mean 'bucketed'?
    """
    names = list(valid)
    near = get_close_matches(str(given), names, n=1, cutoff=0.5)
    remedy = f"did you mean {near[0]!r}?" if near else ""
    return UsageError(f"unknown {kind} {given!r}; valid: {', '.join(names)}", remedy=remedy)
