"""Ring and all-to-all exchanges over non-blocking MPI calls (Isend, Improbe, Irecv, Test) that overlap with work.

    ring        every rank sends to the next one and receives from the previous one
    all-to-all  every rank sends a piece to every rank, itself included

Phases of an exchange:

    1. split into frames; send two at a time, probe, receive in place, check, do a slice of work, repeat until every
       sender has closed
    2. all ranks gather each other's reports, so that all agree on whether the exchange succeeded

Example, under ``mpiexec -n 4``:

    ring = RingExchange()
    outcome = ring.exchange(numbers, into)                 # numpy arrays or other contiguous buffers
    outcome.raise_for_problems()                           # raises what any rank found
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from paceline._core.poll_backoff import Backoff
from paceline.errors import EnvelopeError, MissingEnvelope, UsageError
from paceline.transport.header_layout import Header
from paceline.transport.message_frames import FRAME_NBYTES, ReceiveLedger, message_checksum, split_frames
from paceline.transport.mpi_exchange.incoming_messages import IncomingMessage
from paceline.transport.mpi_exchange.message_carrier import ABANDONED_BUFFERS, MpiCarrier
from paceline.transport.mpi_exchange.outgoing_messages import OutgoingMessage
from paceline.transport.mpi_exchange.round_reports import ExchangeProblem, RoundReport, gather_reports

__all__ = ["AllToAllExchange", "ExchangeOutcome", "RankExchange", "RingExchange", "drive_exchange"]

WorkSlice = Callable[[], bool]
"""Does a slice of work, and returns whether any was left."""


@dataclass(frozen=True, kw_only=True)
class ExchangeOutcome:
    """Result of an exchange; times and checksums are this rank's, the rest is equal on all ranks.

    Attributes:
        problems: errors that any rank found.
        whole: whether this rank's received messages are valid; if not, the receive buffers are undefined.
        closed: whether all ranks received everything that was sent, so that another exchange can follow.
        seconds: from the start until all messages and all work were done.
        overlapped_slices: slices of work done while messages were in flight.
        sent_checksum: over the sent messages, by target.
        received_checksum: over the received messages, by source.
        expected_checksum: over the same messages, as their senders computed it.
    """

    problems: tuple[ExchangeProblem, ...]
    whole: bool
    closed: bool
    seconds: float
    overlapped_slices: int
    sent_checksum: int
    received_checksum: int
    expected_checksum: int

    def raise_for_problems(self) -> None:
        """Raise EnvelopeError with the first problem, if any rank found one."""
        if self.problems:
            first = self.problems[0]
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise EnvelopeError(f"{first}{more}", source=first.culprit if first.culprit >= 0 else None)


class RankExchange:
    """Repeated exchanges of messages between ranks; every method is collective, in the same order on all ranks.

    Args:
        carrier: of the messages; None: MPI's world.
        run: name of this exchange, equal on all ranks; drawn at random if empty.
        timeout: seconds without progress after which an error is raised.
        frame_nbytes: frame size, equal on all ranks.
        fault: one of `ENVELOPE_FAULTS`, which this rank injects into its first message to the next rank, for tests.
    """

    def __init__(
        self,
        carrier: MpiCarrier | None = None,
        *,
        run: str = "",
        timeout: float = 60.0,
        frame_nbytes: int = FRAME_NBYTES,
        fault: str = "",
    ) -> None:
        if not timeout > 0:
            raise UsageError(
                f"timeout={timeout!r} is not positive", remedy="give seconds > 0, for example 60"
            )
        split_frames(0, frame_nbytes)
        self.carrier = carrier or MpiCarrier()
        self.timeout, self.frame_nbytes, self.fault = timeout, frame_nbytes, fault
        self._closed = True
        self._round, self._sequence_to = 0, dict.fromkeys(range(self.carrier.size), 0)
        self._run = run or str(self.all_gather({"run": uuid4().hex})[0]["run"])
        self._ledger = ReceiveLedger(self._run, self.carrier.rank, range(self.carrier.size))

    def all_gather(self, facts: Mapping[str, Any] | None = None) -> list[Mapping[str, Any]]:
        """Return the facts of all ranks, by rank.

        Raises:
            MissingEnvelope: a rank did not call in time; names it.
        """
        mine = RoundReport(self.carrier.rank, facts=facts or {})
        return [each.facts for each in gather_reports(self.carrier, mine, self.timeout)]

    def exchange_buffers(
        self, outgoing: Mapping[int, Any], incoming: Mapping[int, Any], work: WorkSlice | None = None
    ) -> ExchangeOutcome:
        """Send ``outgoing[target]`` to each target and receive into ``incoming[source]`` from each source.

        Args:
            outgoing: contiguous buffers, such as numpy arrays, by target.
            incoming: contiguous writable buffers by source, which must not overlap with others.
            work: does a slice of work and returns False once none is left; called while messages move.

        Returns:
            the outcome, including the problems found on any rank.

        Raises:
            MissingEnvelope: a rank reported nothing in time, so the outcome is unknown.
            EnvelopeError: an earlier exchange left messages pending.
            UsageError: a buffer is not contiguous or not writable.
            Exception: raised by `work`; messages may be pending then.
        """
        if not self._closed:
            raise EnvelopeError(
                "messages of an earlier exchange may still be pending, so no other can follow",
                remedy="end all ranks: carrier.abort(1)",
            )
        started = time.perf_counter()
        next_rank, fault, self.fault = (self.carrier.rank + 1) % self.carrier.size, self.fault, ""
        sends = [
            self._send_message(target, buffer, fault if target == next_rank else "")
            for target, buffer in sorted(outgoing.items())
        ]
        receives = [self._receive_message(source, buffer) for source, buffer in sorted(incoming.items())]
        stuck: list[EnvelopeError] = []
        overlapped, self._closed = 0, False  # until all ranks report that it is closed
        try:
            overlapped = drive_exchange(sends, receives, self.timeout, work)
        except EnvelopeError as error:
            stuck.append(error)
        finally:
            if not all(each.done for each in (*sends, *receives)):
                ABANDONED_BUFFERS.append((sends, receives))
        seconds = time.perf_counter() - started
        errors = [error for each in receives for error in each.problems] + stuck
        reports = self._gather_reports(errors, closed=not stuck)
        self._round += 1
        for each in sends:
            self._sequence_to[each.target] = each.sequence
        self._closed = all(report.facts["closed"] for report in reports)
        return ExchangeOutcome(
            problems=tuple(problem for report in reports for problem in report.problems),
            whole=not errors,
            closed=self._closed,
            seconds=seconds,
            overlapped_slices=overlapped,
            sent_checksum=message_checksum(each.checksum for each in sends),
            received_checksum=message_checksum(each.checksum for each in receives),
            expected_checksum=message_checksum(each.expected_checksum for each in receives),
        )

    def _gather_reports(self, errors: Sequence[EnvelopeError], *, closed: bool) -> list[RoundReport]:
        """Gather what all ranks found; each may be late by its own time-out."""
        rank = self.carrier.rank
        problems = tuple(ExchangeProblem.of(each, rank) for each in errors)
        mine = RoundReport(rank, problems, {"closed": closed})
        return gather_reports(self.carrier, mine, 2 * self.timeout + 5)

    def _send_message(self, target: int, buffer: Any, fault: str) -> OutgoingMessage:
        header = Header(
            self._run, "frame", self.carrier.rank, target, self._sequence_to[target], round=self._round
        )
        return OutgoingMessage(self.carrier, header, bytes_view(buffer), self.frame_nbytes, fault)

    def _receive_message(self, source: int, buffer: Any) -> IncomingMessage:
        view = bytes_view(buffer)
        if view.readonly:
            raise UsageError("the receive buffer is read-only", remedy="give a bytearray or a numpy array")
        return IncomingMessage(
            self.carrier,
            self._ledger,
            source=source,
            round=self._round,
            place=view,
            frame_nbytes=self.frame_nbytes,
        )


class RingExchange(RankExchange):
    """Every rank sends to the next one and receives from the previous one."""

    def exchange(self, data: Any, into: Any, work: WorkSlice | None = None) -> ExchangeOutcome:
        """Send `data` to the next rank, and receive the previous rank's into `into`, of the same size."""
        rank, size = self.carrier.rank, self.carrier.size
        return self.exchange_buffers({(rank + 1) % size: data}, {(rank - 1) % size: into}, work)


class AllToAllExchange(RankExchange):
    """Every rank sends a piece to every rank, itself included."""

    def exchange(self, data: Any, into: Any, work: WorkSlice | None = None) -> ExchangeOutcome:
        """Send the r-th part of `data` to rank r, and receive rank q's part as the q-th part of `into`.

        Args:
            data: of the same size on all ranks, a multiple of their number.
            into: of the same size.
            work: as for `exchange_buffers`.
        """
        size = self.carrier.size
        return self.exchange_buffers(
            dict(enumerate(equal_parts(data, size))), dict(enumerate(equal_parts(into, size))), work
        )


def drive_exchange(
    outgoing: Sequence[OutgoingMessage],
    incoming: Sequence[IncomingMessage],
    timeout: float,
    work: WorkSlice | None = None,
) -> int:
    """Advance messages and work until all are done.

    Args:
        outgoing: messages to send.
        incoming: messages to receive.
        timeout: seconds without progress after which an error is raised.
        work: called between the steps, and afterwards until it returns False.

    Returns:
        number of slices of work done while messages were in flight.

    Raises:
        MissingEnvelope: no progress for `timeout` seconds; names the rank and the frame that is missing.
    """
    idle, progress_at, overlapped = Backoff(), time.monotonic(), 0
    while not all(each.done for each in (*outgoing, *incoming)):
        progress = False
        for each in (*incoming, *outgoing):
            progress = each.advance() or progress
        if progress:
            progress_at = time.monotonic()
            idle.reset()
        if work is not None:
            if work():
                overlapped += 1
                continue
            work = None
        if not progress:
            if time.monotonic() - progress_at > timeout:
                raise _stuck(outgoing, incoming, timeout)
            idle.wait()
    while work is not None and work():
        pass
    return overlapped


def _stuck(
    outgoing: Sequence[OutgoingMessage], incoming: Sequence[IncomingMessage], timeout: float
) -> MissingEnvelope:
    """Return the error that names what was not received, or else what was not sent."""
    missing = [each for each in incoming if not each.done]
    pending = [each for each in outgoing if each.has_pending]
    if missing:
        source = missing[0].source
        what = "; ".join(f"rank {each.source} did not send {each.next_missing}" for each in missing)
    elif pending:
        source = pending[0].target
        what = "; ".join(
            f"rank {each.target} did not receive everything before {each.next_frame}" for each in pending
        )
    else:
        source, what = outgoing[0].source, "it stopped sending itself"
    return MissingEnvelope(
        f"no progress for {timeout:g} s: {what}",
        source=source,
        remedy="check whether that rank is still running; raise the time-out if it may be silent for so long",
    )


def equal_parts(data: Any, size: int) -> list[memoryview]:
    """Split the bytes of `data` into `size` equal parts.

    Raises:
        UsageError: the size is not divisible.

    Example:
        >>> [bytes(each) for each in equal_parts(b"abcd", 2)]
        [b'ab', b'cd']
    """
    view = bytes_view(data)
    if view.nbytes % size:
        raise UsageError(
            f"{view.nbytes} bytes can't be split equally among {size} ranks",
            remedy=f"exchange a multiple of {size} bytes, for example {view.nbytes // size * size}",
        )
    step = view.nbytes // size
    return [view[index * step : (index + 1) * step] for index in range(size)]


def bytes_view(data: Any) -> memoryview:
    """Return the bytes of a contiguous buffer without copying them.

    Raises:
        UsageError: `data` has no buffer, or is not contiguous.
    """
    try:
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(bytearray())
    except (TypeError, ValueError) as error:  # ValueError: numpy's, for dtypes without buffer protocol
        raise UsageError(
            f"a {type(data).__name__} can't be exchanged: {error}",
            remedy="give bytes or a contiguous numpy array",
        ) from error
