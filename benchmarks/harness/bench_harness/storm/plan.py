"""What goes wrong in a storm, and when (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from paceline._core.keyed_random import derive_key
from paceline.errors import UsageError

__all__ = ["MISHAPS", "Mishap", "drawn"]

MISHAPS = ("kill", "stop", "cut", "hub")
"""A worker is killed and comes back; is stopped for a while; has its link cut for a while; the hub is killed."""

_QUIET = 0.12  # share of the time at the beginning and at the end in which nothing happens
_SHORTEST, _LONGEST = 1.0, 8.0


@dataclass(frozen=True)
class Mishap:
    """One thing that goes wrong: when, what, on which host, for how many seconds."""

    at: float
    what: str
    host: int
    seconds: float


def drawn(seconds: float, workers: int, mishaps: int, hub_kills: int, seed: int) -> list[Mishap]:
    """Return mishaps in the order of their time, drawn at random; of one host one at a time.

    Args:
        seconds: of the storm. workers: on hosts 1 to `workers`; the hub is on host 0.
        mishaps: of workers. hub_kills: of the hub.

    Raises:
        UsageError: too many for the time.
    """
    if seconds < 10 or (mishaps + hub_kills) * 2 > seconds * workers:
        raise UsageError(
            f"{mishaps} mishaps and {hub_kills} kills of the hub in {seconds:g} s",
            remedy="give more seconds, 10 at least, or fewer mishaps",
        )
    begin, lasting = _QUIET * seconds, (1 - 2 * _QUIET) * seconds
    found = [
        Mishap(begin + lasting * (number + 0.5) / hub_kills, "hub", 0, _part(seed, 9, number) * 4)
        for number in range(hub_kills)
    ]
    busy: dict[int, list[tuple[float, float]]] = {}
    for number in range(mishaps):
        at = begin + lasting * _part(seed, 1, number)
        length = _SHORTEST + (_LONGEST - _SHORTEST) * _part(seed, 2, number)
        what = MISHAPS[int(3 * _part(seed, 3, number))]
        first = int(workers * _part(seed, 4, number))
        for turn in range(workers):
            host = 1 + (first + turn) % workers
            if all(at > end + 1 or at + length < start - 1 for start, end in busy.get(host, [])):
                busy.setdefault(host, []).append((at, at + length))
                found.append(Mishap(at, what, host, length))
                break
    return sorted(found, key=lambda each: each.at)


def _part(*key: int) -> float:
    return derive_key(*key) / 2**64
