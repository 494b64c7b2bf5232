"""Which exceptions are symptoms: what a rank sees when another one is the cause."""

from __future__ import annotations

import torch.distributed as dist

from paceline.errors import BackwardFailed, CollectiveError, EnvelopeError, MismatchError, SyncError

__all__ = ["is_symptom"]

_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "wait timeout",
    "socket timeout",
    "socket closed",
    "gloo/transport",
    "nccl error",
    "nccl communicator",
    "remote process exited",
    "another rank ended or stopped answering",
)


def is_symptom(error: BaseException | None) -> bool:
    """Return whether `error`, or what it came from, tells of another rank rather than of this one.

    Example:
        >>> is_symptom(RuntimeError("Connection reset by peer")), is_symptom(RuntimeError("shape mismatch"))
        (True, False)
    """
    known: set[int] = set()
    while error is not None and id(error) not in known:
        known.add(id(error))
        if _tells_of_others(error):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def _tells_of_others(error: BaseException) -> bool:
    if isinstance(error, MismatchError | EnvelopeError):
        return False
    if isinstance(error, CollectiveError | BackwardFailed | dist.DistError):
        return True
    told = isinstance(error, RuntimeError | ConnectionError | SyncError)
    return told and any(text in str(error).lower() for text in _TEXTS)
