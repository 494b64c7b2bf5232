"""`Exchange`: the interface between message protocols and the transports that carry their envelopes.

Implementations: hub and workers over ZeroMQ (`paceline.transport.zmq`), and virtual time in one process
(`paceline.transport.virtual_time`); tests/support/hub_over_mpi.py shows it over non-blocking MPI calls.
Hub and workers of asynchronous training use this interface only, so the simulated code is the code that runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Protocol

from paceline.errors import UsageError
from paceline.transport.envelope import Envelope

__all__ = ["HUB", "Exchange", "payload_to_send"]

HUB = 0
"""Number of the hub; workers have numbers from 1."""


class Exchange(Protocol):
    """Carries envelopes to and from peers without blocking for long; for use by one thread.

    Attributes:
        refused: received messages that were not delivered, by name of the error: damaged, truncated, foreign, ….
        sent_nbytes: total size of sent envelopes, without network headers.
        received_nbytes: total size of received envelopes, without network headers.
    """

    refused: Counter[str]
    sent_nbytes: int
    received_nbytes: int

    def send(self, envelope: Envelope) -> bool:
        """Send an envelope to ``envelope.header.target``.

        Returns:
            True if it was accepted; it may still be lost on the way. False if the queue is full or the peer is
            unreachable; it may be passed again later.
        """
        ...

    def poll(self, seconds: float = 0.0) -> list[Envelope]:
        """Return the received envelopes in order of arrival; if there are none, wait up to `seconds`."""
        ...

    def peers(self) -> Collection[int]:
        """Return the numbers of the reachable peers, as far as known."""
        ...

    def close(self) -> None:
        """Disconnect. Envelopes that were accepted but not sent yet may be lost."""
        ...


def payload_to_send(envelope: Envelope, me: int, frame_nbytes: int) -> memoryview:
    """Return the payload of an envelope as bytes, once it is known that `me` may send it.

    Args:
        envelope: to be sent.
        me: number of the sender.
        frame_nbytes: maximum size of a payload.

    Raises:
        UsageError: another source is given in the header, or the payload exceeds a frame.
    """
    header, payload = envelope.header, memoryview(envelope.payload).cast("B")
    if header.source != me:
        raise UsageError(f"{header} can't be sent from {me}", remedy="set the header's source to the sender")
    if payload.nbytes > frame_nbytes:
        raise UsageError(
            f"{header} has a payload of {payload.nbytes} bytes, the limit is {frame_nbytes}",
            remedy="split it into frames: paceline.transport.message_frames",
        )
    return payload
