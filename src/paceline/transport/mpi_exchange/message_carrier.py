"""Point-to-point messages between ranks: the interface that the exchanges use, and its implementation over MPI."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from paceline.transport.envelope import Bytes
from paceline.world.mpi_world import load_mpi, unlink_mpich_shared_memory

__all__ = [
    "ABANDONED_BUFFERS",
    "MessageCarrier",
    "MessageTag",
    "MpiCarrier",
    "PendingRequest",
    "ProbedMessage",
]

ABANDONED_BUFFERS: list[object] = []
"""Buffers of requests that were given up while pending: MPI may still access them, so they are never freed."""

_FLUSH_SECONDS = 0.2


class MessageTag(IntEnum):
    """Kind of a message. A frame's envelope is sent as three messages, so that its payload can be received in place."""

    HEAD = 11
    PAYLOAD = 12
    TAIL = 13
    CLOSE = 14
    """Whole envelope that ends a message in a round."""
    VERDICT = 15
    """A rank's report on a round, sent to all others."""
    ENVELOPE = 16
    """Whole envelope outside of any round."""


class PendingRequest(Protocol):
    """Non-blocking send or receive."""

    def Test(self) -> bool:
        """Return whether it has completed."""
        ...


@dataclass(frozen=True)
class ProbedMessage:
    """A message that can be received now.

    Attributes:
        tag: its kind.
        nbytes: its size.
        receive: starts receiving it into a buffer of exactly this size.
    """

    tag: int
    nbytes: int
    receive: Callable[[bytearray | memoryview], PendingRequest]


class MessageCarrier(Protocol):
    """Non-blocking messages between ranks, in order between any two."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def send(self, buffer: Bytes, target: int, tag: MessageTag) -> PendingRequest:
        """Start sending a buffer, which must not change until the request has completed."""
        ...

    def probe(self, source: int, tag: MessageTag | None = None) -> ProbedMessage | None:
        """Return the next message of `source` if it has arrived; the caller must then receive it."""
        ...


class MpiCarrier:
    """`MessageCarrier` over duplicated communicators: one for envelopes, one for reports.

    Args:
        comm: communicator of the ranks; None: MPI's world.
    """

    def __init__(self, comm: Any = None) -> None:
        self._mpi = load_mpi()
        given = self._mpi.COMM_WORLD if comm is None else comm
        self._data, self._reports = given.Dup(), given.Dup()
        if given.size == self._mpi.COMM_WORLD.size:
            unlink_mpich_shared_memory(self._data)
        self.rank: int = given.rank
        self.size: int = given.size

    def send(self, buffer: Bytes, target: int, tag: MessageTag) -> PendingRequest:
        """Start sending a buffer."""
        comm = self._reports if tag == MessageTag.VERDICT else self._data
        return comm.Isend([buffer, self._mpi.BYTE], target, tag)

    def probe(self, source: int, tag: MessageTag | None = None) -> ProbedMessage | None:
        """Return the next message of a rank if it has arrived."""
        status = self._mpi.Status()
        comm = self._reports if tag == MessageTag.VERDICT else self._data
        found = comm.Improbe(source, self._mpi.ANY_TAG if tag is None else tag, status)
        if found is None:
            return None
        return ProbedMessage(
            status.Get_tag(),
            status.Get_count(self._mpi.BYTE),
            lambda buffer: found.Irecv([buffer, self._mpi.BYTE]),
        )

    def local_size(self) -> int:
        """Return the number of ranks that share this host's memory; a collective call."""
        local = self._data.Split_type(self._mpi.COMM_TYPE_SHARED)
        try:
            return local.size
        finally:
            local.Free()

    def abort(self, code: int) -> None:
        """End all ranks, after mpiexec had time to forward printed output, which it would drop."""
        sys.stdout.flush()
        time.sleep(_FLUSH_SECONDS)
        self._mpi.COMM_WORLD.Abort(code)
