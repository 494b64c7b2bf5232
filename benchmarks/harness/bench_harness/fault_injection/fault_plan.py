"""Random plan of faults (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from paceline._core.keyed_random import derive_key
from paceline.errors import UsageError

__all__ = ["Fault", "draw_faults"]

_KINDS = ("kill", "stop", "cut")
_QUIET = 0.12  # share of the time without faults, at the beginning and at the end
_MIN_SECONDS, _MAX_SECONDS = 1.0, 8.0


@dataclass(frozen=True)
class Fault:
    """A fault of one host.

    Attributes:
        at: seconds since the beginning.
        what: ``"kill"``: the worker is killed, and started again; ``"stop"``: it is stopped, and resumed; ``"cut"``:
            its link is cut, and mended; ``"hub"``: the hub is killed, and started again.
        host: 0: the hub's.
        seconds: until it is undone.
        rank: the one rank of the worker that is killed or stopped; None: all its processes.
    """

    at: float
    what: str
    host: int
    seconds: float
    rank: int | None = None


def draw_faults(
    seconds: float, workers: int, worker_faults: int, hub_kills: int, seed: int, ranks: int = 1
) -> list[Fault]:
    """Return random faults in order of time; a host has one at a time.

    Args:
        seconds: of the run.
        workers: on hosts 1 to `workers`; the hub is on host 0.
        worker_faults: number of faults of workers.
        hub_kills: number of kills of the hub.
        seed: of the random numbers.
        ranks: of each worker; of several, half of the kills and stops affect one.

    Raises:
        UsageError: too many for the time.
    """
    if seconds < 10 or (worker_faults + hub_kills) * 2 > seconds * workers:
        raise UsageError(
            f"{worker_faults} worker faults and {hub_kills} kills of the hub in {seconds:g} s",
            remedy="give at least 10 seconds, or fewer faults",
        )
    begin, duration = _QUIET * seconds, (1 - 2 * _QUIET) * seconds
    faults = [
        Fault(begin + duration * (number + 0.5) / hub_kills, "hub", 0, _uniform(seed, 9, number) * 4)
        for number in range(hub_kills)
    ]
    busy: dict[int, list[tuple[float, float]]] = {}
    for number in range(worker_faults):
        at = begin + duration * _uniform(seed, 1, number)
        length = _MIN_SECONDS + (_MAX_SECONDS - _MIN_SECONDS) * _uniform(seed, 2, number)
        what = _KINDS[int(3 * _uniform(seed, 3, number))]
        first = int(workers * _uniform(seed, 4, number))
        for turn in range(workers):
            host = 1 + (first + turn) % workers
            if all(at > end + 1 or at + length < start - 1 for start, end in busy.get(host, [])):
                busy.setdefault(host, []).append((at, at + length))
                one = ranks > 1 and what != "cut" and _uniform(seed, 5, number) < 0.5
                rank = int(ranks * _uniform(seed, 6, number)) if one else None
                faults.append(Fault(at, what, host, length, rank))
                break
    return sorted(faults, key=lambda each: each.at)


def _uniform(*key: int) -> float:
    return derive_key(*key) / 2**64
