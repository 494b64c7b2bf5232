"""Splitting messages into frames, one per envelope, and assembling them again (pure).

Frames may arrive late, repeated, out of order or from an attacker: nothing is stored for a message that is not
expected, one unfinished message per source, kind and fragment, and no more in all than there is memory for. A frame
that was damaged stays missing until its message is sent again; frames that arrived before need not.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from paceline.async_dp.protocol.hub_messages import HubMessage
from paceline.transport.envelope import Bytes, Envelope
from paceline.transport.header_layout import Header
from paceline.transport.message_frames import split_frames

__all__ = [
    "FRAME_NBYTES",
    "MIN_FRAME_NBYTES",
    "MemoryNotice",
    "MessageAssembler",
    "MessageKey",
    "ReplayWindow",
    "split_message",
    "whole_message",
]

FRAME_NBYTES = 256 << 10
"""Size of a frame, unless bandwidth is limited: then `paceline.transport.token_bucket.max_frame_nbytes`.

A transport queues some frames per peer beyond what is counted here, so they are short."""

MIN_FRAME_NBYTES = 1 << 9
"""At the lowest rate frames still have twice that; messages of shorter ones are refused."""

_STALLED_SECONDS = 60.0


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
    if nbytes <= frame_nbytes:
        yield whole_message(message, run, sequence, session_id)
        return
    meta = {**message.meta, "fragment": message.fragment, "session": session_id}
    frames = split_frames(nbytes, frame_nbytes)
    for frame in frames:
        header = Header(
            run, message.kind, message.source, message.target, sequence + frame.index, message.round,
            frame.index, len(frames), frame.offset, nbytes, message.dtype, (), frame.nbytes, 0, meta,
        )  # fmt: skip
        yield Envelope(header, payload[frame.offset : frame.offset + frame.nbytes])


def whole_message(message: HubMessage, run: str, sequence: int, session_id: int = 0) -> Envelope:
    """Return a message as one envelope; arguments as for `split_message`."""
    payload = message.payload
    if type(payload) is not bytes:
        payload = memoryview(payload).cast("B") if payload else b""
    nbytes = len(payload)
    header = Header(
        run, message.kind, message.source, message.target, sequence, message.round, 0, 1, 0, nbytes, message.dtype,
        (), nbytes, 0, {**message.meta, "fragment": message.fragment, "session": session_id},
    )  # fmt: skip
    return Envelope(header, payload)


MessageKey = tuple[int, str, int, int]
"""Source, kind, round and fragment of a message."""


@dataclass
class _PartialMessage:
    buffer: memoryview
    frames: int
    changed_at: float = 0.0
    received: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class MemoryNotice:
    """A message that has to be sent again, from its first frame on: once there is memory (`ready`), or later."""

    key: MessageKey
    ready: bool


class MessageAssembler:
    """Assembles messages from frames.

    Incomplete messages that are being received are never dropped for a new one of another source: if there is no memory
    for it, it has to wait its turn, see `notices`.

    Args:
        max_nbytes_of: returns the most bytes that a message with this header may have; None: it is not expected.
        max_nbytes: of all incomplete messages together; a single one may be longer.
        refused: counts dropped frames by reason; None: a new counter.

    Attributes:
        refused: dropped frames by reason.
        problem: why the last frame must not have been sent; empty if nothing is wrong with it.
        held_nbytes: size of all incomplete messages.
    """

    def __init__(
        self,
        max_nbytes_of: Callable[[Header], int | None],
        max_nbytes: int = 1 << 30,
        refused: Counter[str] | None = None,
    ) -> None:
        self._max_nbytes_of, self.max_nbytes = max_nbytes_of, max_nbytes
        self.held_nbytes, self.problem = 0, ""
        self._partial: dict[int, OrderedDict[MessageKey, _PartialMessage]] = {}
        self._waiting: OrderedDict[MessageKey, int] = OrderedDict()  # for memory: their sizes
        self._granted: dict[MessageKey, int] = {}  # that memory is kept free for
        self._notices: list[MemoryNotice] = []
        self.refused = Counter[str]() if refused is None else refused

    def add(self, envelope: Envelope, now: float = 0.0) -> HubMessage | None:
        """Return the message that this envelope completes; None if it completes none. `now` is as for `notices`."""
        header = envelope.header
        fragment = header.meta.get("fragment", 0)
        total = header.nbytes if header.frames == 1 else header.total_nbytes
        limit = self._max_nbytes_of(header) if type(fragment) is int else None
        self.problem = ""
        if header.frames == 1 and limit is not None and total <= limit:
            return _message(header, fragment, envelope.payload)
        if limit is None:
            self.problem = "unexpected"
        elif total > limit:
            self.problem = "too long"
        elif header.frames > 1 and header.frames > total // MIN_FRAME_NBYTES + 1:
            self.problem = "too many frames"
        if self.problem:
            self.refused[self.problem] += 1
            return None
        key = header.source, header.kind, header.round, fragment
        partial = self._partial_of(header, key, total)
        if partial is None:
            self.refused["no memory"] += 1
            return None
        if header.frame not in partial.received:
            partial.buffer[header.offset : header.offset + header.nbytes] = envelope.payload
            partial.received.add(header.frame)
            partial.changed_at = now
        if len(partial.received) < partial.frames:
            return None
        self._drop(key)
        return _message(header, fragment, partial.buffer)

    def forget(self, source: int) -> None:
        """Drop the incomplete messages of a source, and its place in the queue for memory."""
        for key in list(self._partial.get(source, ())):
            self._drop(key)
        for keys in (self._waiting, self._granted):
            for key in [each for each in keys if each[0] == source]:
                del keys[key]

    def notices(self, now: float = 0.0) -> list[MemoryNotice]:
        """Return which messages have to wait for memory, and which need not any more, since the last call.

        Args:
            now: seconds of a monotonic clock; incomplete messages without a new frame for a minute make room.
        """
        if not self._waiting and not self._notices:
            return []
        while self._waiting:
            key, nbytes = next(iter(self._waiting.items()))
            if not self._has_room(nbytes):
                self._drop_stalled(now)
            if not self._has_room(nbytes):
                break
            del self._waiting[key]
            self._granted[key] = nbytes
            self._notices.append(MemoryNotice(key, ready=True))
        notices, self._notices = self._notices, []
        return notices

    def _drop_stalled(self, now: float) -> None:
        every = [(key, each) for messages in self._partial.values() for key, each in messages.items()]
        for key, partial in every:
            if now - partial.changed_at > _STALLED_SECONDS:
                self.refused["stalled"] += 1
                self._drop(key)

    def _has_room(self, nbytes: int) -> bool:
        used = self.held_nbytes + sum(self._granted.values())
        return used == 0 or used + nbytes <= self.max_nbytes

    def _partial_of(self, header: Header, key: MessageKey, total: int) -> _PartialMessage | None:
        held = self._partial.get(header.source, {})
        found = held.get(key)
        if found is not None and len(found.buffer) == total and found.frames == header.frames:
            return found
        if found is not None:
            self._drop(key)
        for other in [each for each in held if each[1] == key[1] and each[3] == key[3]]:
            self._drop(other)  # of another round: its sender has given it up
        granted = self._granted.pop(key, None) is not None
        if not granted and (self._waiting or not self._has_room(total)):
            if key not in self._waiting:
                self._waiting[key] = total
                self._notices.append(MemoryNotice(key, ready=False))
            return None
        made = _PartialMessage(memoryview(bytearray(total)), header.frames)
        self._partial.setdefault(header.source, OrderedDict())[key] = made
        self.held_nbytes += total
        return made

    def _drop(self, key: MessageKey) -> None:
        held = self._partial[key[0]]
        self.held_nbytes -= len(held.pop(key).buffer)
        if not held:
            del self._partial[key[0]]


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
