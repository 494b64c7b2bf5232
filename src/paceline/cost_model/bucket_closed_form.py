"""Closed form of DDP's overhead and of the best number of buckets, for equal buckets.

s bytes of gradients become ready evenly over a backward of T_b seconds and leave in n equal buckets; a call costs o
seconds and its bytes s/(w·n), and calls run one after another. What remains when backward has ended:

    the last bucket alone, if the network keeps up:         s/(w·n) + o
    all calls from the first bucket on, if it does not:     T_b/n + n·o + s/w − T_b

    overhead(n) = the larger of the two

The calls' end is the largest over k of (n − k calls of s/(w·n) + o, begun when bucket k is ready at k·T_b/n). That is
linear in k, so one end of the range is the largest. The first term falls with n; the second is least at n = √(T_b/o).
So the best n is √(T_b/o) where the second is the larger one there, always if T_b ≤ s/w, and otherwise where the two
cross, at n = (T_b − s/w)/o.

If backward takes as long as the calls (T_b = s/w + n·o), both are equal: overhead(n) = s/(w·n) + n·o, with its least
value 2·√(s·o/w) at n = √(s/(w·o)), so the bucket is √(s·w·o) bytes (Stanford CS336, spring 2025, assignment 2).
√(s·o/w) for the bucket is a common mistake; its unit is seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.errors import UsageError

__all__ = ["BucketOptimum", "EqualBuckets"]


@dataclass(frozen=True)
class BucketOptimum:
    """A number of equal buckets.

    Attributes:
        count: n; infinite where calls cost nothing.
        nbytes: size of each.
        overhead: seconds that communication adds to backward.
    """

    count: float
    nbytes: float
    overhead: float


@dataclass(frozen=True)
class EqualBuckets:
    """Gradients that leave in equal buckets; see the module's docstring.

    Attributes:
        nbytes: s, of all gradients.
        bytes_per_second: w, of a large call.
        call_seconds: o, fixed cost of a call.
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
        values = (self.nbytes, self.bytes_per_second, self.call_seconds, self.backward_seconds)
        finite = all(math.isfinite(value) for value in values)
        if not finite or min(values) < 0 or not self.nbytes > 0 or not self.bytes_per_second > 0:
            raise UsageError(
                f"{self.nbytes} bytes, {self.bytes_per_second} B/s, {self.call_seconds} s per call, a backward of "
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
        """Return the seconds that n = `count` buckets, at least 1, add to backward.

        Raises:
            UsageError: there is less than one bucket.
        """
        if not count >= 1:
            raise UsageError(f"{count} buckets", remedy="give 1 or more")
        calls = 0.0 if self.call_seconds == 0.0 else count * self.call_seconds
        last = self.wire_seconds / count + self.call_seconds
        queue = self.backward_seconds / count + calls + self.wire_seconds - self.backward_seconds
        return max(last, queue)

    def best(self) -> BucketOptimum:
        """Return the whole number of buckets with the least overhead, the smallest of equally good ones."""
        o, ahead = self.call_seconds, self.backward_seconds - self.wire_seconds
        if o == 0.0:
            return BucketOptimum(math.inf, 0.0, max(0.0, -ahead))
        optima = (math.sqrt(self.backward_seconds / o), ahead / o)
        candidates = {max(1, whole) for n in optima for whole in (math.floor(n), math.floor(n) + 1)}
        count = min(sorted(candidates), key=self.overhead)
        return BucketOptimum(count, self.nbytes / count, self.overhead(count))

    def best_balanced(self) -> BucketOptimum:
        """Return the best buckets if backward took as long as the calls: n = √(s/(w·o)), not a whole number.

        `overhead` is that of the balanced case, 2·√(s·o/w).
        """
        if self.call_seconds == 0.0:
            return BucketOptimum(math.inf, 0.0, 0.0)
        count = math.sqrt(self.wire_seconds / self.call_seconds)
        nbytes = math.sqrt(self.nbytes * self.bytes_per_second * self.call_seconds)
        return BucketOptimum(count, nbytes, 2 * math.sqrt(self.wire_seconds * self.call_seconds))
