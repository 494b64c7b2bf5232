"""From seconds of every rank to a row of the result: pure functions over numbers.

[Note: one time per iteration] A collective is over when its last rank is done, so the largest time of all ranks
stands for an iteration; median, 95th percentile, least and largest are taken over iterations. Bandwidth is S over the
median time, never a mean of rates: the mean of S/t_i exceeds S over the mean of t_i, as the fastest iterations count
most in it. The slowest rank is the one that was last most often; evenly spread lateness gives it a share of 1/n.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from paceline.bench.collectives.operations import algbw, busbw

__all__ = ["Key", "Row", "Summary", "percentile", "summarize"]

Key = tuple[str, str, int, int, str]
"""Backend, operation, ranks, bytes and dtype: what tells rows apart."""


@dataclass(frozen=True)
class Summary:
    """What the iterations of one backend at one case come to; times in seconds, `slowest_share` from 0 to 1."""

    iterations: int
    median_s: float
    p95_s: float
    min_s: float
    max_s: float
    slowest_rank: int
    slowest_share: float


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie, between neighbours in proportion.

    Example:
        >>> percentile([1.0, 2.0, 3.0], 0.75)
        2.5
    """
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def summarize(seconds: Sequence[Sequence[float]]) -> Summary:
    """Return the summary of ``seconds[iteration][rank]``; see [Note: one time per iteration].

    Example:
        >>> summarize([[1.0, 2.0], [4.0, 3.0], [5.0, 6.0]]).median_s
        4.0
    """
    slowest = [max(ranks) for ranks in seconds]
    counts = Counter(list(ranks).index(most) for ranks, most in zip(seconds, slowest, strict=True))
    last, times = min(counts.items(), key=lambda item: (-item[1], item[0]))
    return Summary(
        iterations=len(seconds),
        median_s=median(slowest),
        p95_s=percentile(slowest, 0.95),
        min_s=min(slowest),
        max_s=max(slowest),
        slowest_rank=last,
        slowest_share=times / len(seconds),
    )


@dataclass(frozen=True)
class Row:
    """One backend at one case.

    Attributes:
        backend, op, dtype: names.
        ranks: processes. nbytes: S, as `paceline.bench.collectives.operations` defines it.
        times: of its iterations.
        correct: whether every element was right on every rank, before and after the timed calls.
    """

    backend: str
    op: str
    ranks: int
    nbytes: int
    dtype: str
    times: Summary
    correct: bool

    @property
    def key(self) -> Key:
        """What tells the row from others."""
        return self.backend, self.op, self.ranks, self.nbytes, self.dtype

    @property
    def algbw(self) -> float:
        """Bytes per second: S over the median time."""
        return algbw(self.nbytes, self.times.median_s)

    @property
    def busbw(self) -> float:
        """Bytes per second that each rank's link must have carried at least."""
        return busbw(self.op, self.ranks, self.nbytes, self.times.median_s)

    def to_json(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {
            "backend": self.backend,
            "op": self.op,
            "ranks": self.ranks,
            "nbytes": self.nbytes,
            "dtype": self.dtype,
            **asdict(self.times),
            "algbw": self.algbw,
            "busbw": self.busbw,
            "correct": self.correct,
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Row:
        """Return the row that `to_json` wrote."""
        times = Summary(**{name: record[name] for name in Summary.__dataclass_fields__})
        own = {name: record[name] for name in ("backend", "op", "ranks", "nbytes", "dtype", "correct")}
        return cls(times=times, **own)
