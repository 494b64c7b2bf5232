"""What a rank receives from another in a round: frames, straight to their places, each checked when it is whole.

    expecting a head     → its checksum, run, source, target, number, place  → expecting its payload
    expecting a payload  → into its place; its checksum                      → expecting its tail
    expecting a tail     → is it this envelope's own? then it counts         → expecting a head
    a close ends it, whatever came before: what has not come by then is missing

An envelope's three messages come one behind the other, so a message of another kind than the expected one means that
the expected one was not sent. What belongs to an envelope that is refused is forgotten.

[Note: ahead] On a wire a large message is sent when its receiver has said where to, and that word may have to queue
behind what goes the other way. So the next messages are asked for while one is still coming; they are taken in the
order in which they were sent. A payload that is asked for ahead goes to the place that its head tells, if that is a
place for a frame and nothing else was sent there before; else it comes aside, and into its place when it is right.
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
from paceline.transport.envelope import check_payload, check_tail, decode, decode_head
from paceline.transport.envelope_header import Header
from paceline.transport.message_frames import ReceiveLedger, message_checksum, split_frames
from paceline.transport.mpi_exchange.message_carrier import (
    MessageCarrier,
    MessageTag,
    PendingRequest,
    ProbedMessage,
)

__all__ = ["IncomingMessage"]

_CHECKSUM_NBYTES = 8
_MOST_FLIGHTS = 6  # two envelopes of three messages
_MOST_STEPS = 2 * _MOST_FLIGHTS  # of one look
_MOST_PROBLEMS = 50


class IncomingMessage:
    """Receives one message, whenever `advance` is called.

    Args:
        carrier: brings the messages.
        inbox: knows what came from this source before.
        source: whose message it is.
        round: of which round.
        place: where it goes; undefined until the message is `whole`.
        frame_nbytes: bytes of a frame, as the sender cuts them.

    Attributes:
        done: the sender has closed.
        whole: all frames came and were right, and nothing else did: the message may be delivered.
        problems: what was wrong, in the order in which it was found.
        checksum: of the message as it came; told_checksum: as its sender told it.
    """

    def __init__(
        self,
        carrier: MessageCarrier,
        inbox: ReceiveLedger,
        source: int,
        round: int,
        place: memoryview,
        frame_nbytes: int,
    ) -> None:
        self._carrier, self._inbox, self._round = carrier, inbox, round
        self._place = place
        self._frames = split_frames(place.nbytes, frame_nbytes)
        self._first = inbox.expected(source)
        self._checksum_of_frame: dict[int, int] = {}
        self._excused: set[int] = set()  # frames whose loss is explained
        self._unknown = 0  # envelopes lost that nobody can tell the frame of
        self._last, self._disorder = self._first - 1, ""
        self._expected, self._header, self._seal = MessageTag.HEAD, None, b""
        self._skipping = False
        self._coming: deque[tuple[PendingRequest, MessageTag, bytearray | memoryview]] = deque()
        self._placed: set[int] = set()  # frames whose place was given to a payload
        self.source, self.done = source, False
        self.problems: list[EnvelopeError] = []
        self.checksum = self.told_checksum = 0

    _header: Header | None

    @property
    def whole(self) -> bool:
        """Whether the message may be delivered."""
        return self.done and not self.problems

    @property
    def next_missing(self) -> str:
        """The first frame that has not come, for messages; or that it is only the close."""
        left = [each.index for each in self._frames if each.index not in self._checksum_of_frame]
        return f"frame {left[0]} of {len(self._frames)}" if left else "the close behind its last frame"

    def advance(self) -> bool:
        """Do what can be done without waiting; return whether anything was."""
        steps = 0
        while steps < _MOST_STEPS and (self._take_next() or self._ask_for_next()):
            steps += 1
        return steps > 0

    # What comes.

    def _ask_for_next(self) -> bool:
        """Receive the next message, if there is one and it is not too early for it, see [Note: ahead]."""
        closing = any(
            tag == MessageTag.CLOSE for _, tag, _ in self._coming
        )  # what follows is of the next round
        if self.done or closing or len(self._coming) == _MOST_FLIGHTS:
            return False
        arrival = self._carrier.probe(self.source)
        if arrival is None:
            return False
        buffer = self._buffer_for(arrival)
        self._coming.append((arrival.receive(buffer), MessageTag(arrival.tag), buffer))
        return True

    def _take_next(self) -> bool:
        """Take in what was asked for first, if it is all there."""
        if not self._coming or not self._coming[0][0].Test():
            return False
        _, tag, buffer = self._coming.popleft()
        try:
            self._take(tag, buffer)
        except EnvelopeError as error:
            self._note(self._inbox.refuse(error))
        return True

    def _buffer_for(self, arrival: ProbedMessage) -> bytearray | memoryview:
        """Return where to receive: in place if this is the payload that was announced, else aside."""
        header = self._announced() if arrival.tag == MessageTag.PAYLOAD else None
        if header is None or arrival.nbytes != header.nbytes or header.frame in self._placed:
            return bytearray(arrival.nbytes)
        self._placed.add(header.frame)
        return self._place_of(header)

    def _announced(self) -> Header | None:
        """Return the header of the payload that comes next, if it is here and right so far."""
        if not self._coming:
            return self._header if self._expected == MessageTag.PAYLOAD else None
        flight, tag, buffer = self._coming[-1]
        if tag != MessageTag.HEAD or not flight.Test():
            return None
        try:
            header, _ = decode_head(buffer)
            self._inbox.check(header, carried_from=self.source)
            self._check_place(header)
        except EnvelopeError:
            return None  # it is said when this head is taken
        return header

    def _place_of(self, header: Header) -> memoryview:
        return self._place[header.offset : header.offset + header.nbytes]

    def _take(self, tag: MessageTag, buffer: bytearray | memoryview) -> None:
        if self._skipping and tag in (MessageTag.PAYLOAD, MessageTag.TAIL):
            return
        self._skipping = False
        if tag in (MessageTag.HEAD, MessageTag.CLOSE):
            self._drop_unfinished()
            if tag == MessageTag.HEAD:
                self._take_head(buffer)
            else:
                self._take_close(buffer)
        elif tag != self._expected or self._header is None:
            raise self._out_of_place(tag)
        elif tag == MessageTag.PAYLOAD:
            self._take_payload(self._header, buffer)
        else:
            self._take_tail(self._header, buffer)

    def _out_of_place(self, tag: MessageTag) -> EnvelopeError:
        """Return the error for a message of another kind than the expected one."""
        header, expected = self._header, self._expected.name.lower()
        self._lose(header)
        if header is None:
            return DamagedEnvelope(
                f"a {tag.name.lower()} came from rank {self.source} where a {expected} was expected",
                source=self.source,
            )
        return TruncatedEnvelope(
            f"{header} lacks its {expected}: a {tag.name.lower()} came in its place",
            source=self.source,
            sequence=header.sequence,
            part=expected,
        )

    def _take_head(self, buffer: bytearray | memoryview) -> None:
        try:
            header, end = decode_head(buffer)
        except EnvelopeError:
            self._lose(None)
            raise
        self._expect_after(header)
        try:
            self._inbox.check(header, carried_from=self.source)
            self._check_place(header)
        except EnvelopeError:
            self._skipping = True  # it may be another's, so nothing of ours is lost by it
            raise
        self._header, self._seal = header, bytes(buffer[end - _CHECKSUM_NBYTES : end])
        self._expected = MessageTag.PAYLOAD

    def _expect_after(self, header: Header) -> None:
        """Note an envelope that does not follow the one before it."""
        if header.run != self._inbox.run:
            return
        if header.sequence > self._last + 1 and not self._disorder:
            self._disorder = f"{header} came behind envelope {self._last}"
        self._last = max(self._last, header.sequence)

    def _check_place(self, header: Header) -> None:
        """Raise unless an envelope brings a frame of this message."""
        if header.round == self._round and header.frame < len(self._frames):
            frame = self._frames[header.frame]
            told = header.offset, header.nbytes, header.frames, header.total_nbytes
            if told == (frame.offset, frame.nbytes, len(self._frames), self._place.nbytes):
                return
        raise ForeignEnvelope(
            f"{header} belongs to a message of {header.total_nbytes} bytes in {header.frames} frames; "
            f"expected were {self._place.nbytes} bytes in {len(self._frames)} frames in round {self._round}",
            source=self.source,
            sequence=header.sequence,
            remedy="all ranks must exchange messages of the same size, in frames of the same size",
        )

    def _take_payload(self, header: Header, buffer: bytearray | memoryview) -> None:
        try:
            check_payload(header, buffer)
        except EnvelopeError:
            self._lose(header)
            raise
        if isinstance(buffer, bytearray):
            self._place_of(header)[:] = buffer
        self._expected = MessageTag.TAIL

    def _take_tail(self, header: Header, buffer: bytearray | memoryview) -> None:
        try:
            check_tail(header, self._seal, buffer)
        except EnvelopeError:
            self._lose(header)
            raise
        self._inbox.accept(header, carried_from=self.source)
        self._checksum_of_frame[header.frame] = header.checksum
        self._header, self._expected = None, MessageTag.HEAD

    def _take_close(self, buffer: bytearray | memoryview) -> None:
        self.done = True
        self._inbox.skip(self.source, self._first + len(self._frames) + 1)
        self.checksum = message_checksum(
            self._checksum_of_frame[each] for each in sorted(self._checksum_of_frame)
        )
        header, _ = decode(buffer)
        if (header.kind, header.run, header.source, header.target, header.round) != (
            "close",
            self._inbox.run,
            self.source,
            self._inbox.me,
            self._round,
        ):
            raise ForeignEnvelope(f"{header} of run {header.run!r} is not the close of round {self._round}")
        self.told_checksum = int(header.meta.get("checksum", 0))
        self._check_complete()

    # What did not come.

    def _lose(self, header: Header | None) -> None:
        """Give up the envelope that is being received, whose frame is known if its header is."""
        if header is not None:
            self._excused.add(header.frame)
        else:
            self._unknown += 1
        self._header, self._expected, self._skipping = None, MessageTag.HEAD, True

    def _drop_unfinished(self) -> None:
        """Note that the envelope before ended too early."""
        header, expected = self._header, self._expected
        if header is None:
            return
        self._lose(header)
        self._skipping = False
        part = "payload" if expected == MessageTag.PAYLOAD else "end mark"
        self._note(
            self._inbox.refuse(
                TruncatedEnvelope(
                    f"{header} ends before its {part}, which was not sent",
                    source=self.source,
                    sequence=header.sequence,
                    part=part,
                )
            )
        )

    def _check_complete(self) -> None:
        """Raise for what is missing and not explained by what was refused, or for another order."""
        missing = [
            each.index
            for each in self._frames
            if each.index not in self._checksum_of_frame and each.index not in self._excused
        ]
        if len(missing) > self._unknown:
            shown = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
            raise MissingEnvelope(
                f"rank {self.source} closed round {self._round} and frame {shown} of {len(self._frames)} "
                f"(sequence {self._first + missing[0]}) never came whole",
                source=self.source,
                sequence=self._first + missing[0],
            )
        if not self.problems and self._disorder:
            raise MisplacedEnvelope(self._disorder, source=self.source, sequence=self._last)
        if not self.problems and self.checksum != self.told_checksum:
            raise DamagedEnvelope(
                f"the message of rank {self.source} in round {self._round} has checksum {self.checksum:016x}, "
                f"its sender told {self.told_checksum:016x}",
                source=self.source,
            )

    def _note(self, error: EnvelopeError) -> None:
        if error.source is None:
            error.source = self.source
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(error)
