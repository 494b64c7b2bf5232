"""Settings of a worker chosen from measured times: k, d, the codec of updates, and the number of fragments.

A worker's link should be busy only part of the time, and the global parameters arrive when they are due:

    delay   d = ⌈(up + down) / step⌉
    every   k = ⌈(up + down) / (busy · step)⌉, and more than d

Times are used as measured, so they include the effect of other workers and of bandwidth limits: when many workers crowd
the hub's link, all send less often. With int8 instead of int4 an update takes twice as long; it is chosen where k stays
small even so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["AutoSettings", "auto_fragments", "choose_settings"]

_BUSY = 0.5
_MAX_EVERY = 500
_SMALL_EVERY = 4
_FRAGMENT_NUMEL, _MAX_FRAGMENTS = 32_000_000, 8
_LARGE_FRAGMENT_NUMEL = 1 << 29  # half of what can be sent together, since layers differ in size


@dataclass(frozen=True)
class AutoSettings:
    """k, d and the codec of updates."""

    every: int
    delay: int
    codec: str


def choose_settings(
    step_seconds: float, update_seconds: float, fetch_seconds: float, codec: str
) -> AutoSettings:
    """Return the settings for measured times.

    Args:
        step_seconds: of a local step.
        update_seconds: from sending an update to its acknowledgement.
        fetch_seconds: from requesting the global parameters to having them.
        codec: of the measured update.

    Example:
        >>> choose_settings(0.1, update_seconds=0.15, fetch_seconds=0.4, codec="int4")
        AutoSettings(every=11, delay=6, codec='int4')
        >>> choose_settings(1.0, update_seconds=0.15, fetch_seconds=0.4, codec="int4")
        AutoSettings(every=2, delay=1, codec='int8')
    """
    step = max(step_seconds, 1e-6)
    int4_seconds = update_seconds / 2 if codec == "int8" else update_seconds
    every, delay = _schedule(step, 2 * int4_seconds + fetch_seconds)
    if every <= _SMALL_EVERY:
        return AutoSettings(every, delay, "int8")
    return AutoSettings(*_schedule(step, int4_seconds + fetch_seconds), "int4")


def _schedule(step: float, seconds: float) -> tuple[int, int]:
    delay = min(_MAX_EVERY - 1, max(1, math.ceil(seconds / step)))
    every = min(_MAX_EVERY, max(delay + 1, math.ceil(seconds / (_BUSY * step))))
    return every, delay


def auto_fragments(numel: int, layers: int) -> int:
    """Return the number of fragments; it depends on the model alone, since all workers must agree.

    Example:
        >>> auto_fragments(3_000_000, 6), auto_fragments(200_000_000, 24)
        (1, 7)
    """
    wanted = max(min(_MAX_FRAGMENTS, -(-numel // _FRAGMENT_NUMEL)), -(-numel // _LARGE_FRAGMENT_NUMEL))
    return max(1, min(layers, wanted))
