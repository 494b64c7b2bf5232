"""Every error that Paceline raises on purpose.

    PacelineError
    ├── UsageError            an argument or option is wrong: nothing was started yet
    │   └── MismatchError     ranks disagree about something that must be the same on all
    ├── WorldError            the environment describes no consistent world of ranks
    │   └── MissingRanks      a world did not complete in time: names who is missing
    ├── SyncError             gradients can't be synchronised as asked
    │   ├── UnsyncedGradients optimizer.step() would have used gradients of one rank only
    │   └── BackwardFailed    another rank raised during this backward
    └── RankFailed            a process that Paceline started ended with an error

A message says what was passed, what is valid and what to do. Where they are known, the rank and the
optimizer step are attributes and part of the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "BackwardFailed",
    "MismatchError",
    "MissingRanks",
    "PacelineError",
    "RankFailed",
    "SyncError",
    "UnsyncedGradients",
    "UsageError",
    "WorldError",
    "unknown",
]


class PacelineError(Exception):
    """Base of all errors raised on purpose.

    Args:
        message: what happened, what is valid.
        rank: the rank concerned, where it is known.
        step: the optimizer step concerned, where it is known: counted from 0 by a model, from 1 by
            ``paceline train`` and its log.
        remedy: what the user can do, one sentence.
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


class WorldError(PacelineError, RuntimeError):
    """The environment describes no consistent world of ranks."""


class MissingRanks(WorldError, TimeoutError):
    """A world did not complete in time; the message names the ranks that never came."""


class SyncError(PacelineError, RuntimeError):
    """Gradients can't be synchronised as asked."""


class UnsyncedGradients(SyncError):
    """``optimizer.step()`` would have used gradients that were not synchronised."""


class BackwardFailed(SyncError):
    """Another rank raised during this backward, so this step has no global gradient."""


class RankFailed(PacelineError, RuntimeError):
    """A process that Paceline started ended with an error."""


def unknown(kind: str, given: object, valid: Iterable[str]) -> UsageError:
    """Return the error for a name that is none of `valid`, with the nearest one suggested.

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
