"""All-gather of every rank's report on a round, polled with a time-out, so that it can't deadlock."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline._core.json_codec import decode, encode
from paceline._core.poll_backoff import Backoff
from paceline.errors import EnvelopeError, MissingEnvelope
from paceline.transport.mpi_exchange.message_carrier import (
    ABANDONED_BUFFERS,
    MessageCarrier,
    MessageTag,
    PendingRequest,
)

__all__ = ["ExchangeProblem", "RoundReport", "gather_reports"]


@dataclass(frozen=True)
class ExchangeProblem:
    """An error that a rank found in a round.

    Attributes:
        kind: name of the error, such as ``"DamagedEnvelope"``.
        found_by: rank that found it.
        culprit: rank that sent the message; −1 if unknown.
        text: description.
    """

    kind: str
    found_by: int
    culprit: int
    text: str

    @classmethod
    def of(cls, error: EnvelopeError, found_by: int) -> ExchangeProblem:
        """Return the record of an error."""
        culprit = -1 if error.source is None else error.source
        return cls(type(error).__name__, found_by, culprit, str(error).partition("\n")[0])

    def __str__(self) -> str:
        """Return one line for people."""
        sender = f"rank {self.culprit}" if self.culprit >= 0 else "an unknown rank"
        return f"rank {self.found_by} found a {self.kind} of {sender}: {self.text}"


@dataclass(frozen=True)
class RoundReport:
    """A rank's report to all others at the end of a round.

    Attributes:
        rank: the reporting rank.
        problems: errors that it found.
        facts: plain values for all ranks.
    """

    rank: int
    problems: tuple[ExchangeProblem, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def gather_reports(carrier: MessageCarrier, mine: RoundReport, timeout: float) -> list[RoundReport]:
    """Return the reports of all ranks, by rank; a collective call.

    Raises:
        MissingEnvelope: some ranks neither sent nor received anything for `timeout` seconds; names them.
    """
    others = [rank for rank in range(carrier.size) if rank != carrier.rank]
    packed = json.dumps(encode(mine)).encode()
    sending = {rank: carrier.send(packed, rank, MessageTag.VERDICT) for rank in others}
    receiving: dict[int, tuple[PendingRequest, bytearray]] = {}
    found: dict[int, RoundReport] = {carrier.rank: mine}
    idle, deadline = Backoff(), time.monotonic() + timeout
    while len(found) < carrier.size or sending:
        before = len(found), len(receiving), len(sending)
        sending = {rank: request for rank, request in sending.items() if not request.Test()}
        for rank in others:
            if rank not in found:
                _receive(rank, carrier, receiving, found)
        if before != (len(found), len(receiving), len(sending)):
            idle.reset()
        elif time.monotonic() > deadline:
            ABANDONED_BUFFERS.append((packed, sending, receiving))
            raise _timed_out(mine, [rank for rank in others if rank not in found], list(sending), timeout)
        else:
            idle.wait()
    return [found[rank] for rank in range(carrier.size)]


def _receive(
    rank: int,
    carrier: MessageCarrier,
    receiving: dict[int, tuple[PendingRequest, bytearray]],
    found: dict[int, RoundReport],
) -> None:
    if rank not in receiving:
        message = carrier.probe(rank, MessageTag.VERDICT)
        if message is None:
            return
        buffer = bytearray(message.nbytes)
        receiving[rank] = message.receive(buffer), buffer
    request, buffer = receiving[rank]
    if request.Test():
        found[rank] = decode(json.loads(buffer), RoundReport, "report")
        del receiving[rank]


def _timed_out(
    mine: RoundReport, not_received: list[int], not_sent: list[int], timeout: float
) -> MissingEnvelope:
    """Return the error that names the ranks without report, or else those that did not receive this one."""
    ranks, what = (not_received, "reported nothing") if not_received else (not_sent, "received no report")
    found = "".join(f"; {problem}" for problem in mine.problems[:3])
    return MissingEnvelope(
        f"rank {', '.join(map(str, ranks))} {what} for {timeout:g} s after the round{found}",
        source=ranks[0],
        remedy="check whether that rank is still running",
    )
