"""Benchmarked collectives: the meaning of a size, and bus bandwidth.

Definitions are those of nccl-tests (doc/PERFORMANCE.md and ``*GetBw`` in src/*.cu), n being the number of ranks::

    algbw = S / t        busbw = algbw · f

| operation      | S                                                     | f          |
|----------------|-------------------------------------------------------|------------|
| all-reduce     | a rank's buffer, reduced in place                     | 2(n−1)/n   |
| broadcast      | a rank's buffer                                       | 1          |
| send-recv      | bytes that a rank sends to the next one, and receives | 1          |
| all-gather     | the output: n parts, one from each rank               | (n−1)/n    |
| reduce-scatter | the input: n parts, one for each rank                 | (n−1)/n    |
| all-to-all     | the input: n parts, one for each rank                 | (n−1)/n    |

So S is the larger of a rank's two buffers; with parts it is count · size of an element · n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import unknown

__all__ = ["OPERATIONS", "CollectiveOperation", "algbw", "busbw", "find_operation"]


@dataclass(frozen=True)
class CollectiveOperation:
    """One collective.

    Attributes:
        name: as on the command line.
        factor: bus bandwidth ÷ algorithm bandwidth, by the number of ranks.
        parts: S consists of one part per rank.
        buffers: bytes of a rank's input and output together ÷ S, by the number of ranks.
        scratch: bytes that gloo or paceline allocate in addition ÷ S, as measured (200 MB, 3 and 6 ranks), rounded up.
    """

    name: str
    factor: Callable[[int], float]
    parts: bool
    buffers: Callable[[int], float]
    scratch: float = 0.1

    def round(self, nbytes: int, ranks: int, itemsize: int) -> int:
        """Return the largest size up to `nbytes` of whole elements and equal parts, at least one element each.

        Example:
            >>> find_operation("all-gather").round(1_000_000, 6, itemsize=4)
            999984
        """
        unit = itemsize * (ranks if self.parts else 1)
        return max(1, nbytes // unit) * unit


def _one(ranks: int) -> float:
    return 1.0


def _two(ranks: int) -> float:
    return 2.0


def _all_but_one(ranks: int) -> float:
    return (ranks - 1) / ranks


def _one_and_a_part(ranks: int) -> float:
    return 1 + 1 / ranks


OPERATIONS = {
    each.name: each
    for each in (
        CollectiveOperation("all-reduce", lambda n: 2 * (n - 1) / n, parts=False, buffers=_one),
        CollectiveOperation("reduce-scatter", _all_but_one, parts=True, buffers=_one_and_a_part, scratch=1.2),
        CollectiveOperation("all-gather", _all_but_one, parts=True, buffers=_one_and_a_part, scratch=1.2),
        CollectiveOperation("broadcast", _one, parts=False, buffers=_one),
        CollectiveOperation("all-to-all", _all_but_one, parts=True, buffers=_two),
        CollectiveOperation("send-recv", _one, parts=False, buffers=_two),
    )
}


def find_operation(name: str) -> CollectiveOperation:
    """Return the operation of that name.

    Raises:
        UsageError: the name is unknown; the nearest one is suggested.
    """
    if name not in OPERATIONS:
        raise unknown("operation", name, OPERATIONS)
    return OPERATIONS[name]


def algbw(nbytes: int, seconds: float) -> float:
    """Return the algorithm bandwidth S/t in bytes per second."""
    return nbytes / seconds


def busbw(operation: str, ranks: int, nbytes: int, seconds: float) -> float:
    """Return the bus bandwidth: the bytes per second that each rank's link must carry at least.

    Example:
        >>> busbw("all-reduce", 4, 1_000_000, 0.001)
        1500000000.0
    """
    return algbw(nbytes, seconds) * find_operation(operation).factor(ranks)
