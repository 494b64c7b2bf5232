"""Splitting messages into frames, one per envelope, and assembling them again (pure).

Frames may arrive late, repeated, out of order or from an attacker: nothing is stored for a message that is not
expected, and no more than a few unfinished messages per source. A frame that was damaged stays missing until its
message is sent again; frames that arrived before need not.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from paceline.async_dp.protocol.hub_messages import HubMessage
from paceline.transport.envelope import Bytes, Envelope
from paceline.transport.header_layout import Header
from paceline.transport.message_frames import split_frames

__all__ = ["FRAME_NBYTES", "MessageAssembler", "ReplayWindow", "split_message"]

FRAME_NBYTES = 1 << 20
"""Size of a frame, unless bandwidth is limited: then `paceline.transport.token_bucket.max_frame_nbytes`."""

_MIN_FRAME_NBYTES = 1 << 9  # at the lowest rate frames still have twice that


def split_message(
    message: HubMessage, run: str, sequence: int, session_id: int = 0, frame_nbytes: int = FRAME_NBYTES
) -> Iterator[Envelope]:
    """Yield the envelopes of a message.

    Args:
        message: its payload must not change until all are sent.
        run: that the message belongs to.
        sequence: number of the first envelope; the others follow.
        session_id: of the sender; a sender that starts anew has another one.
        frame_nbytes: most bytes per frame.
    """
    payload = memoryview(message.payload).cast("B") if message.payload else b""
    nbytes = len(payload)
    meta = {**message.meta, "fragment": message.fragment, "session": session_id}
    frames = split_frames(nbytes, frame_nbytes)
    for frame in frames:
        header = Header(
            run, message.kind, message.source, message.target, sequence + frame.index, message.round,
            frame.index, len(frames), frame.offset, nbytes, message.dtype, (), frame.nbytes, 0, meta,
        )  # fmt: skip
        yield Envelope(header, payload[frame.offset : frame.offset + frame.nbytes])


@dataclass
class _PartialMessage:
    buffer: memoryview
    frames: int
    received: set[int] = field(default_factory=set)


class MessageAssembler:
    """Assembles messages from frames.

    Args:
        max_nbytes_of: returns the most bytes that a message with this header may have; None: it is not expected.
        max_partial: incomplete messages per source; the oldest is dropped for a new one.
        max_nbytes: of all incomplete messages together; above that the oldest are dropped.
        refused: counts dropped frames by reason; None: a new counter.

    Attributes:
        refused: dropped frames by reason.
        held_nbytes: size of all incomplete messages.
    """

    def __init__(
        self,
        max_nbytes_of: Callable[[Header], int | None],
        max_partial: int = 8,
        max_nbytes: int = 1 << 30,
        refused: Counter[str] | None = None,
    ) -> None:
        self._max_nbytes_of, self._max_partial, self.max_nbytes = max_nbytes_of, max_partial, max_nbytes
        self.held_nbytes = 0
        self._partial: OrderedDict[int, OrderedDict[tuple[str, int, int], _PartialMessage]] = OrderedDict()
        self.refused = Counter[str]() if refused is None else refused

    def add(self, envelope: Envelope) -> HubMessage | None:
        """Return the message that this envelope completes; None if it completes none."""
        header = envelope.header
        fragment = header.meta.get("fragment", 0)
        total = header.nbytes if header.frames == 1 else header.total_nbytes
        limit = self._max_nbytes_of(header) if type(fragment) is int else None
        if limit is None or total > limit:
            self.refused["unexpected" if limit is None else "too long"] += 1
            return None
        if header.frames == 1:
            return _message(header, fragment, envelope.payload)
        if header.frames > total // _MIN_FRAME_NBYTES + 1:
            self.refused["too many frames"] += 1
            return None
        key = header.kind, header.round, fragment
        partial = self._partial_of(header, key, total)
        if header.frame not in partial.received:
            partial.buffer[header.offset : header.offset + header.nbytes] = envelope.payload
            partial.received.add(header.frame)
        if len(partial.received) < partial.frames:
            return None
        self._drop(header.source, key)
        return _message(header, fragment, partial.buffer)

    def forget(self, source: int) -> None:
        """Drop the incomplete messages of a source."""
        for key in list(self._partial.get(source, ())):
            self._drop(source, key)

    def _partial_of(self, header: Header, key: tuple[str, int, int], total: int) -> _PartialMessage:
        held = self._partial.setdefault(header.source, OrderedDict())
        found = held.get(key)
        if found is not None and len(found.buffer) == total and found.frames == header.frames:
            return found
        if found is not None:
            self._drop(header.source, key)
        while len(held) >= self._max_partial:
            self._drop(header.source, next(iter(held)))
        while self.held_nbytes + total > self.max_nbytes and any(self._partial.values()):
            source = next(each for each, messages in self._partial.items() if messages)
            self._drop(source, next(iter(self._partial[source])))
        held = self._partial.setdefault(header.source, OrderedDict())
        found = held[key] = _PartialMessage(memoryview(bytearray(total)), header.frames)
        self.held_nbytes += total
        return found

    def _drop(self, source: int, key: tuple[str, int, int]) -> None:
        held = self._partial[source]
        self.held_nbytes -= len(held.pop(key).buffer)
        if not held:
            del self._partial[source]


def _message(header: Header, fragment: int, payload: Bytes) -> HubMessage:
    return HubMessage(
        header.kind, header.source, header.target, header.round, fragment, header.meta, payload, header.dtype
    )


class ReplayWindow:
    """Remembers which sequence numbers of a source arrived; numbers far below the highest count as arrived.

    Source: the anti-replay window of RFC 4303, section 3.4.3.

    Example:
        >>> window = ReplayWindow()
        >>> window.admit(5), window.admit(4), window.admit(5)
        (True, True, False)
    """

    SIZE = 4096
    _ALL = (1 << SIZE) - 1

    def __init__(self) -> None:
        self._highest, self._bits = -1, self._ALL  # bit i: number highest − i arrived

    def admit(self, sequence: int) -> bool:
        """Record a number; return whether it is new."""
        ahead = sequence - self._highest
        if ahead == 1 and self._bits == self._ALL:  # no gaps: no bits to shift
            self._highest = sequence
            return True
        if ahead > 0:
            self._bits = ((self._bits << min(ahead, self.SIZE)) | 1) & self._ALL
            self._highest = sequence
            return True
        if -ahead >= self.SIZE or self._bits >> -ahead & 1:
            return False
        self._bits |= 1 << -ahead
        return True
