"""Cutting a message into frames, and its checksum, which is that of its frames' checksums (pure)."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from paceline.errors import UsageError

__all__ = ["FRAME_NBYTES", "Frame", "frames_of", "message_checksum"]

FRAME_NBYTES = 4 << 20
"""Long messages go in frames of so many bytes: far below what an MPI count holds, and a few milliseconds each."""

_MOST_FRAME_NBYTES = 16 << 20


@dataclass(frozen=True)
class Frame:
    """Part of a message: which, and where it lies in it, in bytes."""

    index: int
    offset: int
    nbytes: int


def frames_of(nbytes: int, frame_nbytes: int = FRAME_NBYTES) -> list[Frame]:
    """Return the frames of a message of `nbytes`; an empty message has one, which is empty.

    Raises:
        UsageError: frames of no or too many bytes.

    Example:
        >>> frames_of(10, 4)
        [Frame(index=0, offset=0, nbytes=4), Frame(index=1, offset=4, nbytes=4), Frame(index=2, offset=8, nbytes=2)]
    """
    if not 0 < frame_nbytes <= _MOST_FRAME_NBYTES:
        raise UsageError(
            f"frames of {frame_nbytes} bytes", remedy=f"give 1 to {_MOST_FRAME_NBYTES} bytes (16 MiB)"
        )
    starts = range(0, max(nbytes, 1), frame_nbytes)
    return [Frame(index, offset, min(frame_nbytes, nbytes - offset)) for index, offset in enumerate(starts)]


def message_checksum(checksums: Iterable[int]) -> int:
    """Return xxh3-64 over checksums, 8 bytes each, little-endian: of a message's frames, or of messages.

    Both ends know it without reading any byte a second time.
    """
    return xxh3_64_intdigest(b"".join(struct.pack("<Q", each) for each in checksums))
