"""Ring and all-to-all over MPI's non-blocking calls: Isend, Improbe, Irecv and Test, while work goes on.

    with a ring, every rank sends to the next one and receives from the one before it
    with an all-to-all, every rank sends a piece to every rank, itself included

Phases of an exchange:

    1. cut into frames; send two at a time, probe for what comes, receive it in place, check it, do a slice of
       work, look again … until every sender has closed
    2. all ranks tell all others what they found, so that all know alike whether all went well

Example, under ``mpiexec -n 4``:

    ring = Ring()
    outcome = ring.exchange(numbers, into)                 # numpy arrays, or anything with bytes in a row
    outcome.check()                                        # raises what any rank found
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from paceline.errors import EnvelopeError, UsageError
from paceline.transport.envelope import Bytes
from paceline.transport.envelope_header import Header
from paceline.transport.message_frames import FRAME_NBYTES, ReceiveLedger, message_checksum, split_frames
from paceline.transport.mpi_exchange.incoming_messages import IncomingMessage
from paceline.transport.mpi_exchange.message_carrier import (
    ABANDONED_BUFFERS,
    MessageTag,
    PendingRequest,
    ProbedMessage,
)
from paceline.transport.mpi_exchange.outgoing_messages import OutgoingMessage
from paceline.transport.mpi_exchange.polled_agreement import ExchangeProblem, RoundReport, gather_reports
from paceline.transport.mpi_exchange.progress_loop import WorkSlice, drive_exchange
from paceline.world.mpi_world import load_mpi, release_mpi_names

__all__ = ["AllToAllExchange", "ExchangeOutcome", "MpiCarrier", "RankExchange", "RingExchange"]

_PASSING_ON_SECONDS = 0.2


class MpiCarrier:
    """Carries messages over two communicators of its own: one for envelopes, one for verdicts.

    Args:
        comm: whose ranks they are; MPI's world if it is left out.
    """

    def __init__(self, comm: Any = None) -> None:
        self._mpi = load_mpi()
        given = self._mpi.COMM_WORLD if comm is None else comm
        self._data, self._verdicts = given.Dup(), given.Dup()
        if given.size == self._mpi.COMM_WORLD.size:
            release_mpi_names(self._data)
        self.rank: int = given.rank
        self.size: int = given.size

    def send(self, buffer: Bytes, target: int, tag: MessageTag) -> PendingRequest:
        """Start sending a buffer."""
        comm = self._verdicts if tag == MessageTag.VERDICT else self._data
        return comm.Isend([buffer, self._mpi.BYTE], target, tag)

    def probe(self, source: int, tag: MessageTag | None = None) -> ProbedMessage | None:
        """Return the next message of a rank if it has come."""
        status = self._mpi.Status()
        comm = self._verdicts if tag == MessageTag.VERDICT else self._data
        found = comm.Improbe(source, self._mpi.ANY_TAG if tag is None else tag, status)
        if found is None:
            return None
        return ProbedMessage(
            status.Get_tag(),
            status.Get_count(self._mpi.BYTE),
            lambda buffer: found.Irecv([buffer, self._mpi.BYTE]),
        )

    def local_size(self) -> int:
        """Return how many of the ranks share this host's memory; all ranks have to ask."""
        here = self._data.Split_type(self._mpi.COMM_TYPE_SHARED)
        try:
            return here.size
        finally:
            here.Free()

    def abort(self, code: int) -> None:
        """End all ranks, once mpiexec has had time to pass on what was printed: it drops the rest."""
        sys.stdout.flush()
        time.sleep(_PASSING_ON_SECONDS)
        self._mpi.COMM_WORLD.Abort(code)


@dataclass(frozen=True)
class ExchangeOutcome:
    """What came of an exchange, the same on every rank but for its own times.

    Attributes:
        problems: what any rank found.
        whole: whether this rank's messages may be used; else what they were received into is undefined.
        closed: whether everything that was sent was received, on all ranks, so that another exchange may follow.
        seconds: this rank's time from its start until all its messages and its work were through.
        slices_under_way: slices of work done while messages were under way.
        sent_checksum, received_checksum: over the messages of this rank, by rank of target or source.
        told_checksum: over what the sources told of those that came.
    """

    problems: tuple[ExchangeProblem, ...]
    whole: bool
    closed: bool
    seconds: float
    slices_under_way: int
    sent_checksum: int
    received_checksum: int
    told_checksum: int

    def check(self) -> None:
        """Raise if any rank found anything wrong.

        Raises:
            EnvelopeError: the message is the first problem's.
        """
        if self.problems:
            first = self.problems[0]
            more = f" (and {len(self.problems) - 1} more)" if len(self.problems) > 1 else ""
            raise EnvelopeError(f"{first}{more}", source=first.culprit if first.culprit >= 0 else None)


class RankExchange:
    """Exchanges messages between ranks again and again; call everything on all ranks, in the same order.

    Args:
        carrier: what carries them.
        run: names this exchange, the same on all ranks; drawn if it is left out.
        timeout: seconds in which nothing moves before that is an error.
        frame_nbytes: long messages go in frames of so many bytes, the same on all ranks.
        fault: one of `exchange.faults.FAULTS` for this rank to make, in its first message to
            the next rank; for trying it out.
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
                f"timeout={timeout!r} is no time to wait", remedy="give seconds > 0, for example 60"
            )
        split_frames(0, frame_nbytes)
        self.carrier = carrier or MpiCarrier()
        self.timeout, self.frame_nbytes, self.fault = timeout, frame_nbytes, fault
        self._closed = True
        self._round, self._sequence_to = 0, dict.fromkeys(range(self.carrier.size), 0)
        self._run = run or str(self.meet({"run": uuid4().hex})[0]["run"])
        self.inbox = ReceiveLedger(self._run, self.carrier.rank, range(self.carrier.size))

    def meet(self, facts: Mapping[str, Any] | None = None) -> list[Mapping[str, Any]]:
        """Return the facts that all ranks tell, by rank, once all have come.

        Raises:
            MissingEnvelope: some rank did not come in time; it is named.
        """
        mine = RoundReport(self.carrier.rank, facts=facts or {})
        return [each.facts for each in gather_reports(self.carrier, mine, self.timeout)]

    def exchange_pieces(
        self, pieces: Mapping[int, Any], places: Mapping[int, Any], work: WorkSlice | None = None
    ) -> ExchangeOutcome:
        """Send ``pieces[target]`` to each target and receive into ``places[source]`` from each source.

        Args:
            pieces, places: numpy arrays or anything whose bytes lie in a row; they must not overlap.
            work: does a slice of work, and returns False once there is none left; called while messages move.

        Returns:
            what came of it; it holds what went wrong, on whatever rank.

        Raises:
            MissingEnvelope: some rank told nothing in time, so nobody knows what it found.
            EnvelopeError: an earlier exchange was given up with messages under way.
            UsageError: something has no bytes in a row, or can't be written.
            Exception: what `work` raised; messages may be under way then.
        """
        if not self._closed:
            raise EnvelopeError(
                "messages of an earlier exchange may still be under way, so no other can follow",
                remedy="end all ranks: carrier.abort(1)",
            )
        started = time.perf_counter()
        neighbour, fault, self.fault = (self.carrier.rank + 1) % self.carrier.size, self.fault, ""
        outgoing = [
            self._outgoing(target, piece, fault if target == neighbour else "")
            for target, piece in sorted(pieces.items())
        ]
        incoming = [self._incoming(source, place) for source, place in sorted(places.items())]
        stuck: list[EnvelopeError] = []
        under_way, self._closed = 0, False  # until all ranks tell that it is
        try:
            under_way = drive_exchange(outgoing, incoming, self.timeout, work)
        except EnvelopeError as error:
            stuck.append(error)
        finally:
            if not all(each.done for each in (*outgoing, *incoming)):
                ABANDONED_BUFFERS.append((outgoing, incoming))
        seconds = time.perf_counter() - started
        problems = [each for one in incoming for each in one.problems] + stuck
        verdicts = self._agree(problems, closed=not stuck)
        self._round += 1
        for each in outgoing:
            self._sequence_to[each.target] = each.sequence
        self._closed = all(one.facts["closed"] for one in verdicts)
        return ExchangeOutcome(
            tuple(problem for one in verdicts for problem in one.problems),
            not problems,
            self._closed,
            seconds,
            under_way,
            message_checksum(each.checksum for each in outgoing),
            message_checksum(each.checksum for each in incoming),
            message_checksum(each.told_checksum for each in incoming),
        )

    def _agree(self, problems: Sequence[EnvelopeError], *, closed: bool) -> list[RoundReport]:
        """Return what all ranks found; they may be as late here as their time-outs let them."""
        rank = self.carrier.rank
        found = tuple(ExchangeProblem.of(each, rank) for each in problems)
        return gather_reports(
            self.carrier, RoundReport(rank, found, {"closed": closed}), 2 * self.timeout + 5
        )

    def _outgoing(self, target: int, piece: Any, fault: str) -> OutgoingMessage:
        header = Header(
            self._run, "frame", self.carrier.rank, target, self._sequence_to[target], round=self._round
        )
        return OutgoingMessage(self.carrier, header, bytes_view(piece), self.frame_nbytes, fault)

    def _incoming(self, source: int, place: Any) -> IncomingMessage:
        view = bytes_view(place)
        if view.readonly:
            raise UsageError(
                "what is received into can't be written", remedy="give a bytearray or a numpy array"
            )
        return IncomingMessage(self.carrier, self.inbox, source, self._round, view, self.frame_nbytes)


class RingExchange(RankExchange):
    """Every rank sends to the next one and receives from the one before it."""

    def exchange(self, data: Any, into: Any, work: WorkSlice | None = None) -> ExchangeOutcome:
        """Send `data` to the next rank and receive that of the rank before into `into`, of the same size."""
        rank, size = self.carrier.rank, self.carrier.size
        return self.exchange_pieces({(rank + 1) % size: data}, {(rank - 1) % size: into}, work)


class AllToAllExchange(RankExchange):
    """Every rank sends a piece to every rank, itself included."""

    def exchange(self, data: Any, into: Any, work: WorkSlice | None = None) -> ExchangeOutcome:
        """Send the r-th part of `data` to rank r and receive its part of every rank q's as q-th part of `into`.

        Args:
            data, into: of the same size on all ranks, a multiple of their number.
            work: as for `exchange_pieces`.
        """
        size = self.carrier.size
        return self.exchange_pieces(
            dict(enumerate(equal_parts(data, size))), dict(enumerate(equal_parts(into, size))), work
        )


def equal_parts(data: Any, size: int) -> list[memoryview]:
    """Return the bytes of `data` in `size` equal parts.

    Raises:
        UsageError: they are not so many times anything.

    Example:
        >>> [bytes(each) for each in parts(b"abcd", 2)]
        [b'ab', b'cd']
    """
    view = bytes_view(data)
    if view.nbytes % size:
        raise UsageError(
            f"{view.nbytes} bytes can't be shared among {size} ranks alike",
            remedy=f"exchange a multiple of {size} bytes, for example {view.nbytes // size * size}",
        )
    step = view.nbytes // size
    return [view[index * step : (index + 1) * step] for index in range(size)]


def bytes_view(data: Any) -> memoryview:
    """Return the bytes of anything whose bytes lie in a row; they are not copied.

    Raises:
        UsageError: they don't lie in a row, or it has none.
    """
    try:
        view = memoryview(data)
        return view.cast("B") if view.nbytes else memoryview(bytearray())
    except (TypeError, ValueError) as error:  # ValueError: numpy's, of dtypes that have no buffer
        raise UsageError(
            f"a {type(data).__name__} can't be exchanged: {error}",
            remedy="give bytes or a contiguous numpy array",
        ) from error
