"""What a rank sends to another in a round: frames, two of them under way at a time, and a close."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from paceline.transport.envelope import Bytes, add_checksum, encode
from paceline.transport.envelope_faults import TaggedBuffer, faulty_frame_order, faulty_messages
from paceline.transport.envelope_header import Header
from paceline.transport.message_frames import message_checksum, split_frames
from paceline.transport.mpi_exchange.message_carrier import MessageCarrier, MessageTag, PendingRequest

__all__ = ["OutgoingMessage"]

_MOST_FLIGHTS = 6  # two envelopes of three messages


class OutgoingMessage:
    """Sends one message, whenever `advance` is called.

    Args:
        carrier: takes the messages.
        header: what all its envelopes say alike: run, kind, source, target, round; and the first sequence number.
        data: the message; it must stay as it is until `done`.
        frame_nbytes: bytes of a frame.
        fault: what to do wrong, once, in the middle.

    Attributes:
        source, target: ranks.
        done: everything was sent and taken.
        checksum: of the message, once everything was sent.
        sequence: number of the next envelope.
    """

    def __init__(
        self, carrier: MessageCarrier, header: Header, data: Bytes, frame_nbytes: int, fault: str = ""
    ) -> None:
        self._carrier, self._header, self._fault = carrier, header, fault
        self._data = memoryview(data).cast("B")
        self._frames = split_frames(self._data.nbytes, frame_nbytes)
        self._order = deque(faulty_frame_order(fault, len(self._frames)))
        self._waiting: deque[TaggedBuffer] = deque()
        self._flights: list[tuple[PendingRequest, Bytes]] = []
        self._checksum_of_frame: dict[int, int] = {}
        self._first, self._closed = header.sequence, False
        self.source, self.target = header.source, header.target
        self.done, self.checksum = False, 0
        self.sequence = header.sequence + len(self._frames) + 1

    @property
    def untaken(self) -> bool:
        """Whether something was sent that the target has not taken."""
        return bool(self._flights)

    @property
    def next_frame(self) -> str:
        """What is to be sent next, for messages."""
        at = self._order[0] if self._order else len(self._frames) - 1
        return f"frame {at} of {len(self._frames)}"

    def advance(self) -> bool:
        """Do what can be done without waiting; return whether anything was."""
        if self.done:
            return False
        before = len(self._flights)
        self._flights = [each for each in self._flights if not each[0].Test()]
        moved = len(self._flights) < before
        while len(self._flights) < _MOST_FLIGHTS and self._prepare():
            tag, buffer = self._waiting.popleft()
            self._flights.append((self._carrier.send(buffer, self.target, tag), buffer))
            moved = True
        self.done = self._closed and not self._waiting and not self._flights
        return moved

    def _prepare(self) -> bool:
        """Have a message wait to be sent; return whether there is one."""
        if not self._waiting and self._order:
            self._waiting.extend(self._envelope(self._order.popleft()))
        elif not self._waiting and not self._closed and self._fault != "stall":
            self._waiting.append((MessageTag.CLOSE, self._close()))
            self._closed = True
        return bool(self._waiting)

    def _envelope(self, index: int) -> list[TaggedBuffer]:
        frame = self._frames[index]
        header = replace(
            self._header,
            sequence=self._first + index,
            frame=index,
            frames=len(self._frames),
            offset=frame.offset,
            total_nbytes=self._data.nbytes,
        )
        faulty = index == len(self._frames) // 2
        payload = self._data[frame.offset : frame.offset + frame.nbytes]
        header = add_checksum(header, payload)
        self._checksum_of_frame[index] = header.checksum
        return faulty_messages(header, payload, self._fault if faulty else "")

    def _close(self) -> bytes:
        """Return the envelope that ends the message, and tells its checksum."""
        self.checksum = message_checksum(
            self._checksum_of_frame[each] for each in sorted(self._checksum_of_frame)
        )
        header = replace(
            self._header, kind="close", sequence=self.sequence - 1, meta={"checksum": self.checksum}
        )
        return b"".join(encode(header))
