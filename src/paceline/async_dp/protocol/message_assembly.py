"""Long messages as frames, each in an envelope, and frames as messages again (pure).

What comes may be late, repeated, out of order or of somebody who means ill: nothing is kept for a message that is not
expected, and of one source never more than a few unfinished messages. A frame that came damaged is missing until its
message is sent once more; the frames that are there need not come again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.async_dp.protocol.hub_messages import HubMessage
from paceline.transport.envelope import Bytes, Envelope
from paceline.transport.envelope_header import Header
from paceline.transport.message_frames import split_frames

__all__ = ["FRAME_NBYTES", "MessageAssembler", "ReplayWindow", "split_message"]

FRAME_NBYTES = 1 << 20
"""Of a frame, unless a share of the network is to be kept: then `paced_frame_nbytes`."""

_LEAST_FRAME_NBYTES = 1 << 9  # what is paced slowest still has frames of twice that


def split_message(
    message: HubMessage, run: str, sequence: int, session: int = 0, frame_nbytes: int = FRAME_NBYTES
) -> Iterator[Envelope]:
    """Return the envelopes of a message, one after the other.

    Args:
        message: whose payload must not change until they have been sent.
        run: that it belongs to. sequence: number of its first envelope; the others follow.
        session: of the sender; whoever starts anew has a new one.
        frame_nbytes: most bytes of a frame.
    """
    payload = memoryview(message.payload).cast("B") if message.payload else b""
    nbytes = len(payload)
    meta = {**message.meta, "fragment": message.fragment, "session": session}
    if nbytes > frame_nbytes:
        return _frames(message, run, sequence, meta, payload, frame_nbytes)
    header = Header(
        run, message.kind, message.source, message.target, sequence, message.round,
        0, 1, 0, nbytes, message.dtype, (), nbytes, 0, meta,
    )  # fmt: skip
    return iter((Envelope(header, payload),))


def _frames(
    message: HubMessage, run: str, sequence: int, meta: Mapping[str, Any], payload: Bytes, frame_nbytes: int
) -> Iterator[Envelope]:
    """Yield the envelopes of a message that does not fit into one."""
    frames = split_frames(len(payload), frame_nbytes)
    for frame in frames:
        header = Header(
            run, message.kind, message.source, message.target, sequence + frame.index, message.round,
            frame.index, len(frames), frame.offset, len(payload), message.dtype, (), frame.nbytes, 0, meta,
        )  # fmt: skip
        yield Envelope(header, payload[frame.offset : frame.offset + frame.nbytes])


@dataclass
class _Unfinished:
    """A message of which frames are missing."""

    place: memoryview
    frames: int
    came: set[int] = field(default_factory=set)


class MessageAssembler:
    """Puts frames together.

    Args:
        limit: returns how many bytes a message with this header may have, None if it is not expected at all.
        unfinished: how many messages of one source may be incomplete at a time; the oldest is given up for a new one.
        most_nbytes: that all unfinished messages may take together; above that the oldest are given up.
        refused: where frames that are dropped are counted by reason; None: in a counter of its own.

    Attributes:
        refused: frames that were dropped, by reason.
        held_nbytes: that unfinished messages take.
    """

    def __init__(
        self,
        limit: Callable[[Header], int | None],
        unfinished: int = 8,
        most_nbytes: int = 1 << 30,
        refused: Counter[str] | None = None,
    ) -> None:
        self._limit, self._most, self.most_nbytes = limit, unfinished, most_nbytes
        self.held_nbytes = 0
        self._partial: OrderedDict[int, OrderedDict[tuple[str, int, int], _Unfinished]] = OrderedDict()
        self.refused = Counter[str]() if refused is None else refused

    def take(self, envelope: Envelope) -> HubMessage | None:
        """Return the message that this envelope completes, None if it completes none."""
        header = envelope.header
        fragment = header.meta.get("fragment", 0)
        total = header.nbytes if header.frames == 1 else header.total_nbytes
        most = self._limit(header) if type(fragment) is int else None
        if most is None or total > most:
            self.refused["unexpected" if most is None else "too long"] += 1
            return None
        if header.frames == 1:
            return _message(envelope, fragment, envelope.payload)
        if header.frames > total // _LEAST_FRAME_NBYTES + 1:
            self.refused["too many frames"] += 1
            return None
        key = header.kind, header.round, fragment
        found = self._unfinished(header, key, total)
        if header.frame not in found.came:
            found.place[header.offset : header.offset + header.nbytes] = envelope.payload
            found.came.add(header.frame)
        if len(found.came) < found.frames:
            return None
        self._drop(header.source, key)
        return _message(envelope, fragment, found.place)

    def forget(self, source: int) -> None:
        """Give up what of a source is not complete."""
        for key in list(self._partial.get(source, ())):
            self._drop(source, key)

    def _unfinished(self, header: Header, key: tuple[str, int, int], total: int) -> _Unfinished:
        """Return where frames of a message go, which may be a new place."""
        partial = self._partial.setdefault(header.source, OrderedDict())
        found = partial.get(key)
        if found is not None and len(found.place) == total and found.frames == header.frames:
            return found
        if found is not None:
            self._drop(header.source, key)
        while len(partial) >= self._most:
            self._drop(header.source, next(iter(partial)))
        while self.held_nbytes + total > self.most_nbytes and any(self._partial.values()):
            source = next(each for each, held in self._partial.items() if held)
            self._drop(source, next(iter(self._partial[source])))
        partial = self._partial.setdefault(header.source, OrderedDict())
        found = partial[key] = _Unfinished(memoryview(bytearray(total)), header.frames)
        self.held_nbytes += total
        return found

    def _drop(self, source: int, key: tuple[str, int, int]) -> None:
        partial = self._partial[source]
        self.held_nbytes -= len(partial.pop(key).place)
        if not partial:
            del self._partial[source]


def _message(envelope: Envelope, fragment: int, payload: Bytes) -> HubMessage:
    header = envelope.header
    return HubMessage(
        header.kind, header.source, header.target, header.round, fragment, header.meta, payload, header.dtype
    )


class ReplayWindow:
    """Which sequence numbers of a source came: those far behind the highest count as come.

    Source: the anti-replay window of RFC 4303, section 3.4.3.

    Example:
        >>> window = ReplayWindow()
        >>> window.admit(5), window.admit(4), window.admit(5)
        (True, True, False)
    """

    SIZE = 4096
    _ALL = (1 << SIZE) - 1

    def __init__(self) -> None:
        self._highest, self._bits = -1, self._ALL  # bit i: number highest − i came

    def admit(self, sequence: int) -> bool:
        """Note a number; return whether it is new."""
        ahead = sequence - self._highest
        if ahead == 1 and self._bits == self._ALL:  # nothing is missing: no bits to move
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
