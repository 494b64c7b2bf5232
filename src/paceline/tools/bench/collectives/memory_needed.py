"""What a case needs of main memory and of GPUs, compared with what there is, before anything starts (pure)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline._core.format import format_bytes, format_size
from paceline.errors import UsageError
from paceline.tools.bench.collectives.benchmark_cases import Case
from paceline.tools.bench.collectives.benchmarked_backends import Backend, backend_of
from paceline.tools.bench.collectives.bus_bandwidth import operation_of

__all__ = ["Room", "fitting_cases", "largest_nbytes", "needed_nbytes", "refuse_what_does_not_fit"]

_PROCESS_NBYTES = 256 << 20
"""Memory of a rank's Python and torch, before any buffer."""


@dataclass(frozen=True)
class Room:
    """What one host has free: bytes of main memory, bytes of its smallest GPU (0: none), and the ranks it gets.

    Attributes:
        memory_nbytes: main memory.
        gpu_nbytes: memory of the smallest GPU.
        local_ranks: ranks on the host; None: all.
    """

    memory_nbytes: int
    gpu_nbytes: int = 0
    local_ranks: int | None = None


def _copies(case: Case, device: str) -> float:
    """Return the bytes that a rank's buffers take on a device, in units of S: the most of any set of processes."""
    backends = [backend_of(name) for name in case.backends if backend_of(name).device == device]
    starters = {each.starter for each in backends}
    return max(
        (_copies_of([each for each in backends if each.starter == one], case) for one in starters), default=0
    )


def _copies_of(backends: Sequence[Backend], case: Case) -> float:
    """Return the same for backends that share processes."""
    operation = operation_of(case.op)
    kinds = {each.buffers_for(case.op) for each in backends}
    scratch = operation.scratch + max(each.scratch for each in backends)
    return len(kinds) * operation.buffers(case.ranks) + scratch


def needed_nbytes(case: Case, room: Room) -> int:
    """Return the main memory in bytes that the ranks of a case need on one host."""
    ranks = case.ranks if room.local_ranks is None else min(room.local_ranks, case.ranks)
    return math.ceil(ranks * (_PROCESS_NBYTES + case.nbytes * _copies(case, "cpu")))


def largest_nbytes(case: Case, room: Room) -> int:
    """Return the largest size that would fit in the place of the case's, 0 if none does."""
    ranks = case.ranks if room.local_ranks is None else min(room.local_ranks, case.ranks)
    bounds = []
    if _copies(case, "cpu"):
        bounds.append((room.memory_nbytes / ranks - _PROCESS_NBYTES) / _copies(case, "cpu"))
    if _copies(case, "cuda"):
        bounds.append(room.gpu_nbytes / _copies(case, "cuda"))
    return max(0, int(min(bounds)))


def _reason(case: Case, room: Room) -> str:
    """Return why a case does not fit; empty if it does."""
    largest = largest_nbytes(case, room)
    if case.nbytes <= largest:
        return ""
    what = f"{case.op} of {format_size(case.nbytes)} with {case.ranks} ranks"
    needed = needed_nbytes(case, room)
    if needed > room.memory_nbytes:
        why = f"needs about {format_bytes(needed)} of memory, {format_bytes(room.memory_nbytes)} are free"
    else:
        why = f"needs more than the {format_bytes(room.gpu_nbytes)} of a GPU"
    fitting = f"up to {_round_down(largest)}" if largest else "no size"
    return f"{what} {why}; {fitting} would fit"


def _round_down(nbytes: int) -> str:
    """Return a size of at most `nbytes` with two digits, as it can be given on the command line.

    Example:
        >>> _round_down(1_684_458_854), _round_down(999)
        ('1.6GB', '990B')
    """
    digit = 10 ** max(0, len(str(nbytes)) - 2)
    lower = nbytes // digit * digit
    units = {"GB": 10**9, "MB": 10**6, "kB": 10**3}
    unit = next((unit for unit, scale in units.items() if lower >= scale), "B")
    return f"{lower / units.get(unit, 1):g}{unit}"


def fitting_cases(cases: Iterable[Case], room: Room) -> tuple[list[Case], list[str]]:
    """Return the cases that fit, and for each of the others what it is and why it is left out."""
    kept, left_out = [], []
    for case in cases:
        reason = _reason(case, room)
        if reason:
            left_out.append(reason)
        else:
            kept.append(case)
    return kept, left_out


def refuse_what_does_not_fit(cases: Sequence[Case], room: Room) -> None:
    """Raise for the first case that does not fit.

    Raises:
        UsageError: it says what would fit.
    """
    for case in cases:
        reason = _reason(case, room)
        if reason:
            least = min(largest_nbytes(each, room) for each in cases)
            smaller = f"--sizes up to {_round_down(least)}, " if least else ""
            raise UsageError(reason, remedy=f"give {smaller}fewer --ranks or fewer --backends")
