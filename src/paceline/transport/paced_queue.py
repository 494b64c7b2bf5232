"""What waits to be sent: a queue for each target, and buckets that say when (pure)."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable

from paceline.errors import UsageError
from paceline.transport.envelope_check import SHORT_NBYTES
from paceline.transport.token_bucket import ENVELOPE_OVERHEAD_NBYTES, TokenBucket
from paceline.transport.transport_interface import Envelope

__all__ = ["PacedQueue", "wire_nbytes"]

_RETRY_SECONDS = 0.002  # a carrier that had no room has some once a frame has left
_VALUE_NBYTES = 9  # of a number in a header's meta

_Queues = OrderedDict[int, deque[Envelope]]


class PacedQueue:
    """Holds envelopes until they may leave: short ones first, long ones of a target in their order, targets in turn.

    Args:
        bucket: of all together; None: as fast as they are taken.
        most_nbytes: no more than so many wait.

    Example:
        >>> from paceline.transport.envelope_header import Header
        >>> waiting, gone = PacedQueue(bucket=TokenBucket(rate=1000, burst=600, now=0.0)), []
        >>> waiting.put(Envelope(Header("run", "beat", source=1, target=0, sequence=0)))
        True
        >>> waiting.pump(0.0, lambda envelope: gone.append(envelope) is None), len(gone)
        (inf, 1)
    """

    def __init__(self, *, bucket: TokenBucket | None = None, most_nbytes: int = 64 << 20) -> None:
        self.bucket, self.most_nbytes = bucket, most_nbytes
        self.waiting_nbytes = 0
        self._bucket_of: dict[int, TokenBucket] = {}
        self._short: _Queues = OrderedDict()
        self._long: _Queues = OrderedDict()

    def limit(self, target: int, bucket: TokenBucket | None) -> None:
        """Give a target a bucket of its own besides that of all, or take it away."""
        if bucket is None:
            self._bucket_of.pop(target, None)
        else:
            self._bucket_of[target] = bucket

    def put(self, envelope: Envelope) -> bool:
        """Take an envelope, or return False: too many bytes wait.

        Raises:
            UsageError: it alone is more than may wait.
        """
        nbytes = wire_nbytes(envelope)
        if nbytes > self.most_nbytes:
            raise UsageError(
                f"{envelope.header} counts as {nbytes} bytes, and no more than {self.most_nbytes} may wait",
                remedy="send shorter frames, or raise most_nbytes",
            )
        if self.waiting_nbytes + nbytes > self.most_nbytes:
            return False
        queues = self._short if len(memoryview(envelope.payload).cast("B")) <= SHORT_NBYTES else self._long
        queues.setdefault(envelope.header.target, deque()).append(envelope)
        self.waiting_nbytes += nbytes
        return True

    def waiting(self, target: int) -> int:
        """Return how many envelopes wait for a target."""
        return sum(len(queues.get(target, ())) for queues in (self._short, self._long))

    def forget(self, target: int) -> int:
        """Drop what waits for a target, and its bucket; return how many envelopes that were."""
        dropped = [*self._short.pop(target, ()), *self._long.pop(target, ())]
        self.waiting_nbytes -= sum(map(wire_nbytes, dropped))
        self._bucket_of.pop(target, None)
        return len(dropped)

    def pump(self, now: float, send: Callable[[Envelope], bool]) -> float:
        """Send all that may leave now.

        Args:
            now: time in seconds, of the buckets' clock.
            send: takes an envelope to its target, or returns False: not now.

        Returns:
            seconds until it wants to be called again, if nothing is put in before; ``inf``: nothing waits.
        """
        held: dict[int, float] = {}
        wait = self._serve(self._short, held, now, send)
        if wait == 0.0:
            wait = self._serve(self._long, held, now, send)
        waits = [*held.values(), wait or math.inf]
        return min(waits)

    def _serve(
        self, queues: _Queues, held: dict[int, float], now: float, send: Callable[[Envelope], bool]
    ) -> float:
        """Send in turn until all is gone or held, or the bucket of all is empty: return the wait for that, else 0.

        Args:
            queues: served; a target that was has its next turn last.
            held: targets that have to wait by themselves, and how long; those found here are added.
            now, send: as for `pump`.
        """
        moved = True
        while moved:
            moved = False
            for target in [each for each in queues if each not in held]:
                nbytes, own = wire_nbytes(queues[target][0]), self._bucket_of.get(target)
                if own is not None and (wait := own.wait(nbytes, now)) > 0:
                    held[target] = wait
                elif self.bucket is not None and (wait := self.bucket.wait(nbytes, now)) > 0:
                    return wait
                elif self._sent(queues, target, nbytes, send):
                    moved = True
                    for bucket in (self.bucket, own):
                        if bucket is not None:
                            bucket.take(nbytes, now)
                else:
                    held[target] = _RETRY_SECONDS
        return 0.0

    def _sent(self, queues: _Queues, target: int, nbytes: int, send: Callable[[Envelope], bool]) -> bool:
        """Send a target's next envelope; one that can't be sent at all raises, and does not come up again."""
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
    """Return what an envelope counts as where bytes are counted."""
    meta = envelope.header.meta
    told = sum(
        len(name) + (len(each) if isinstance(each, str) else _VALUE_NBYTES) for name, each in meta.items()
    )
    return memoryview(envelope.payload).nbytes + ENVELOPE_OVERHEAD_NBYTES + told
