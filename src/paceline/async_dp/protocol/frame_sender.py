"""Messages on their way out: cut into frames when they may leave, within a share of the network."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paceline.async_dp.protocol.hub_messages import HubMessage
from paceline.async_dp.protocol.message_assembly import FRAME_NBYTES, split_message
from paceline.transport.envelope import Envelope
from paceline.transport.paced_queue import PacedQueue
from paceline.transport.token_bucket import make_token_bucket, max_frame_nbytes
from paceline.transport.transport_interface import Exchange

__all__ = ["FrameSender"]

_AHEAD = 4  # frames of a target that wait to leave; the rest of a message is not cut yet


@dataclass
class _Leaving:
    """A message that is being cut."""

    message: HubMessage
    frames: Iterator[Envelope]
    last: int = -1


class FrameSender:
    """Sends messages through an exchange; used by one thread.

    Args:
        exchange: carries them.
        run: returns the name of the run. session: returns the sender's session.
        rate: bytes per second on the wire that may leave in all, None: any.
        left: called with every message that has left whole.
    """

    def __init__(
        self,
        exchange: Exchange,
        run: Callable[[], str],
        session: Callable[[], int] = lambda: 0,
        *,
        rate: float | None = None,
        left: Callable[[HubMessage], object] = lambda _: None,
    ) -> None:
        self._exchange, self._run, self._session, self._left = exchange, run, session, left
        self._paced = PacedQueue()
        self._rate, self._rate_of = None, dict[int, float]()
        self._queues: dict[int, deque[HubMessage]] = {}
        self._leaving: dict[int, _Leaving] = {}
        self._ends: dict[int, HubMessage] = {}  # by the sequence number of its last frame
        self._sequence = 0
        self.limit(rate, 0.0)

    def limit(self, rate: float | None, now: float, target: int | None = None) -> None:
        """Keep to a rate from now on: in all, or to one target."""
        if target is None:
            if rate != self._rate:
                self._rate = rate
                self._paced.bucket = None if rate is None else make_token_bucket(rate, now)
        elif rate is None:
            self._rate_of.pop(target, None)
            self._paced.limit(target, None)
        elif self._rate_of.get(target) != rate:
            self._rate_of[target] = rate
            self._paced.limit(target, make_token_bucket(rate, now))

    def put(self, message: HubMessage) -> None:
        """Have a message leave when it may."""
        self._queues.setdefault(message.target, deque()).append(message)

    @property
    def targets(self) -> set[int]:
        """Those for whom something waits."""
        return self._queues.keys() | self._leaving.keys()

    def forget(self, target: int) -> None:
        """Drop what waits for a target."""
        self._queues.pop(target, None)
        self._leaving.pop(target, None)
        self._paced.forget(target)
        self._rate_of.pop(target, None)
        self._ends = {end: message for end, message in self._ends.items() if message.target != target}

    def pump(self, now: float) -> float:
        """Send what may leave; return the seconds until there is more to do, infinity if nothing waits."""
        while True:
            fed = self._feed()
            wait = self._paced.pump(now, self._send)
            if not fed:
                return wait

    def _feed(self) -> bool:
        """Cut some frames; return whether any was."""
        fed = False
        for target in list(self._queues.keys() | self._leaving.keys()):
            while self._paced.waiting(target) < _AHEAD and self._cut_next(target):
                fed = True
        return fed

    def _cut_next(self, target: int) -> bool:
        """Have the next frame for a target wait to leave; return whether there was one."""
        leaving = self._leaving.get(target)
        if leaving is None:
            queue = self._queues.get(target)
            if not queue:
                self._queues.pop(target, None)
                return False
            message = queue.popleft()
            frames = split_message(
                message, self._run(), self._sequence, self._session(), self._frame_nbytes(target)
            )
            leaving = self._leaving[target] = _Leaving(message, frames)
        envelope = next(leaving.frames)
        header = envelope.header
        self._sequence = max(self._sequence, header.sequence + 1)
        if header.frame == header.frames - 1:
            del self._leaving[target]
            self._ends[header.sequence] = leaving.message
        else:
            self._sequence = max(self._sequence, header.sequence + header.frames - header.frame)
        self._paced.put(envelope)
        return True

    def _frame_nbytes(self, target: int) -> int:
        rates = [each for each in (self._rate, self._rate_of.get(target)) if each is not None]
        return max_frame_nbytes(min(rates)) if rates else FRAME_NBYTES

    def _send(self, envelope: Envelope) -> bool:
        if not self._exchange.send(envelope):
            return False
        message = self._ends.pop(envelope.header.sequence, None)
        if message is not None:
            self._left(message)
        return True
