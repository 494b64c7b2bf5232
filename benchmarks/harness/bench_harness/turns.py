"""Times of runs that take turns in the same processes, and their ratios with a bootstrap interval.

See [Note: turns] in `paceline.tools.bench.turn_statistics`.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from paceline.tools.bench.turn_statistics import turn_order

__all__ = ["InterleavedTimes", "Ratio", "alternating", "ratio_of", "ratios_to", "seconds_of", "take_turns"]

T = TypeVar("T")

_RESAMPLES = 2000


def seconds_of(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return how long a call takes by `clock`."""
    started = clock()
    call()
    return clock() - started


def take_turns(
    turn_of: Mapping[str, Callable[[], T]],
    rounds: int,
    tick: Callable[[], object] = lambda: None,
    *,
    warm_up: int = 1,
    order: Callable[[int, int], Sequence[int]] = turn_order,
) -> dict[str, list[T]]:
    """Return what each turn of each run returned, by run.

    All runs take one turn a round; garbage is collected between rounds only.

    Args:
        turn_of: a turn of each run; returns its seconds, say.
        rounds: that count. warm_up: rounds before them.
        tick: called after each round.
        order: returns the order of the runs from their count and the number of the round.
    """
    names = list(turn_of)
    found: dict[str, list[T]] = {name: [] for name in names}
    gc.disable()
    try:
        for number in range(-warm_up, rounds):
            gc.collect()
            for index in order(len(names), number + warm_up):
                result = turn_of[names[index]]()
                if number >= 0:
                    found[names[index]].append(result)
            tick()
    finally:
        gc.enable()
    return found


def alternating(count: int, turn: int) -> Sequence[int]:
    """Return the order of runs for `take_turns`: as declared, and backwards in every second round."""
    return range(count)[:: -1 if turn % 2 else 1]


@dataclass(frozen=True)
class Ratio:
    """Ratio of two times: `median` over rounds, and the ends `low` and `high` of its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return ``"6.99 (6.51 to 7.67)"``."""
        return f"{self:.2f}"

    def __format__(self, spec: str) -> str:
        """Return the ratio and its interval, each number in the format `spec`; by default ``.2f``."""
        return "{0:{3}} ({1:{3}} to {2:{3}})".format(self.median, self.low, self.high, spec or ".2f")


def ratio_of(own: Sequence[float], other: Sequence[float]) -> Ratio:
    """Return own ÷ other over the same rounds; deterministic.

    Args:
        own: one value per round.
        other: values of the same rounds, above 0.

    Raises:
        ValueError: no rounds, or different numbers of them.

    Example:
        >>> ratio_of([8.0, 9.0, 8.0], [4.0, 4.5, 4.0])
        Ratio(median=2.0, low=2.0, high=2.0)
    """
    ratios = [mine / theirs for mine, theirs in zip(own, other, strict=True)]
    if not ratios:
        raise ValueError("no rounds to compare")
    generator = random.Random(0)
    medians = sorted(median(generator.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    tail = _RESAMPLES // 40
    return Ratio(median(ratios), medians[tail], medians[-1 - tail])


def ratios_to(seconds: Mapping[str, Sequence[float]], base: str) -> dict[str, dict[str, float]]:
    """Return every other run's time ÷ that of `base`, for JSON: ``Ratio(**record)`` reads it."""
    return {name: vars(ratio_of(each, seconds[base])) for name, each in seconds.items() if name != base}


@dataclass(frozen=True)
class InterleavedTimes:
    """Times of all benchmarked runs at one message size.

    Attributes:
        nbytes: of the message.
        seconds: by run, the median over all iterations.
        rounds: by run, the median of each turn.
    """

    nbytes: int
    seconds: dict[str, float]
    rounds: dict[str, list[float]]

    @classmethod
    def of(cls, nbytes: int, seconds: Mapping[str, Sequence[Sequence[float]]]) -> InterleavedTimes:
        """Return the times from ``seconds[run][round][iteration]`` of the slowest rank."""
        return cls(
            nbytes,
            {name: median(value for turn in turns for value in turn) for name, turns in seconds.items()},
            {name: [median(turn) for turn in turns] for name, turns in seconds.items()},
        )

    def with_best(self, title: str, names: Iterable[str]) -> InterleavedTimes:
        """Return the times with the fastest of those `names` that were run added as `title`."""
        best = min((name for name in names if name in self.seconds), key=self.seconds.__getitem__)
        return InterleavedTimes(
            self.nbytes,
            self.seconds | {title: self.seconds[best]},
            self.rounds | {title: self.rounds[best]},
        )

    def ratio(self, own: str, other: str) -> Ratio:
        """Return own ÷ other."""
        return ratio_of(self.rounds[own], self.rounds[other])

    def to_json(self) -> dict[str, Any]:
        """Return the times for JSON, which ``InterleavedTimes(**record)`` reads."""
        return dict(vars(self))
