"""Sends messages frame by frame, within a share of the bandwidth."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from paceline.async_dp.protocol.hub_messages import HubMessage
from paceline.async_dp.protocol.message_assembly import FRAME_NBYTES, split_message
from paceline.transport.envelope import Envelope
from paceline.transport.paced_queue import PacedQueue
from paceline.transport.token_bucket import make_token_bucket, max_frame_nbytes
from paceline.transport.transport_interface import Exchange

__all__ = ["FrameSender"]

_MAX_QUEUED_FRAMES = 4  # per target; the rest of a message is split later


class FrameSender:
    """Sends messages through an exchange; used by one thread.

    Args:
        exchange: carries the frames.
        run: returns the name of the run.
        session_id: returns the sender's session.
        rate: most bytes per second on the wire in total; None: no limit.
        on_sent: called with every message whose last frame was sent.
    """

    def __init__(
        self,
        exchange: Exchange,
        run: Callable[[], str],
        session_id: Callable[[], int] = lambda: 0,
        *,
        rate: float | None = None,
        on_sent: Callable[[HubMessage], object] = lambda _: None,
    ) -> None:
        self._exchange, self._run, self._session_id, self._on_sent = exchange, run, session_id, on_sent
        self._paced = PacedQueue()
        self._rate, self._target_rates = None, dict[int, float]()
        self._queues: dict[int, deque[HubMessage]] = {}
        self._current: dict[int, tuple[HubMessage, Iterator[Envelope]]] = {}  # partly sent
        self._last_frames: dict[int, HubMessage] = {}  # by sequence number
        self._sequence = 0
        self.set_rate(rate, 0.0)

    def set_rate(self, rate: float | None, now: float, target: int | None = None) -> None:
        """Limit what is sent, in total or to one target."""
        if target is None:
            if rate != self._rate:
                self._rate = rate
                self._paced.bucket = None if rate is None else make_token_bucket(rate, now)
        elif rate is None:
            self._target_rates.pop(target, None)
            self._paced.limit(target, None)
        elif self._target_rates.get(target) != rate:
            self._target_rates[target] = rate
            self._paced.limit(target, make_token_bucket(rate, now))

    def enqueue(self, message: HubMessage) -> None:
        """Queue a message."""
        self._queues.setdefault(message.target, deque()).append(message)

    @property
    def targets(self) -> set[int]:
        """Targets with queued messages."""
        return self._queues.keys() | self._current.keys()

    @property
    def queued(self) -> int:
        """Number of messages whose last frame was not sent."""
        waiting = sum(map(len, self._queues.values()))
        return waiting + len(self._current) + len(self._last_frames)

    def forget(self, target: int) -> None:
        """Drop the messages to a target, and its rate."""
        self._queues.pop(target, None)
        self._current.pop(target, None)
        self._paced.forget(target)
        self._target_rates.pop(target, None)
        self._last_frames = {
            sequence: message for sequence, message in self._last_frames.items() if message.target != target
        }

    def pump(self, now: float) -> float:
        """Send what may be sent; return the seconds until more may be, infinity if nothing is queued."""
        while True:
            queued = False
            for target in list(self.targets):
                while self._paced.waiting(target) < _MAX_QUEUED_FRAMES and self._queue_frame(target):
                    queued = True
            wait = self._paced.pump(now, self._send)
            if not queued:
                return wait

    def _queue_frame(self, target: int) -> bool:
        """Queue the next frame to a target; return whether there was one."""
        current = self._current.get(target)
        if current is None:
            queue = self._queues.get(target)
            if not queue:
                self._queues.pop(target, None)
                return False
            message = queue.popleft()
            nbytes = self._frame_nbytes(target)
            frames = split_message(message, self._run(), self._sequence, self._session_id(), nbytes)
            current = self._current[target] = message, frames
        message, frames = current
        envelope = next(frames)
        header = envelope.header
        self._sequence = max(self._sequence, header.sequence + header.frames - header.frame)
        if header.frame == header.frames - 1:
            del self._current[target]
            self._last_frames[header.sequence] = message
        self._paced.put(envelope)
        return True

    def _frame_nbytes(self, target: int) -> int:
        rates = [each for each in (self._rate, self._target_rates.get(target)) if each is not None]
        return max_frame_nbytes(min(rates)) if rates else FRAME_NBYTES

    def _send(self, envelope: Envelope) -> bool:
        if not self._exchange.send(envelope):
            return False
        message = self._last_frames.pop(envelope.header.sequence, None)
        if message is not None:
            self._on_sent(message)
        return True
