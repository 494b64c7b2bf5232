"""All ranks learn what each of them found, in a way that can't dead-lock: everything is polled, with a time-out."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline._core.backoff import Backoff
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
    """Something that was wrong in a round.

    Attributes:
        kind: name of the error, such as ``"DamagedEnvelope"``.
        found_by: rank that found it. culprit: rank whose message it was, −1 if that is not known.
        text: what was wrong.
    """

    kind: str
    found_by: int
    culprit: int
    text: str

    @classmethod
    def of(cls, error: EnvelopeError, found_by: int) -> ExchangeProblem:
        """Return an error as a rank found it."""
        culprit = -1 if error.source is None else error.source
        return cls(type(error).__name__, found_by, culprit, str(error).partition("\n")[0])

    def __str__(self) -> str:
        """Return one line for people."""
        who = f"rank {self.culprit}" if self.culprit >= 0 else "somebody"
        return f"rank {self.found_by} found a {self.kind} of {who}: {self.text}"


@dataclass(frozen=True)
class RoundReport:
    """What a rank tells the others at the end of a round.

    Attributes:
        rank: who tells. problems: what it found. facts: plain values that all ranks may want to know.
    """

    rank: int
    problems: tuple[ExchangeProblem, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def packed(self) -> bytes:
        """Return it as bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpacked(cls, data: bytes | bytearray) -> RoundReport:
        """Return what `packed` packed."""
        told = json.loads(data)
        return cls(told["rank"], tuple(ExchangeProblem(**each) for each in told["problems"]), told["facts"])


def gather_reports(carrier: MessageCarrier, mine: RoundReport, timeout: float) -> list[RoundReport]:
    """Return the verdicts of all ranks, by rank; every rank gets the same.

    Raises:
        MissingEnvelope: some rank told or took nothing for `timeout` seconds; the message names all such ranks.
    """
    others = [rank for rank in range(carrier.size) if rank != carrier.rank]
    packed = mine.packed()
    sends = {rank: carrier.send(packed, rank, MessageTag.VERDICT) for rank in others}
    found: dict[int, RoundReport] = {carrier.rank: mine}
    arriving: dict[int, tuple[PendingRequest, bytearray]] = {}
    idle, deadline = Backoff(), time.monotonic() + timeout
    while len(found) < carrier.size or sends:
        before = len(found), len(arriving), len(sends)
        sends = {rank: flight for rank, flight in sends.items() if not flight.Test()}
        for rank in others:
            _look_for(rank, carrier, arriving, found)
        if before != (len(found), len(arriving), len(sends)):
            idle.reset()
        elif time.monotonic() > deadline:
            ABANDONED_BUFFERS.append((packed, sends, arriving))
            raise _silent(mine, [rank for rank in others if rank not in found], list(sends), timeout)
        else:
            idle.wait()
    return [found[rank] for rank in range(carrier.size)]


def _look_for(
    rank: int,
    carrier: MessageCarrier,
    arriving: dict[int, tuple[PendingRequest, bytearray]],
    found: dict[int, RoundReport],
) -> None:
    if rank in found:
        return
    if rank not in arriving:
        arrival = carrier.probe(rank, MessageTag.VERDICT)
        if arrival is None:
            return
        buffer = bytearray(arrival.nbytes)
        arriving[rank] = arrival.receive(buffer), buffer
    flight, buffer = arriving[rank]
    if flight.Test():
        found[rank] = RoundReport.unpacked(buffer)
        del arriving[rank]


def _silent(mine: RoundReport, silent: list[int], deaf: list[int], timeout: float) -> MissingEnvelope:
    """Return the error that names who told nothing, or, if all did, who did not take what this rank told."""
    ranks, what = (silent, "told nothing") if silent else (deaf, "took nothing of what it was told")
    names = ", ".join(map(str, ranks))
    found = "".join(f"; {problem}" for problem in mine.problems[:3])
    return MissingEnvelope(
        f"rank {names} {what} for {timeout:g} s after the round{found}",
        source=ranks[0],
        remedy="see whether that rank still runs",
    )
