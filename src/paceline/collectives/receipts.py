"""Receipts: what every rank sent and received, and whether that is the same thing (pure).

Both ends of a message note its bytes and its checksum (xxh3, 64 bits). One rank compares the notes of all: a message
that is missing, or that arrived as another than was sent, is named; so is a rank whose result is another than the
others', where all must have the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgpack

from paceline.collectives.schedule import Schedule
from paceline.units import format_seconds, format_size

__all__ = ["Log", "Note", "Receipt", "complaints", "receipts_of"]

_SAME_EVERYWHERE = frozenset({"broadcast", "all-reduce", "all-gather"})


class Note(NamedTuple):
    """What one end of a message noted.

    Attributes:
        number: the round, from 0.
        src, dst: ranks.
        chunk: the first chunk of the run.
        nbytes: size.
        checksum: of the bytes.
        seconds: since this rank began, when it was handed over (sender) or complete (receiver).
    """

    number: int
    src: int
    dst: int
    chunk: int
    nbytes: int
    checksum: int
    seconds: float

    @property
    def key(self) -> tuple[int, int, int, int]:
        """Which message of a schedule it is about."""
        return self[:4]

    def __str__(self) -> str:
        return f"message {self.src}→{self.dst} of round {self.number + 1}, chunk {self.chunk}"


@dataclass
class Log:
    """All notes of one rank.

    Attributes:
        sent, received: one for each run of chunks, in order.
        checksum: of its result; None if it did not come to one.
        seconds: from begin to end.
        error: what it raised, if it did.
    """

    sent: list[Note] = field(default_factory=list)
    received: list[Note] = field(default_factory=list)
    checksum: int | None = None
    seconds: float = 0.0
    error: str = ""

    def pack(self) -> bytes:
        """Return it as bytes."""
        packed = msgpack.packb([self.sent, self.received, self.checksum, self.seconds, self.error])
        assert packed is not None, "only without a buffer of its own"
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> Log:
        """Return what `pack` made bytes of."""
        sent, received, *rest = msgpack.unpackb(data)
        return cls([Note(*note) for note in sent], [Note(*note) for note in received], *rest)


@dataclass(frozen=True)
class Receipt:
    """What reached one rank.

    Attributes:
        rank: who.
        messages, nbytes: received in all.
        checksum: of its result.
        seconds: from its begin until it had its result.
        last_arrival: from its begin until the last message had arrived, in seconds; 0 if it received none.
    """

    rank: int
    messages: int
    nbytes: int
    checksum: int
    seconds: float
    last_arrival: float

    def __str__(self) -> str:
        messages = f"{self.messages} message{'s' * (self.messages != 1)}"
        return (
            f"rank {self.rank}: {messages}, {format_size(self.nbytes)}, the last one after "
            f"{format_seconds(self.last_arrival)}; checksum of its result {self.checksum:016x}"
        )


def receipts_of(logs: Mapping[int, Log]) -> list[Receipt]:
    """Return a receipt for each rank that came to a result."""
    return [
        Receipt(
            rank,
            len({(note.number, note.src) for note in log.received}),
            sum(note.nbytes for note in log.received),
            log.checksum,
            log.seconds,
            max((note.seconds for note in log.received), default=0.0),
        )
        for rank, log in sorted(logs.items())
        if log.checksum is not None
    ]


def complaints(schedule: Schedule, logs: Mapping[int, Log], nbytes: Sequence[int]) -> list[str]:
    """Return what is wrong or missing, in order of rounds; empty: everything was delivered.

    Args:
        schedule: what should have been sent.
        logs: of each rank that gave one.
        nbytes: of each chunk; empty ones are never sent.
    """
    said = [f"rank {rank} gave no receipt" for rank in range(schedule.ranks) if rank not in logs]
    sent = {note.key: note for log in logs.values() for note in log.sent}
    received = {note.key: note for log in logs.values() for note in log.received}
    said += _messages(schedule, sent, received, nbytes)
    if schedule.op in _SAME_EVERYWHERE:
        said += _results(schedule.root, logs)
    return said + [f"rank {rank} failed: {log.error}" for rank, log in sorted(logs.items()) if log.error]


def _messages(
    schedule: Schedule,
    sent: Mapping[tuple[int, int, int, int], Note],
    received: Mapping[tuple[int, int, int, int], Note],
    nbytes: Sequence[int],
) -> Iterator[str]:
    for number, sends in enumerate(schedule.rounds):
        for send in sends:
            size = sum(nbytes[send.chunk : send.chunk + send.width])
            if not size:
                continue
            note = Note(number, send.src, send.dst, send.chunk, size, 0, 0.0)
            gone, come = sent.get(note.key), received.get(note.key)
            if come is None:
                yield f"{note} never arrived" + ("" if gone else ": it was not sent")
            elif gone is None:
                yield f"{note} arrived, but rank {send.src} has no note of it"
            elif (gone.nbytes, gone.checksum) != (come.nbytes, come.checksum):
                yield (
                    f"{note} was sent as {gone.nbytes} bytes with checksum {gone.checksum:016x} "
                    f"and arrived as {come.nbytes} bytes with {come.checksum:016x}"
                )


def _results(root: int, logs: Mapping[int, Log]) -> Iterator[str]:
    checksums = {rank: log.checksum for rank, log in sorted(logs.items()) if log.checksum is not None}
    reference = checksums.get(root)
    for rank, checksum in checksums.items():
        if reference is not None and checksum != reference:
            yield f"the result of rank {rank} has checksum {checksum:016x}, that of rank {root} {reference:016x}"
