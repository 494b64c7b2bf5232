"""The seam between what is said and what carries it: whole envelopes out, whole envelopes in.

Three carriers sit behind it: a star over ZeroMQ (`zeromq`), MPI's non-blocking calls (`over_mpi`), and virtual time
inside one process (`virtual`). Hub and workers of asynchronous training know this protocol and nothing of the carriers,
so the code that is simulated is the code that runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from paceline.errors import UsageError
from paceline.transport.envelope import Bytes
from paceline.transport.envelope_header import Header

__all__ = ["HUB", "Envelope", "Exchange", "payload_to_send"]

HUB = 0
"""The number of the hub of a star; its workers have numbers from 1 on."""


@dataclass(slots=True)
class Envelope:
    """A header and its payload, complete and checked when it comes, sealed when it is sent; nobody changes it."""

    header: Header
    payload: Bytes = b""


class Exchange(Protocol):
    """Carries envelopes to and from peers without ever blocking for long; used by one thread.

    Attributes:
        refused: what came and could not be delivered, by name of the error: damaged, truncated, foreign, ….
        sent_nbytes, received_nbytes: of all envelopes so far, without the headers of the network.
    """

    refused: Counter[str]
    sent_nbytes: int
    received_nbytes: int

    def send(self, envelope: Envelope) -> bool:
        """Take an envelope to ``envelope.header.target``.

        Returns:
            whether it was taken. False: there is no room for it now, or the peer is not to be reached; it may be
            given again later. An envelope that was taken may still be lost on the way.
        """
        ...

    def poll(self, seconds: float = 0.0) -> list[Envelope]:
        """Return what has come, in the order in which it came; wait up to `seconds` if that is nothing."""
        ...

    def peers(self) -> Collection[int]:
        """Return the numbers of those who can be sent to, as far as that is known."""
        ...

    def close(self) -> None:
        """Leave; what was taken and has not left yet may be lost."""
        ...


def payload_to_send(envelope: Envelope, me: int, frame_nbytes: int) -> memoryview:
    """Return the payload of an envelope that `me` may send, as bytes.

    Args:
        envelope: which is to leave. me: who sends. frame_nbytes: most bytes of a payload.

    Raises:
        UsageError: it is another's, or its payload is longer than a frame.
    """
    header, payload = envelope.header, memoryview(envelope.payload).cast("B")
    if header.source != me:
        raise UsageError(f"{header} can't be sent from {me}", remedy="a header's source is who sends")
    if payload.nbytes > frame_nbytes:
        raise UsageError(
            f"{header} has a payload of {payload.nbytes} bytes, more than {frame_nbytes}",
            remedy="cut it into frames: exchange.frames",
        )
    return payload
