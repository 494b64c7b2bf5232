"""Sends messages frame by frame, within a share of the bandwidth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from paceline.async_dp.protocol.hub_messages import HubMessage
from paceline.async_dp.protocol.message_assembly import FRAME_NBYTES, split_message, whole_message
from paceline.transport.envelope import SHORT_NBYTES, Envelope
from paceline.transport.paced_queue import PacedQueue
from paceline.transport.token_bucket import make_token_bucket, max_frame_nbytes
from paceline.transport.transport_interface import Exchange

__all__ = ["FrameSender"]


class FrameSender:
    """Sends messages through an exchange; used by one thread.

    Every message is either sent whole or dropped by `forget`: a frame that the exchange has no room for is offered
    again, and frames are made only as they can be sent.

    Args:
        exchange: carries the frames.
        run: returns the name of the run.
        session_id: returns the sender's session.
        rate: most bytes per second on the wire in total; None: no limit.
        on_sent: called with every message whose last frame was sent.
        frame_nbytes: most bytes per frame; fewer where the rate is limited.
    """

    def __init__(
        self,
        exchange: Exchange,
        run: Callable[[], str],
        session_id: Callable[[], int] = lambda: 0,
        *,
        rate: float | None = None,
        on_sent: Callable[[HubMessage], object] = lambda _: None,
        frame_nbytes: int = FRAME_NBYTES,
    ) -> None:
        self._exchange, self._run, self._session_id, self._on_sent = exchange, run, session_id, on_sent
        self._frame_limit = frame_nbytes
        self._paced = PacedQueue()
        self._rate, self._target_rates = None, dict[int, float]()
        self._waiting = Counter[int]()  # messages by target
        self._last_frames: dict[int, HubMessage] = {}  # by sequence number
        self._unmade: dict[int, HubMessage] = {}  # with frames that were not made yet, by identity
        self._sequence = 0
        self.set_rate(rate, 0.0)

    def set_rate(self, rate: float | None, now: float, target: int | None = None) -> None:
        """Limit what is sent, in total or to one target."""
        if target is None:
            if rate != self._rate:
                self._rate = rate
                self._paced.bucket = None if rate is None else make_token_bucket(rate, now)
        elif rate is None:
            if self._target_rates.pop(target, None) is not None:
                self._paced.limit(target, None)
        elif self._target_rates.get(target) != rate:
            self._target_rates[target] = rate
            self._paced.limit(target, make_token_bucket(rate, now))

    def enqueue(self, message: HubMessage) -> None:
        """Send a message at once if nothing is in its way, else queue it; its payload must not change until then."""
        if len(message.payload) <= self._frame_limit and self._send_at_once(message):
            return
        self._waiting[message.target] += 1
        self._unmade[id(message)] = message
        short = len(message.payload) <= SHORT_NBYTES
        self._paced.add(message.target, self._frames(message), short=short)

    @property
    def targets(self) -> set[int]:
        """Targets with messages whose last frame was not sent."""
        return set(self._waiting)

    @property
    def queued(self) -> int:
        """Number of messages whose last frame was not sent."""
        return self._waiting.total()

    def forget(self, target: int) -> None:
        """Drop the messages to a target, and its rate."""
        self._paced.forget(target)
        self._target_rates.pop(target, None)
        if self._waiting.pop(target, 0):
            for held in (self._last_frames, self._unmade):
                for number in [each for each, message in held.items() if message.target == target]:
                    del held[number]

    def cancel(self, kind: str, round: int, fragment: int) -> None:
        """Leave out the frames of such messages that were not made yet."""
        for number, message in list(self._unmade.items()):
            if (message.kind, message.round, message.fragment) == (kind, round, fragment):
                del self._unmade[number]

    def pump(self, now: float) -> float:
        """Send what may be sent; return the seconds until more may be, infinity if nothing is queued."""
        return self._paced.pump(now, self._send)

    def _send_at_once(self, message: HubMessage) -> bool:
        target = message.target
        if self._rate is not None or target in self._waiting or target in self._target_rates:
            return False
        envelope = whole_message(message, self._run(), self._sequence, self._session_id())
        if not self._exchange.send(envelope):
            return False
        self._sequence += 1
        self._on_sent(message)
        return True

    def _frames(self, message: HubMessage) -> Iterator[Envelope]:
        """Make the frames of a message, numbered when the first is due."""
        rates = [each for each in (self._rate, self._target_rates.get(message.target)) if each is not None]
        nbytes = min(self._frame_limit, max_frame_nbytes(min(rates))) if rates else self._frame_limit
        first = self._sequence
        for envelope in split_message(message, self._run(), first, self._session_id(), nbytes):
            header = envelope.header
            if id(message) not in self._unmade:  # cancelled
                self._count_done(message.target)
                return
            if header.frame == 0:
                self._sequence = first + header.frames
            if header.frame == header.frames - 1:
                self._last_frames[header.sequence] = message
                del self._unmade[id(message)]
            yield envelope

    def _send(self, envelope: Envelope) -> bool:
        if not self._exchange.send(envelope):
            return False
        message = self._last_frames.pop(envelope.header.sequence, None)
        if message is not None:
            self._count_done(message.target)
            self._on_sent(message)
        return True

    def _count_done(self, target: int) -> None:
        self._waiting[target] -= 1
        if not self._waiting[target]:
            del self._waiting[target]
