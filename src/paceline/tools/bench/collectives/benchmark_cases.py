"""Which cases are measured, in which processes, with how many iterations in which turns (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.tools.bench.collectives.benchmarked_backends import backend_of
from paceline.tools.bench.collectives.bus_bandwidth import operation_of
from paceline.tools.bench.collectives.collectives_settings import CollectiveSettings

__all__ = ["TURNS", "Case", "ProcessSet", "cases_of", "iterations_for", "process_sets", "turns_of"]

_LEAST_ITERATIONS, _MOST_ITERATIONS = 5, 1000
TURNS = 10
"""At most so many turns has a backend at a case; progress is counted in as many steps."""


@dataclass(frozen=True)
class Case:
    """One operation at one size with one number of ranks, for the backends that take turns at it."""

    ranks: int
    op: str
    nbytes: int
    backends: tuple[str, ...]


@dataclass(frozen=True)
class ProcessSet:
    """Cases that the same processes measure one after another; `starter` says what starts them."""

    starter: str
    ranks: int
    cases: tuple[Case, ...]


def cases_of(settings: CollectiveSettings) -> list[Case]:
    """Return all cases, by ranks, operation and size; sizes are rounded to whole elements and equal parts.

    A backend takes part in the operations that it has.
    """
    cases: dict[Case, None] = {}
    for ranks in settings.ranks:
        for op in settings.ops:
            backends = tuple(name for name in settings.backends if op in backend_of(name).ops)
            for size in settings.sizes:
                cases[Case(ranks, op, operation_of(op).round(size, ranks, settings.itemsize), backends)] = (
                    None
                )
    return [case for case in cases if case.backends]


def process_sets(cases: Iterable[Case]) -> list[ProcessSet]:
    """Return who measures which cases: backends of one starter share processes, so that they can take turns."""
    found: dict[tuple[int, str], list[Case]] = {}
    for case in cases:
        for starter in dict.fromkeys(backend_of(name).starter for name in case.backends):
            sharing = tuple(name for name in case.backends if backend_of(name).starter == starter)
            alike = Case(case.ranks, case.op, case.nbytes, sharing)
            found.setdefault((case.ranks, starter), []).append(alike)
    return [ProcessSet(starter, ranks, tuple(these)) for (ranks, starter), these in found.items()]


def iterations_for(settings: CollectiveSettings, once: Sequence[float]) -> int:
    """Return how many timed calls each backend makes at a case.

    Args:
        settings: tell the number, or the time.
        once: what one call of each backend takes, in seconds.
    """
    if settings.iterations is not None:
        return settings.iterations
    fitting = int(settings.seconds * len(once) / max(sum(once), 1e-9))
    return min(_MOST_ITERATIONS, max(_LEAST_ITERATIONS, fitting))


def turns_of(iterations: int) -> list[int]:
    """Return how many iterations each turn of a backend has: up to ten turns, as equal as can be.

    Example:
        >>> turns_of(23), turns_of(3)
        ([3, 3, 3, 2, 2, 2, 2, 2, 2, 2], [1, 1, 1])
    """
    turns = min(TURNS, iterations)
    least, more = divmod(iterations, turns)
    return [least + 1] * more + [least] * (turns - more)
