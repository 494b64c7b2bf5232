"""How often to send, how late to take in and in how many bits, from what transfers and steps take (pure).

A worker's link should be busy for no more than a part of the time, and the centre be there when it is due:

    delay   d = ⌈(up + down) / step⌉
    every   k = ⌈(up + down) / (busy · step)⌉, and more than d

Times are measured as they are, so they hold what other workers and the reserved share do to them: when many workers
crowd the hub's link, all send more rarely. With int8 instead of int4 the update takes twice as long; it is taken where
k stays small all the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Choice", "choose", "fragments_for"]

_BUSY = 0.5
_MOST_EVERY = 500
_SMALL_EVERY = 4
_FRAGMENT_NUMEL = 32_000_000
_MOST_FRAGMENTS = 8


@dataclass(frozen=True)
class Choice:
    """What to do from now on: k, d, and how updates are packed."""

    every: int
    delay: int
    codec: str


def choose(step_seconds: float, up_seconds: float, down_seconds: float, codec: str) -> Choice:
    """Return the settings for what was measured.

    Args:
        step_seconds: of a local step. up_seconds: from sending an update to its acknowledgement.
        down_seconds: from asking for the centre to having it. codec: of the update that was measured.

    Example:
        >>> choose(0.1, up_seconds=0.15, down_seconds=0.4, codec="int4")
        Choice(every=11, delay=6, codec='int4')
        >>> choose(1.0, up_seconds=0.15, down_seconds=0.4, codec="int4")
        Choice(every=2, delay=1, codec='int8')
    """
    step = max(step_seconds, 1e-6)
    narrow = up_seconds / 2 if codec == "int8" else up_seconds
    wide = _cadence(step, 2 * narrow + down_seconds)
    if wide[0] <= _SMALL_EVERY:
        return Choice(*wide, "int8")
    return Choice(*_cadence(step, narrow + down_seconds), "int4")


def _cadence(step: float, seconds: float) -> tuple[int, int]:
    delay = min(_MOST_EVERY - 1, max(1, math.ceil(seconds / step)))
    every = min(_MOST_EVERY, max(delay + 1, math.ceil(seconds / (_BUSY * step))))
    return every, delay


def fragments_for(numel: int, layers: int) -> int:
    """Return in how many fragments to send a model; it depends on the model alone, since all workers must agree.

    Example:
        >>> fragments_for(3_000_000, 6), fragments_for(200_000_000, 24)
        (1, 7)
    """
    return max(1, min(_MOST_FRAGMENTS, layers, -(-numel // _FRAGMENT_NUMEL)))
