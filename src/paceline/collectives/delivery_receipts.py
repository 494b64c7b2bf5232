"""Receipts: what every rank sent and received, and whether that is the same thing (pure).

Both ends of a message note its bytes and its checksum (xxh3, 64 bits). One rank compares the notes of all: a message
that is missing, or that arrived as another than was sent, is named; so is a rank whose result is another than the
others', where all must have the same.

Gathering receipts: every rank leaves its notes in the group's store, and the root reads them.

A store needs no counterpart: a rank writes and goes on, whatever became of the others, and the root knows after a
time whose notes are missing. A collective of the group could not tell, since it would hang or fail with that rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgpack
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from paceline._core.format import format_seconds, format_size
from paceline.collectives.chunk_memory import ChunkMemory
from paceline.collectives.schedule import Schedule
from paceline.errors import CollectiveError

__all__ = ["DeliveryReceipt", "TransferLog", "TransferNote", "collect", "complaints", "receipts_of"]

_SAME_EVERYWHERE = frozenset({"broadcast", "all-reduce", "all-gather"})


class TransferNote(NamedTuple):
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
class TransferLog:
    """All notes of one rank.

    Attributes:
        sent, received: one for each run of chunks, in order.
        checksum: of its result; None if it did not come to one.
        seconds: from begin to end.
        error: what it raised, if it did.
    """

    sent: list[TransferNote] = field(default_factory=list)
    received: list[TransferNote] = field(default_factory=list)
    checksum: int | None = None
    seconds: float = 0.0
    error: str = ""

    def pack(self) -> bytes:
        """Return it as bytes."""
        packed = msgpack.packb([self.sent, self.received, self.checksum, self.seconds, self.error])
        assert packed is not None, "only without a buffer of its own"
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> TransferLog:
        """Return what `pack` made bytes of."""
        sent, received, *rest = msgpack.unpackb(data)
        return cls([TransferNote(*note) for note in sent], [TransferNote(*note) for note in received], *rest)


@dataclass(frozen=True)
class DeliveryReceipt:
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


def receipts_of(logs: Mapping[int, TransferLog]) -> list[DeliveryReceipt]:
    """Return a receipt for each rank that came to a result."""
    return [
        DeliveryReceipt(
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


def complaints(schedule: Schedule, logs: Mapping[int, TransferLog], nbytes: Sequence[int]) -> list[str]:
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
    sent: Mapping[tuple[int, int, int, int], TransferNote],
    received: Mapping[tuple[int, int, int, int], TransferNote],
    nbytes: Sequence[int],
) -> Iterator[str]:
    for number, sends in enumerate(schedule.rounds):
        for send in sends:
            size = sum(nbytes[send.chunk : send.chunk + send.width])
            if not size:
                continue
            note = TransferNote(number, send.src, send.dst, send.chunk, size, 0, 0.0)
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


def _results(root: int, logs: Mapping[int, TransferLog]) -> Iterator[str]:
    checksums = {rank: log.checksum for rank, log in sorted(logs.items()) if log.checksum is not None}
    reference = checksums.get(root)
    for rank, checksum in checksums.items():
        if reference is not None and checksum != reference:
            yield f"the result of rank {rank} has checksum {checksum:016x}, that of rank {root} {reference:016x}"


_SHOWN = 5


_runs: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def collect(
    schedule: Schedule, memory: ChunkMemory, log: TransferLog, group: dist.ProcessGroup | None, timeout: float
) -> list[DeliveryReceipt] | None:
    """Hand in this rank's notes; on the root wait for those of all ranks, compare them and return the receipts.

    Args:
        schedule, memory: what was run, and where it lies on this rank.
        log: this rank's notes.
        group: as for `run`.
        timeout: seconds to wait for each rank's notes.

    Raises:
        CollectiveError: on the root: something is missing or wrong; all of it is named, the first few in full.
    """
    if schedule.ranks == 1:
        return receipts_of({0: log})
    real = group or dist.group.WORLD
    assert real is not None, "a schedule of several ranks runs on a group"
    store = dist.PrefixStore("paceline/receipts", _get_process_group_store(real))
    number = _runs[real] = _runs.get(real, 0) + 1
    if memory.rank != schedule.root:
        store.set(f"{number}/{memory.rank}", log.pack())  # pyright: ignore[reportArgumentType] — bytes are taken too
        return None
    logs = {memory.rank: log}
    for rank in range(schedule.ranks):
        packed = None if rank == memory.rank else _read(store, f"{number}/{rank}", timeout)
        if packed is not None:
            logs[rank] = TransferLog.unpack(packed)
    said = complaints(schedule, logs, memory.nbytes())
    if said:
        more = f"\n  … and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
        raise CollectiveError(
            f"{schedule} was not delivered:" + "".join(f"\n  {line}" for line in said[:_SHOWN]) + more,
            rank=memory.rank,
            remedy="look at the ranks and links named first; what follows may be their consequence",
        )
    return receipts_of(logs)


def _read(store: dist.Store, key: str, timeout: float) -> bytes | None:
    """Return what a rank wrote, and remove it; None if it did not come in time."""
    try:
        store.wait([key], timedelta(seconds=timeout))
    except RuntimeError:  # torch's DistStoreError
        return None
    packed = store.get(key)
    store.delete_key(key)
    return packed
