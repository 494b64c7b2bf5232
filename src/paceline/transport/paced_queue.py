"""Outgoing envelopes, queued per target and paced by token buckets (pure)."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable

from paceline.errors import UsageError
from paceline.transport.envelope import SHORT_NBYTES, Envelope
from paceline.transport.token_bucket import ENVELOPE_OVERHEAD_NBYTES, TokenBucket

__all__ = ["PacedQueue", "wire_nbytes"]

_RETRY_SECONDS = 0.002  # a transport without room has some again once a frame was sent
_VALUE_NBYTES = 9  # of a number in a header's meta

_Queues = OrderedDict[int, deque[Envelope]]


class PacedQueue:
    """Holds envelopes until they may be sent: short ones first, long ones in order per target, targets round-robin.

    Args:
        bucket: limits all targets together; None: unlimited.
        max_nbytes: capacity of the queue.

    Example:
        >>> from paceline.transport.header_layout import Header
        >>> queue, sent = PacedQueue(bucket=TokenBucket(rate=1000, burst=600, now=0.0)), []
        >>> queue.put(Envelope(Header("run", "beat", source=1, target=0, sequence=0)))
        True
        >>> queue.pump(0.0, lambda envelope: sent.append(envelope) is None), len(sent)
        (inf, 1)
    """

    def __init__(self, *, bucket: TokenBucket | None = None, max_nbytes: int = 64 << 20) -> None:
        self.bucket, self.max_nbytes = bucket, max_nbytes
        self.waiting_nbytes = 0
        self._bucket_of: dict[int, TokenBucket] = {}
        self._short: _Queues = OrderedDict()
        self._long: _Queues = OrderedDict()

    def limit(self, target: int, bucket: TokenBucket | None) -> None:
        """Set or remove the additional bucket of one target."""
        if bucket is None:
            self._bucket_of.pop(target, None)
        else:
            self._bucket_of[target] = bucket

    def put(self, envelope: Envelope) -> bool:
        """Add an envelope; return False if the queue is full.

        Raises:
            UsageError: the envelope alone exceeds the capacity.
        """
        nbytes = wire_nbytes(envelope)
        if nbytes > self.max_nbytes:
            raise UsageError(
                f"{envelope.header} counts as {nbytes} bytes, the queue holds at most {self.max_nbytes}",
                remedy="send shorter frames, or raise max_nbytes",
            )
        if self.waiting_nbytes + nbytes > self.max_nbytes:
            return False
        queues = self._short if len(memoryview(envelope.payload).cast("B")) <= SHORT_NBYTES else self._long
        queues.setdefault(envelope.header.target, deque()).append(envelope)
        self.waiting_nbytes += nbytes
        return True

    def waiting(self, target: int) -> int:
        """Return the number of envelopes queued for a target."""
        return sum(len(queues.get(target, ())) for queues in (self._short, self._long))

    def forget(self, target: int) -> int:
        """Drop the envelopes and the bucket of a target; return the number of dropped envelopes."""
        dropped = [*self._short.pop(target, ()), *self._long.pop(target, ())]
        self.waiting_nbytes -= sum(map(wire_nbytes, dropped))
        self._bucket_of.pop(target, None)
        return len(dropped)

    def pump(self, now: float, send: Callable[[Envelope], bool]) -> float:
        """Send everything that may be sent now.

        Args:
            now: time in seconds, on the buckets' clock.
            send: sends an envelope, or returns False: not now.

        Returns:
            seconds until it should be called again if nothing is added before; ``inf``: the queue is empty.
        """
        delays: dict[int, float] = {}
        wait = self._send_from(self._short, delays, now, send)
        if wait == 0.0:
            wait = self._send_from(self._long, delays, now, send)
        return min([*delays.values(), wait or math.inf])

    def _send_from(
        self, queues: _Queues, delays: dict[int, float], now: float, send: Callable[[Envelope], bool]
    ) -> float:
        """Send round-robin until nothing more can be sent.

        Args:
            queues: to send from; a target that was served moves to the end.
            delays: seconds that single targets have to wait; those found here are added.
            now: as for `pump`.
            send: as for `pump`.

        Returns:
            seconds until the common bucket allows more; 0 if it is not the limit.
        """
        progress = True
        while progress:
            progress = False
            for target in [each for each in queues if each not in delays]:
                nbytes, own = wire_nbytes(queues[target][0]), self._bucket_of.get(target)
                if own is not None and (wait := own.seconds_until(nbytes, now)) > 0:
                    delays[target] = wait
                elif self.bucket is not None and (wait := self.bucket.seconds_until(nbytes, now)) > 0:
                    return wait
                elif self._send_next(queues, target, nbytes, send):
                    progress = True
                    for bucket in (self.bucket, own):
                        if bucket is not None:
                            bucket.take(nbytes, now)
                else:
                    delays[target] = _RETRY_SECONDS
        return 0.0

    def _send_next(self, queues: _Queues, target: int, nbytes: int, send: Callable[[Envelope], bool]) -> bool:
        """Send a target's next envelope; one that makes `send` raise is dropped."""
        queue = queues.pop(target)
        envelope = queue.popleft()
        self.waiting_nbytes -= nbytes
        sent = False
        try:
            sent = send(envelope)
        finally:
            if queue:
                queues[target] = queue
        if not sent:
            queue.appendleft(envelope)
            queues[target] = queue
            self.waiting_nbytes += nbytes
        return sent


def wire_nbytes(envelope: Envelope) -> int:
    """Return the bytes that an envelope is charged for: payload, meta and overhead."""
    meta = sum(
        len(name) + (len(value) if isinstance(value, str) else _VALUE_NBYTES)
        for name, value in envelope.header.meta.items()
    )
    return memoryview(envelope.payload).nbytes + ENVELOPE_OVERHEAD_NBYTES + meta
