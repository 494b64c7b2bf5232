"""The collectives that are measured: what a size means, and how bus bandwidth follows from it (pure).

Definitions are those of nccl-tests (doc/PERFORMANCE.md and ``*GetBw`` in src/*.cu), n being the number of ranks::

    algbw = S / t        busbw = algbw · f

| operation      | S                                                     | f          |
|----------------|-------------------------------------------------------|------------|
| all-reduce     | a rank's buffer, reduced in place                     | 2(n−1)/n   |
| broadcast      | a rank's buffer                                       | 1          |
| send-recv      | what a rank sends to the next one, and receives       | 1          |
| all-gather     | the output: n parts, a rank giving one of them        | (n−1)/n    |
| reduce-scatter | the input: n parts, a rank keeping one of them        | (n−1)/n    |
| all-to-all     | the input: n parts, one for each rank                 | (n−1)/n    |

So S is always the larger one of a rank's two buffers; with parts that is count · size of an element · n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import unknown

__all__ = ["OPERATIONS", "Operation", "algbw", "busbw", "operation_of"]


@dataclass(frozen=True)
class Operation:
    """One collective.

    Attributes:
        name: as on the command line.
        factor: bus bandwidth ÷ algorithm bandwidth, for a number of ranks.
        parts: S is made of one part per rank.
        buffers: bytes of a rank's input and output together ÷ S, for a number of ranks.
        scratch: bytes that gloo or paceline allocate besides ÷ S, as measured (200 MB, 3 and 6 ranks), rounded up.
    """

    name: str
    factor: Callable[[int], float]
    parts: bool
    buffers: Callable[[int], float]
    scratch: float = 0.1

    def round(self, nbytes: int, ranks: int, itemsize: int) -> int:
        """Return the size of at most `nbytes` that whole elements and equal parts make up, at least one of each.

        Example:
            >>> operation_of("all-gather").round(1_000_000, 6, itemsize=4)
            999984
        """
        unit = itemsize * (ranks if self.parts else 1)
        return max(1, nbytes // unit) * unit


def _once(ranks: int) -> float:
    return 1.0


def _others(ranks: int) -> float:
    return (ranks - 1) / ranks


def _both_ways(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _whole_and_part(ranks: int) -> float:
    return 1 + 1 / ranks


def _two(ranks: int) -> float:
    return 2.0


OPERATIONS = {
    each.name: each
    for each in (
        Operation("all-reduce", _both_ways, parts=False, buffers=_once),
        Operation("reduce-scatter", _others, parts=True, buffers=_whole_and_part, scratch=1.2),
        Operation("all-gather", _others, parts=True, buffers=_whole_and_part, scratch=1.2),
        Operation("broadcast", _once, parts=False, buffers=_once),
        Operation("all-to-all", _others, parts=True, buffers=_two),
        Operation("send-recv", _once, parts=False, buffers=_two),
    )
}


def operation_of(name: str) -> Operation:
    """Return the operation of that name.

    Raises:
        UsageError: there is none; the nearest name is suggested.
    """
    if name not in OPERATIONS:
        raise unknown("operation", name, OPERATIONS)
    return OPERATIONS[name]


def algbw(nbytes: int, seconds: float) -> float:
    """Return the algorithm bandwidth S/t in bytes per second."""
    return nbytes / seconds


def busbw(operation: str, ranks: int, nbytes: int, seconds: float) -> float:
    """Return the bus bandwidth in bytes per second: what of S each rank's link must carry at least, per second.

    Example:
        >>> busbw("all-reduce", 4, 1_000_000, 0.001)
        1500000000.0
    """
    return algbw(nbytes, seconds) * operation_of(operation).factor(ranks)
