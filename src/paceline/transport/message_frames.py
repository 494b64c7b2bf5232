"""Frames of a long message, its checksum, and the receiver's ledger of envelopes (pure)."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from paceline.errors import EnvelopeError, ForeignEnvelope, MisplacedEnvelope, RepeatedEnvelope, UsageError
from paceline.transport.header_layout import Header

__all__ = ["FRAME_NBYTES", "Frame", "ReceiveLedger", "message_checksum", "split_frames"]

FRAME_NBYTES = 4 << 20
"""Default frame size: far below the limit of an MPI count, and a few milliseconds each."""

_MAX_FRAME_NBYTES = 16 << 20


@dataclass(frozen=True)
class Frame:
    """Slice of a message: its index, offset and size in bytes."""

    index: int
    offset: int
    nbytes: int


def split_frames(nbytes: int, frame_nbytes: int = FRAME_NBYTES) -> list[Frame]:
    """Return the frames of a message of `nbytes`; an empty message has one empty frame.

    Raises:
        UsageError: the frame size is zero or too large.

    Example:
        >>> split_frames(10, 4)
        [Frame(index=0, offset=0, nbytes=4), Frame(index=1, offset=4, nbytes=4), Frame(index=2, offset=8, nbytes=2)]
    """
    if not 0 < frame_nbytes <= _MAX_FRAME_NBYTES:
        raise UsageError(
            f"frames of {frame_nbytes} bytes are not possible",
            remedy=f"give 1 to {_MAX_FRAME_NBYTES} bytes (16 MiB)",
        )
    starts = range(0, max(nbytes, 1), frame_nbytes)
    return [Frame(index, offset, min(frame_nbytes, nbytes - offset)) for index, offset in enumerate(starts)]


def message_checksum(checksums: Iterable[int]) -> int:
    """Return xxh3-64 over the checksums of a message's frames, or of messages: 8 bytes each, little-endian.

    Both ends can compute it without reading the data a second time.
    """
    return xxh3_64_intdigest(b"".join(struct.pack("<Q", each) for each in checksums))


class ReceiveLedger:
    """Tracks the envelopes that one receiver got, and refuses those that must not be delivered.

    Args:
        run: name of the run.
        me: number of the receiver.
        sources: numbers of the known senders.
        ordered: refuse envelopes that arrive ahead of their turn; else they may arrive in any order, or not at all.

    Attributes:
        counts: number of ``"delivered"`` envelopes, and of refused ones by name of the error.

    Example:
        >>> ledger = ReceiveLedger("run", me=0, sources=[1])
        >>> ledger.accept(Header("run", "greeting", source=1, target=0, sequence=0))
        >>> ledger.accept(Header("run", "greeting", source=1, target=0, sequence=0))
        Traceback (most recent call last):
        paceline.errors.RepeatedEnvelope: envelope 0 from 1 to 0 (greeting, round 0) was received before
    """

    def __init__(self, run: str, me: int, sources: Iterable[int], *, ordered: bool = False) -> None:
        self.run, self.me, self.ordered = run, me, ordered
        self.counts: Counter[str] = Counter()
        self._next = dict.fromkeys(sources, 0)  # all before it were received
        self._early: dict[int, set[int]] = {source: set() for source in self._next}

    def expected(self, source: int) -> int:
        """Return the lowest sequence number of a source that has not been received."""
        return self._next[source]

    def refuse(self, error: EnvelopeError) -> EnvelopeError:
        """Count an envelope that is refused for another reason, and return the error."""
        self.counts[type(error).__name__] += 1
        return error

    def check(self, header: Header, *, carried_from: int | None = None) -> None:
        """Raise if an envelope must not be delivered, without recording it.

        Args:
            header: of the envelope.
            carried_from: actual sender, where the transport knows it.

        Raises:
            ForeignEnvelope: of another run, from an unknown source, or for another receiver.
            RepeatedEnvelope: it was received before.
            MisplacedEnvelope: it is ahead of its turn, if order matters.
        """
        error = self._problem(header, carried_from)
        if error is not None:
            raise error

    def accept(self, header: Header, *, carried_from: int | None = None) -> None:
        """Record an envelope as delivered, or as refused and raise as `check` does."""
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
        """Stop expecting envelopes of `source` before `sequence`."""
        self._next[source] = max(self._next[source], sequence)
        self._early[source] = {each for each in self._early[source] if each >= sequence}

    def _problem(self, header: Header, carried_from: int | None) -> EnvelopeError | None:
        kind, problem = ForeignEnvelope, ""
        if header.run != self.run:
            problem = f"is of run {header.run!r}, this is run {self.run!r}"
        elif header.target != self.me:
            problem = f"was delivered to {self.me}"
        elif header.source not in self._next:
            problem = f"has an unknown source; known: {', '.join(map(str, self._next)) or 'none'}"
        elif carried_from not in (None, header.source):
            problem = f"was sent by {carried_from}"
        elif header.sequence < self._next[header.source] or header.sequence in self._early[header.source]:
            kind, problem = RepeatedEnvelope, "was received before"
        elif self.ordered and header.sequence > self._next[header.source]:
            kind, problem = (
                MisplacedEnvelope,
                f"arrived when envelope {self._next[header.source]} was expected",
            )
        if not problem:
            return None
        return kind(f"{header} {problem}", source=header.source, sequence=header.sequence)
