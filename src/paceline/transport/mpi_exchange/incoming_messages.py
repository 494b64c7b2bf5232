"""Receiver of one message in a round: frames, received in place and checked as each completes.

    expecting a head     → check checksum, run, source, target, number, position → expecting its payload
    expecting a payload  → write it to its position, check its checksum          → expecting its tail
    expecting a tail     → accept the envelope if the tail matches the head      → expecting a head
    a close ends the message; what has not arrived by then is missing

The three messages of an envelope arrive in order, so a message of an unexpected kind means that the expected one was
not sent. The remaining messages of a refused envelope are discarded.

[Note: ahead] A large message is sent over a network only when its receiver has posted a buffer, and that notice may
queue behind traffic in the other direction. So the next receives are posted while one is still pending; they complete
in the order in which they were sent. A payload is received directly into the position that its head announces, if that
is the position of a frame and no other payload was received there; else into a separate buffer, and copied when
verified.
"""

from __future__ import annotations

from collections import deque

from paceline.errors import (
    DamagedEnvelope,
    EnvelopeError,
    ForeignEnvelope,
    MisplacedEnvelope,
    MissingEnvelope,
    TruncatedEnvelope,
)
from paceline.transport.envelope import CHECKSUM_NBYTES, check_payload, check_tail, decode, decode_head
from paceline.transport.header_layout import Header
from paceline.transport.message_frames import ReceiveLedger, message_checksum, split_frames
from paceline.transport.mpi_exchange.message_carrier import (
    MessageCarrier,
    MessageTag,
    PendingRequest,
    ProbedMessage,
)

__all__ = ["IncomingMessage"]

_MAX_PENDING = 6  # two envelopes of three messages
_MAX_STEPS = 2 * _MAX_PENDING  # per call of `advance`
_MAX_PROBLEMS = 50

_Buffer = bytearray | memoryview


class IncomingMessage:
    """Receives one message, a step per call of `advance`.

    Args:
        carrier: of the messages.
        ledger: of the envelopes received from this source.
        source: sending rank.
        round: number of the round.
        place: receive buffer; undefined until the message is `whole`.
        frame_nbytes: frame size, the same as the sender's.

    Attributes:
        source: sending rank.
        done: the sender has closed the message.
        problems: errors in the order in which they were found.
        checksum: of the message as received.
        expected_checksum: of the message as its sender computed it.
    """

    _header: Header | None

    def __init__(
        self,
        carrier: MessageCarrier,
        ledger: ReceiveLedger,
        *,
        source: int,
        round: int,
        place: memoryview,
        frame_nbytes: int,
    ) -> None:
        self._carrier, self._ledger, self._round, self._place = carrier, ledger, round, place
        self._frames = split_frames(place.nbytes, frame_nbytes)
        self._first = ledger.expected(source)
        self._checksum_of_frame: dict[int, int] = {}
        self._excused: set[int] = set()  # frames whose loss is explained by another problem
        self._lost_unknown = 0  # lost envelopes whose frame is unknown
        self._last, self._disorder = self._first - 1, ""
        self._expected, self._header, self._checksum = MessageTag.HEAD, None, b""
        self._discarding = False
        self._pending: deque[tuple[PendingRequest, MessageTag, _Buffer]] = deque()
        self._placed: set[int] = set()  # frames whose position is taken by a payload
        self.source, self.done = source, False
        self.problems: list[EnvelopeError] = []
        self.checksum = self.expected_checksum = 0

    @property
    def whole(self) -> bool:
        """Whether all frames arrived intact, and nothing else did: the message can be delivered."""
        return self.done and not self.problems

    @property
    def next_missing(self) -> str:
        """The first frame that has not arrived, or the close, for error messages."""
        left = [each.index for each in self._frames if each.index not in self._checksum_of_frame]
        return f"frame {left[0]} of {len(self._frames)}" if left else "the close after its last frame"

    def advance(self) -> bool:
        """Do everything that does not block; return whether there was anything to do."""
        steps = 0
        while steps < _MAX_STEPS and (self._take_next() or self._post_receive()):
            steps += 1
        return steps > 0

    # --- receiving

    def _post_receive(self) -> bool:
        """Post a receive for the next message, if one is due; see [Note: ahead]."""
        closing = any(tag == MessageTag.CLOSE for _, tag, _ in self._pending)  # the next round follows
        if self.done or closing or len(self._pending) == _MAX_PENDING:
            return False
        message = self._carrier.probe(self.source)
        if message is None:
            return False
        buffer = self._buffer_for(message)
        self._pending.append((message.receive(buffer), MessageTag(message.tag), buffer))
        return True

    def _take_next(self) -> bool:
        """Process the oldest pending message, if it is complete."""
        if not self._pending or not self._pending[0][0].Test():
            return False
        _, tag, buffer = self._pending.popleft()
        try:
            self._take(tag, buffer)
        except EnvelopeError as error:
            self._note(error)
        return True

    def _buffer_for(self, message: ProbedMessage) -> _Buffer:
        """Return the position of the announced payload, or a separate buffer for anything else."""
        header = self._announced() if message.tag == MessageTag.PAYLOAD else None
        if header is None or message.nbytes != header.nbytes or header.frame in self._placed:
            return bytearray(message.nbytes)
        self._placed.add(header.frame)
        return self._position(header)

    def _announced(self) -> Header | None:
        """Return the header of the next payload, if it has arrived and is valid so far."""
        if not self._pending:
            return self._header if self._expected == MessageTag.PAYLOAD else None
        request, tag, buffer = self._pending[-1]
        if tag != MessageTag.HEAD or not request.Test():
            return None
        try:
            header, _ = decode_head(buffer)
            self._ledger.check(header, carried_from=self.source)
            self._check_frame(header)
        except EnvelopeError:
            return None  # reported when this head is processed
        return header

    def _position(self, header: Header) -> memoryview:
        return self._place[header.offset : header.offset + header.nbytes]

    def _take(self, tag: MessageTag, buffer: _Buffer) -> None:
        if self._discarding and tag in (MessageTag.PAYLOAD, MessageTag.TAIL):
            return
        self._discarding = False
        if tag in (MessageTag.HEAD, MessageTag.CLOSE):
            self._end_unfinished()
            if tag == MessageTag.HEAD:
                self._take_head(buffer)
            else:
                self._take_close(buffer)
        elif tag != self._expected or self._header is None:
            raise self._unexpected(tag)
        elif tag == MessageTag.PAYLOAD:
            self._take_payload(self._header, buffer)
        else:
            self._take_tail(self._header, buffer)

    def _unexpected(self, tag: MessageTag) -> EnvelopeError:
        header, got, expected = self._header, tag.name.lower(), self._expected.name.lower()
        self._lose(header)
        if header is None:
            return DamagedEnvelope(
                f"rank {self.source} sent a {got} where a {expected} was expected", source=self.source
            )
        return self._truncated(header, f"lacks its {expected}: a {got} arrived in its place", expected)

    def _truncated(self, header: Header, problem: str, part: str) -> TruncatedEnvelope:
        return TruncatedEnvelope(
            f"{header} {problem}", source=self.source, sequence=header.sequence, part=part
        )

    def _take_head(self, buffer: _Buffer) -> None:
        try:
            header, end = decode_head(buffer)
        except EnvelopeError:
            self._lose(None)
            raise
        self._check_order(header)
        try:
            self._ledger.check(header, carried_from=self.source)
            self._check_frame(header)
        except EnvelopeError:
            self._discarding = True  # it may be foreign, so it does not explain a missing frame
            raise
        self._header, self._checksum = header, bytes(buffer[end - CHECKSUM_NBYTES : end])
        self._expected = MessageTag.PAYLOAD

    def _check_order(self, header: Header) -> None:
        """Record the first envelope that does not follow its predecessor."""
        if header.run != self._ledger.run:
            return
        if header.sequence > self._last + 1 and not self._disorder:
            self._disorder = f"{header} arrived after envelope {self._last}"
        self._last = max(self._last, header.sequence)

    def _check_frame(self, header: Header) -> None:
        """Raise unless an envelope carries a frame of this message."""
        if header.round == self._round and header.frame < len(self._frames):
            frame = self._frames[header.frame]
            found = header.offset, header.nbytes, header.frames, header.total_nbytes
            if found == (frame.offset, frame.nbytes, len(self._frames), self._place.nbytes):
                return
        raise ForeignEnvelope(
            f"{header} belongs to a message of {header.total_nbytes} bytes in {header.frames} frames; "
            f"expected {self._place.nbytes} bytes in {len(self._frames)} frames in round {self._round}",
            source=self.source,
            sequence=header.sequence,
            remedy="all ranks must exchange messages of the same size, in frames of the same size",
        )

    def _take_payload(self, header: Header, buffer: _Buffer) -> None:
        try:
            check_payload(header, buffer)
        except EnvelopeError:
            self._lose(header)
            raise
        if isinstance(buffer, bytearray):
            self._position(header)[:] = buffer
        self._expected = MessageTag.TAIL

    def _take_tail(self, header: Header, buffer: _Buffer) -> None:
        try:
            check_tail(header, self._checksum, buffer)
        except EnvelopeError:
            self._lose(header)
            raise
        self._ledger.accept(header, carried_from=self.source)
        self._checksum_of_frame[header.frame] = header.checksum
        self._header, self._expected = None, MessageTag.HEAD

    def _take_close(self, buffer: _Buffer) -> None:
        self.done = True
        self._ledger.skip(self.source, self._first + len(self._frames) + 1)
        self.checksum = message_checksum(value for _, value in sorted(self._checksum_of_frame.items()))
        header, _ = decode(buffer)
        found = header.kind, header.run, header.source, header.target, header.round
        if found != ("close", self._ledger.run, self.source, self._ledger.me, self._round):
            raise ForeignEnvelope(f"{header} of run {header.run!r} is not the close of round {self._round}")
        self.expected_checksum = int(header.meta.get("checksum", 0))
        self._check_complete()

    # --- losses

    def _lose(self, header: Header | None) -> None:
        """Give up the current envelope, whose frame is known if its header is."""
        if header is not None:
            self._excused.add(header.frame)
        else:
            self._lost_unknown += 1
        self._header, self._expected, self._discarding = None, MessageTag.HEAD, True

    def _end_unfinished(self) -> None:
        """Report the current envelope as truncated, if it is incomplete."""
        header, expected = self._header, self._expected
        if header is None:
            return
        self._lose(header)
        self._discarding = False
        part = "payload" if expected == MessageTag.PAYLOAD else "end mark"
        self._note(self._truncated(header, f"ends before its {part}, which was not sent", part))

    def _check_complete(self) -> None:
        """Raise for frames whose loss no earlier problem explains, for wrong order, and for a wrong checksum."""
        missing = [
            each.index
            for each in self._frames
            if each.index not in self._checksum_of_frame and each.index not in self._excused
        ]
        if len(missing) > self._lost_unknown:
            shown = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
            raise MissingEnvelope(
                f"rank {self.source} closed round {self._round}, but frame {shown} of {len(self._frames)} "
                f"(sequence {self._first + missing[0]}) did not arrive whole",
                source=self.source,
                sequence=self._first + missing[0],
            )
        if not self.problems and self._disorder:
            raise MisplacedEnvelope(self._disorder, source=self.source, sequence=self._last)
        if not self.problems and self.checksum != self.expected_checksum:
            raise DamagedEnvelope(
                f"the message of rank {self.source} in round {self._round} has checksum {self.checksum:016x}, "
                f"its sender recorded {self.expected_checksum:016x}",
                source=self.source,
            )

    def _note(self, error: EnvelopeError) -> None:
        self._ledger.refuse(error)
        if error.source is None:
            error.source = self.source
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(error)
