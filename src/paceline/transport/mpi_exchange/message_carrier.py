"""What carries envelopes from rank to rank, as the exchange sees it; exchange/mpi.py has the real one (pure)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from paceline.transport.envelope import Bytes

__all__ = ["ABANDONED_BUFFERS", "MessageCarrier", "MessageTag", "PendingRequest", "ProbedMessage"]

ABANDONED_BUFFERS: list[object] = []
"""Messages that were under way when somebody gave them up: MPI may still read and write their memory, so it stays."""


class MessageTag(IntEnum):
    """What a message of the carrier is; an envelope travels as three, its payload straight to its place."""

    HEAD = 11
    PAYLOAD = 12
    TAIL = 13
    CLOSE = 14
    """A whole envelope that ends what a rank sends to another in a round."""
    VERDICT = 15
    """What a rank found in a round, to all others."""
    ENVELOPE = 16
    """A whole envelope, of no round."""


class PendingRequest(Protocol):
    """A message under way, out or in."""

    def Test(self) -> bool:
        """Return whether its buffer is free, or full."""
        ...


@dataclass(frozen=True)
class ProbedMessage:
    """A message that has come and waits to be received.

    Attributes:
        tag: what it is. nbytes: its size.
        receive: starts receiving it into a buffer of exactly that size.
    """

    tag: int
    nbytes: int
    receive: Callable[[bytearray | memoryview], PendingRequest]


class MessageCarrier(Protocol):
    """Carries messages between ranks, in order between any two, without blocking."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def send(self, buffer: Bytes, target: int, tag: MessageTag) -> PendingRequest:
        """Start sending; the buffer must stay as it is until the flight has ended."""
        ...

    def probe(self, source: int, tag: MessageTag | None = None) -> ProbedMessage | None:
        """Return the next message of `source` if it has come; it is then this caller's to receive."""
        ...
