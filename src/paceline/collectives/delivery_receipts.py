"""Delivery receipts: records of every message at both ends, compared on the root.

Both ends of a message record its bytes and its checksum (xxh3, 64 bits), and every rank that of its result. The root
compares them and names each message that is missing or arrived damaged, and each rank whose result differs where all
must be equal.

Ranks leave their records in the group's store. A store needs no counterpart: a rank writes and continues, whatever
happened to the others, and after a time-out the root knows whose records are missing. A collective would hang or fail
together with that rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from paceline._core.format import format_seconds, format_size, plural
from paceline.collectives.chunk_buffers import ChunkBuffers
from paceline.collectives.schedule import Schedule
from paceline.errors import CollectiveError

__all__ = ["DeliveryReceipt", "TransferLog", "TransferRecord", "gather_receipts"]

_SAME_EVERYWHERE = frozenset({"broadcast", "all-reduce", "all-gather"})
_ERRORS_SHOWN = 5

_runs: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


class TransferRecord(NamedTuple):
    """A message as recorded at one of its ends.

    Attributes:
        number: the round, from 0.
        src: sending rank.
        dst: receiving rank.
        chunk: first chunk of the run.
        nbytes: size.
        checksum: of its bytes.
        seconds: since this rank began: when it was passed to the backend (sender) or complete (receiver).
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
        """Identity of the message within its schedule."""
        return self[:4]

    def __str__(self) -> str:
        return f"message {self.src}→{self.dst} of round {self.number + 1}, chunk {self.chunk}"


class TransferLog(msgspec.Struct, array_like=True):
    """All records of one rank.

    Attributes:
        sent: a record for each run of chunks, in order.
        received: a record for each run of chunks, in order.
        checksum: of the result; None: no result.
        seconds: duration.
        error: error that this rank raised, if any.
    """

    sent: list[TransferRecord] = []
    received: list[TransferRecord] = []
    checksum: int | None = None
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class DeliveryReceipt:
    """Receipt of one rank.

    Attributes:
        rank: the rank.
        messages: number of messages received.
        nbytes: bytes received.
        checksum: of its result.
        seconds: from its beginning until it had its result.
        last_arrival: from its beginning until the last message had arrived, in seconds; 0 if it received none.
    """

    rank: int
    messages: int
    nbytes: int
    checksum: int
    seconds: float
    last_arrival: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: {plural(self.messages, 'message')}, {format_size(self.nbytes)}, the last one after "
            f"{format_seconds(self.last_arrival)}; checksum of its result {self.checksum:016x}"
        )


def gather_receipts(
    buffers: ChunkBuffers, log: TransferLog, group: dist.ProcessGroup | None, timeout: float
) -> list[DeliveryReceipt] | None:
    """Store this rank's records; on the root wait for those of all ranks, compare them and return the receipts.

    Args:
        buffers: this rank's chunks.
        log: this rank's records.
        group: as for `run_schedule`.
        timeout: seconds to wait for each rank's records.

    Raises:
        CollectiveError: on the root: something is missing or wrong; names the first errors and counts the others.
    """
    schedule = buffers.schedule
    if schedule.ranks == 1:
        return _receipts({0: log})
    real = group or dist.group.WORLD
    assert real is not None, "a schedule of several ranks runs on a group"
    store = dist.PrefixStore("paceline/receipts", _get_process_group_store(real))
    number = _runs[real] = _runs.get(real, 0) + 1
    if buffers.rank != schedule.root:
        packed = msgspec.msgpack.encode(log)
        store.set(f"{number}/{buffers.rank}", packed)  # pyright: ignore[reportArgumentType] — bytes are accepted
        return None
    logs = {buffers.rank: log}
    for rank in range(schedule.ranks):
        packed = None if rank == buffers.rank else _read(store, f"{number}/{rank}", timeout)
        if packed is not None:
            logs[rank] = msgspec.msgpack.decode(packed, type=TransferLog)
    errors = [*_delivery_errors(schedule, logs, buffers.nbytes())]
    if errors:
        more = f"\n  … and {len(errors) - _ERRORS_SHOWN} more" if len(errors) > _ERRORS_SHOWN else ""
        raise CollectiveError(
            f"{schedule} was not delivered:"
            + "".join(f"\n  {line}" for line in errors[:_ERRORS_SHOWN])
            + more,
            rank=buffers.rank,
            remedy="look at the ranks and links named first; the rest may be consequences",
        )
    return _receipts(logs)


def _read(store: dist.Store, key: str, timeout: float) -> bytes | None:
    try:
        store.wait([key], timedelta(seconds=timeout))
    except RuntimeError:  # torch's DistStoreError
        return None
    packed = store.get(key)
    store.delete_key(key)
    return packed


def _receipts(logs: Mapping[int, TransferLog]) -> list[DeliveryReceipt]:
    """Return a receipt for each rank that has a result."""
    return [
        DeliveryReceipt(
            rank=rank,
            messages=len({(record.number, record.src) for record in log.received}),
            nbytes=sum(record.nbytes for record in log.received),
            checksum=log.checksum,
            seconds=log.seconds,
            last_arrival=max((record.seconds for record in log.received), default=0.0),
        )
        for rank, log in sorted(logs.items())
        if log.checksum is not None
    ]


def _delivery_errors(
    schedule: Schedule, logs: Mapping[int, TransferLog], chunk_nbytes: Sequence[int]
) -> Iterator[str]:
    """Yield wrong and missing messages and results, in order of rounds."""
    yield from (f"rank {rank} stored no records" for rank in range(schedule.ranks) if rank not in logs)
    sent = {record.key: record for log in logs.values() for record in log.sent}
    received = {record.key: record for log in logs.values() for record in log.received}
    for number, sends in enumerate(schedule.rounds):
        for send in sends:
            nbytes = sum(chunk_nbytes[send.chunk : send.chunk + send.width])
            if nbytes:  # empty runs are never sent
                message = TransferRecord(number, send.src, send.dst, send.chunk, nbytes, 0, 0.0)
                yield from _message_errors(message, sent.get(message.key), received.get(message.key))
    if schedule.op in _SAME_EVERYWHERE and schedule.root in logs:
        reference = logs[schedule.root].checksum
        for rank, log in sorted(logs.items()):
            if None not in (reference, log.checksum) and log.checksum != reference:
                yield (
                    f"the result of rank {rank} has checksum {log.checksum:016x}, "
                    f"that of rank {schedule.root} {reference:016x}"
                )
    yield from (f"rank {rank} failed: {log.error}" for rank, log in sorted(logs.items()) if log.error)


def _message_errors(
    message: TransferRecord, sent: TransferRecord | None, received: TransferRecord | None
) -> Iterator[str]:
    if received is None:
        yield f"{message} never arrived" + ("" if sent else ": it was not sent")
    elif sent is None:
        yield f"{message} arrived, but rank {message.src} has no record of it"
    elif (sent.nbytes, sent.checksum) != (received.nbytes, received.checksum):
        yield (
            f"{message} was sent as {sent.nbytes} bytes with checksum {sent.checksum:016x} "
            f"and arrived as {received.nbytes} bytes with {received.checksum:016x}"
        )
