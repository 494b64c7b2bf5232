"""Cutting a message into frames, and its checksum, which is that of its frames' checksums (pure).

A receiver's ledger: which envelopes came, and which may not be delivered (pure).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from paceline.errors import EnvelopeError, ForeignEnvelope, MisplacedEnvelope, RepeatedEnvelope, UsageError
from paceline.transport.envelope_header import Header

__all__ = ["FRAME_NBYTES", "Frame", "ReceiveLedger", "split_frames", "message_checksum"]

FRAME_NBYTES = 4 << 20
"""Long messages go in frames of so many bytes: far below what an MPI count holds, and a few milliseconds each."""


_MOST_FRAME_NBYTES = 16 << 20


@dataclass(frozen=True)
class Frame:
    """Part of a message: which, and where it lies in it, in bytes."""

    index: int
    offset: int
    nbytes: int


def split_frames(nbytes: int, frame_nbytes: int = FRAME_NBYTES) -> list[Frame]:
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


class ReceiveLedger:
    """Knows every envelope that came to one receiver, and refuses those that may not be delivered.

    Args:
        run: the run that it belongs to.
        me: its number.
        sources: whose envelopes it takes.
        ordered: refuse what comes before its turn; else an envelope may be early, late or lost.

    Attributes:
        counts: how many were ``"delivered"``, and how many were refused, by name of the error.

    Example:
        >>> inbox = ReceiveLedger("run", me=0, sources=[1])
        >>> inbox.accept(Header("run", "greeting", source=1, target=0, sequence=0))
        >>> inbox.accept(Header("run", "greeting", source=1, target=0, sequence=0))
        Traceback (most recent call last):
        paceline.errors.RepeatedEnvelope: envelope 0 from 1 to 0 (greeting, round 0) has come before
    """

    def __init__(self, run: str, me: int, sources: Iterable[int], *, ordered: bool = False) -> None:
        self.run, self.me, self.ordered = run, me, ordered
        self.counts: Counter[str] = Counter()
        self._next = dict.fromkeys(sources, 0)  # all before came
        self._early: dict[int, set[int]] = {source: set() for source in self._next}

    def expected(self, source: int) -> int:
        """Return the least sequence number of a source that has not come."""
        return self._next[source]

    def refuse(self, error: EnvelopeError) -> EnvelopeError:
        """Count an envelope that is not delivered for another reason, and return that."""
        self.counts[type(error).__name__] += 1
        return error

    def check(self, header: Header, *, carried_from: int | None = None) -> None:
        """Raise if an envelope may not be delivered; nothing is noted or counted.

        Args:
            header: of the envelope.
            carried_from: who sent it, where the carrier knows.

        Raises:
            ForeignEnvelope: of another run, from an unknown source, for somebody else.
            RepeatedEnvelope: it has come before.
            MisplacedEnvelope: others have to come first, where the order counts.
        """
        error = self._problem(header, carried_from)
        if error is not None:
            raise error

    def accept(self, header: Header, *, carried_from: int | None = None) -> None:
        """Note and count that an envelope came whole, or was refused, and then raise as `check` does."""
        error = self._problem(header, carried_from)
        if error is not None:
            raise self.refuse(error)
        source, early = header.source, self._early[header.source]
        early.add(header.sequence)
        while self._next[source] in early:
            early.remove(self._next[source])
            self._next[source] += 1
        self.counts["delivered"] += 1

    def skip(self, source: int, sequence: int) -> None:
        """Expect no envelope of `source` before `sequence` any more."""
        self._next[source] = max(self._next[source], sequence)
        self._early[source] = {each for each in self._early[source] if each >= sequence}

    def _problem(self, header: Header, carried_from: int | None) -> EnvelopeError | None:
        kind, what = ForeignEnvelope, ""
        if header.run != self.run:
            what = f"is of run {header.run!r}, this is run {self.run!r}"
        elif header.target != self.me:
            what = f"came to {self.me}"
        elif header.source not in self._next:
            what = f"is from nobody known; known are {', '.join(map(str, self._next)) or 'none'}"
        elif carried_from not in (None, header.source):
            what = f"was carried from {carried_from}"
        elif header.sequence < self._next[header.source] or header.sequence in self._early[header.source]:
            kind, what = RepeatedEnvelope, "has come before"
        elif self.ordered and header.sequence > self._next[header.source]:
            kind, what = MisplacedEnvelope, f"came when envelope {self._next[header.source]} was expected"
        if not what:
            return None
        return kind(f"{header} {what}", source=header.source, sequence=header.sequence)
