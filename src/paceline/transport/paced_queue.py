"""Outgoing messages, queued per target and paced by token buckets (pure).

A message is an iterator of envelopes, made one by one as they can be sent: however many messages wait, no more than one
envelope per target and length is held, and none is dropped for lack of room. What the messages themselves hold is for
the caller to bound.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

from paceline.transport.envelope import Envelope
from paceline.transport.token_bucket import ENVELOPE_OVERHEAD_NBYTES, TokenBucket

__all__ = ["PacedQueue", "wire_nbytes"]

_RETRY_SECONDS, _MAX_RETRY_SECONDS = 0.002, 0.064  # a peer without room is tried again, ever more rarely
_VALUE_NBYTES = 9  # of a number in a header's meta


class _Lane:
    """The messages to one target of one length: short or long.

    Attributes:
        head: next envelope; None if there is none.
        waiting: whether it is in a queue of lanes to be served, or delayed.
    """

    __slots__ = ("_current", "_messages", "bucket", "head", "retry_seconds", "short", "target", "waiting")

    def __init__(self, target: int, short: bool, bucket: TokenBucket | None) -> None:
        self.target, self.short, self.bucket = target, short, bucket
        self.head: Envelope | None = None
        self.waiting, self.retry_seconds = False, _RETRY_SECONDS
        self._messages: deque[Iterator[Envelope]] = deque()
        self._current: Iterator[Envelope] | None = None

    def add(self, message: Iterator[Envelope]) -> None:
        self._messages.append(message)
        if self.head is None:
            self.advance()

    def clear(self) -> None:
        self._messages.clear()
        self._current = self.head = None

    def advance(self) -> None:
        """Make the next envelope the head."""
        while True:
            if self._current is not None:
                self.head = next(self._current, None)
                if self.head is not None:
                    return
            if not self._messages:
                self._current = self.head = None
                return
            self._current = self._messages.popleft()


class PacedQueue:
    """Holds messages until they may be sent: short ones first, long ones in order per target, targets round-robin.

    A target whose transport has no room, or whose own bucket is empty, delays no other.

    Args:
        bucket: limits all targets together; None: unlimited.

    Example:
        >>> from paceline.transport.header_layout import Header
        >>> queue, sent = PacedQueue(bucket=TokenBucket(rate=1000, burst=600, now=0.0)), []
        >>> queue.add(0, iter([Envelope(Header("run", "beat", source=1, target=0, sequence=0))]), short=True)
        >>> queue.pump(0.0, lambda envelope: sent.append(envelope) is None), len(sent)
        (inf, 1)
    """

    def __init__(self, *, bucket: TokenBucket | None = None) -> None:
        self.bucket = bucket
        self._bucket_of: dict[int, TokenBucket] = {}
        self._lanes: dict[tuple[int, bool], _Lane] = {}
        self._short: deque[_Lane] = deque()  # to be served, in turn
        self._long: deque[_Lane] = deque()
        self._delayed: list[tuple[float, int, _Lane]] = []  # when to serve it again; a heap
        self._count = 0

    def limit(self, target: int, bucket: TokenBucket | None) -> None:
        """Set or remove the additional bucket of one target."""
        if bucket is None:
            self._bucket_of.pop(target, None)
        else:
            self._bucket_of[target] = bucket
        for short in (True, False):
            if lane := self._lanes.get((target, short)):
                lane.bucket = bucket
        self._delayed = [
            (0.0 if lane.target == target else at, count, lane) for at, count, lane in self._delayed
        ]
        heapify(self._delayed)

    def add(self, target: int, message: Iterator[Envelope], *, short: bool) -> None:
        """Add a message.

        Args:
            target: of its envelopes.
            message: its envelopes in order; the next is taken once the one before was sent.
            short: send it before all long ones.
        """
        lane = self._lanes.get((target, short))
        if lane is None:
            lane = self._lanes[target, short] = _Lane(target, short, self._bucket_of.get(target))
        lane.add(message)
        if not lane.waiting:
            lane.waiting = True
            (self._short if short else self._long).append(lane)

    def forget(self, target: int) -> None:
        """Drop the messages and the bucket of a target."""
        self._bucket_of.pop(target, None)
        for short in (True, False):
            lane = self._lanes.pop((target, short), None)
            if lane is not None:
                lane.clear()  # where it still waits it is passed over

    def pump(self, now: float, send: Callable[[Envelope], bool]) -> float:
        """Send everything that may be sent now.

        Args:
            now: time in seconds, on the buckets' clock.
            send: sends an envelope, or returns False: not now.

        Returns:
            seconds until it should be called again if nothing is added before; ``inf``: the queue is empty.
        """
        delayed = self._delayed
        if not delayed and not self._short and not self._long:
            return math.inf
        while delayed and delayed[0][0] <= now:
            lane = heappop(delayed)[2]
            (self._short if lane.short else self._long).append(lane)
        wait = self._serve(self._short, now, send) or self._serve(self._long, now, send)
        while delayed and delayed[0][2].head is None:
            heappop(delayed)[2].waiting = False
        return min(wait or math.inf, delayed[0][0] - now if delayed else math.inf)

    def _serve(self, lanes: deque[_Lane], now: float, send: Callable[[Envelope], bool]) -> float:
        """Serve lanes in turn until none can be served; return the seconds until the common bucket allows more.

        Returns 0 if the common bucket is not the limit.
        """
        common = self.bucket
        while lanes:
            lane = lanes[0]
            envelope, own = lane.head, lane.bucket
            if envelope is None:
                lanes.popleft().waiting = False
                continue
            nbytes = 0 if own is None and common is None else wire_nbytes(envelope)
            if own is not None and (wait := own.seconds_until(nbytes, now)) > 0:
                lanes.popleft()
                self._delay(lane, now + wait)
                continue
            if common is not None and (wait := common.seconds_until(nbytes, now)) > 0:
                return wait
            lanes.popleft()
            try:
                sent = send(envelope)
            except BaseException:  # it can't be sent at all, so it must not be tried forever
                self._next(lane, lanes)
                raise
            if sent:
                lane.retry_seconds = _RETRY_SECONDS
                for bucket in (common, own):
                    if bucket is not None:
                        bucket.take(nbytes, now)
                self._next(lane, lanes)
            else:
                self._delay(lane, now + lane.retry_seconds)
                lane.retry_seconds = min(2 * lane.retry_seconds, _MAX_RETRY_SECONDS)
        return 0.0

    def _next(self, lane: _Lane, lanes: deque[_Lane]) -> None:
        if lane.head is not None:  # not forgotten meanwhile
            lane.advance()
        lane.waiting = lane.head is not None
        if lane.waiting:
            lanes.append(lane)

    def _delay(self, lane: _Lane, until: float) -> None:
        self._count += 1
        heappush(self._delayed, (until, self._count, lane))


def wire_nbytes(envelope: Envelope) -> int:
    """Return the bytes that an envelope is charged for: payload, meta and overhead."""
    meta = sum(
        len(name) + (len(value) if isinstance(value, str) else _VALUE_NBYTES)
        for name, value in envelope.header.meta.items()
    )
    return memoryview(envelope.payload).nbytes + ENVELOPE_OVERHEAD_NBYTES + meta
