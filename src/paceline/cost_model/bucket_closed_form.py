"""DDP's overhead and the best number of buckets in closed form, for equal buckets (pure).

s bytes of gradients become ready evenly over a backward of T_b seconds and leave in n equal buckets; a call costs
o seconds and its bytes s/(w·n), and calls run one after another. What remains when backward has ended:

    the last bucket alone, if the network keeps up:     s/(w·n) + o
    all calls from the first bucket on, if it doesn't:  T_b/n + n·o + s/w − T_b

    overhead(n) = the larger of the two

The calls' end is the largest over k of (n − k calls of s/(w·n) + o, begun when bucket k is ready at k·T_b/n); that is
linear in k, so an end of the range is the largest. The first falls with n; the second is least at n = √(T_b/o). So the
best n is √(T_b/o) where the second is the larger one there, always if T_b ≤ s/w, and else where the two cross, at
n = (T_b − s/w)/o.

If backward takes as long as the calls (T_b = s/w + n·o), both are one: overhead(n) = s/(w·n) + n·o, with its least
value 2·√(s·o/w) at n = √(s/(w·o)), so the bucket is √(s·w·o) bytes (Stanford CS336, spring 2025, assignment 2). One
often reads √(s·o/w) for the bucket; that has the unit of seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import UsageError

__all__ = ["Buckets", "EqualBuckets"]


@dataclass(frozen=True)
class Buckets:
    """A number of equal buckets.

    Attributes:
        count: n; infinite where calls cost nothing.
        nbytes: of each.
        overhead: seconds that communication adds to backward.
    """

    count: float
    nbytes: float
    overhead: float


@dataclass(frozen=True)
class EqualBuckets:
    """Gradients that leave in equal buckets; see this module's text.

    Attributes:
        nbytes: s, of all gradients.
        bytes_per_second: w, of a large call's bytes.
        call_seconds: o, of each call.
        backward_seconds: T_b, of backward without communication.

    Raises:
        UsageError: a value is out of range.

    Example:
        >>> job = EqualBuckets(nbytes=1e9, bytes_per_second=1e9, call_seconds=0.01, backward_seconds=1.0)
        >>> job.best().count, round(job.best().overhead, 9)
        (10, 0.2)
        >>> job.best_balanced().nbytes
        100000000.0
    """

    nbytes: float
    bytes_per_second: float
    call_seconds: float
    backward_seconds: float

    def __post_init__(self) -> None:
        given = (self.nbytes, self.bytes_per_second, self.call_seconds, self.backward_seconds)
        finite = all(math.isfinite(value) for value in given)
        if not finite or min(given) < 0 or not self.nbytes > 0 or not self.bytes_per_second > 0:
            raise UsageError(
                f"{self.nbytes} bytes, {self.bytes_per_second} B/s, {self.call_seconds} s a call, a backward of "
                f"{self.backward_seconds} s",
                remedy="give bytes and a rate above 0, seconds of 0 or more",
            )

    @property
    def wire_seconds(self) -> float:
        """s/w: seconds that the bytes take."""
        return self.nbytes / self.bytes_per_second

    @property
    def compute_bound(self) -> bool:
        """Whether backward takes longer than the bytes."""
        return self.backward_seconds > self.wire_seconds

    def overhead(self, count: float) -> float:
        """Return the seconds that n = `count` buckets add to backward.

        Args:
            count: n, 1 or more.

        Raises:
            UsageError: fewer than one.
        """
        if not count >= 1:
            raise UsageError(f"{count} buckets", remedy="give 1 or more")
        calls = 0.0 if self.call_seconds == 0.0 else count * self.call_seconds
        last = self.wire_seconds / count + self.call_seconds
        queue = self.backward_seconds / count + calls + self.wire_seconds - self.backward_seconds
        return max(last, queue)

    def best(self) -> Buckets:
        """Return the whole number of buckets with the least overhead; of equally good ones the smallest number."""
        o, ahead = self.call_seconds, self.backward_seconds - self.wire_seconds
        if o == 0.0:
            return Buckets(math.inf, 0.0, max(0.0, -ahead))
        turns = (math.sqrt(self.backward_seconds / o), ahead / o)
        tried = {max(1, whole) for turn in turns for whole in (math.floor(turn), math.floor(turn) + 1)}
        count = min(sorted(tried), key=self.overhead)
        return Buckets(count, self.nbytes / count, self.overhead(count))

    def best_balanced(self) -> Buckets:
        """Return the best buckets if backward took as long as the calls: n = √(s/(w·o)), not a whole number.

        `overhead` is that of the balanced case, 2·√(s·o/w).
        """
        if self.call_seconds == 0.0:
            return Buckets(math.inf, 0.0, 0.0)
        count = math.sqrt(self.wire_seconds / self.call_seconds)
        nbytes = math.sqrt(self.nbytes * self.bytes_per_second * self.call_seconds)
        return Buckets(count, nbytes, 2 * math.sqrt(self.wire_seconds * self.call_seconds))
