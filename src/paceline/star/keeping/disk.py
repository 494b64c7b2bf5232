"""Bytes to a place on the disk: all of them, or an error that says why not and what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from paceline import faults
from paceline.durable import flush
from paceline.errors import CheckpointError, UsageError
from paceline.exchange.envelope import Bytes

__all__ = ["failed", "make_folder", "write_at"]

_PIECES_AT_ONCE = 512
"""Handed to the kernel in one call; Linux takes 1024."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_at(handle: int, pieces: Sequence[Bytes], offset: int) -> None:
    """Write pieces one behind the other into an open file.

    Args:
        handle: of the file.
        pieces: contiguous bytes.
        offset: where the first begins.

    Raises:
        OSError: they could not all be written; a part of them may be.
    """
    for start in range(0, len(pieces), _PIECES_AT_ONCE):
        batch = [memoryview(piece).cast("B") for piece in pieces[start : start + _PIECES_AT_ONCE]]
        faults.writing(sum(piece.nbytes for piece in batch))
        while batch:
            nbytes = os.pwritev(handle, batch, offset)
            offset += nbytes
            while batch and nbytes >= batch[0].nbytes:
                nbytes -= batch.pop(0).nbytes
            if batch:
                batch[0] = batch[0][nbytes:]


def make_folder(path: Path, whose: str) -> None:
    """Make a folder and those above it, unless they are there; they are on the disk when this returns.

    Args:
        path: the folder.
        whose: who needs it, for messages: ``"hub"``.

    Raises:
        UsageError: it can't be made.
    """
    new = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for folder in reversed(new):
            flush(folder.parent)
    except OSError as error:
        raise UsageError(
            f"{str(path)!r} can't be the folder of a {whose}: {error.strerror or error}",
            remedy="name a folder that you may write to",
        ) from error


def failed(path: Path, error: OSError, remedy: str, done: str = "written") -> CheckpointError:
    """Return the error for a file that could not be written; it says so where the disk is full.

    Args:
        path: the file.
        error: what the system said.
        remedy: what the user can do, one sentence.
        done: what it could not be.
    """
    why = error.strerror or str(error)
    if error.errno in _NO_ROOM:
        why = f"the disk is full ({why})"
    return CheckpointError(f"{str(path)!r} can't be {done}: {why}", remedy=remedy)
