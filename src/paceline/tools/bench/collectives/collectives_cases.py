"""Cases of the collectives benchmark: how they are grouped into processes and turns, and the memory they need."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline._core.format import format_bytes, format_size
from paceline.errors import UsageError
from paceline.tools.bench.collectives.benchmarked_backends import BenchmarkedBackend, find_backend
from paceline.tools.bench.collectives.bus_bandwidth import find_operation
from paceline.tools.bench.collectives.collectives_settings import CollectiveSettings

__all__ = [
    "MOST_TURNS",
    "CollectiveCase",
    "HostMemory",
    "ProcessSet",
    "check_cases_fit",
    "choose_iterations",
    "fitting_cases",
    "largest_nbytes",
    "list_cases",
    "needed_nbytes",
    "process_sets",
    "split_into_turns",
]

MOST_TURNS = 10
"""Most turns of a backend at a case; progress is counted in as many steps."""

_LEAST_ITERATIONS, _MOST_ITERATIONS = 5, 1000
_PROCESS_NBYTES = 256 << 20  # of a rank's Python and torch, before any buffer


@dataclass(frozen=True)
class CollectiveCase:
    """One operation at one size with one number of ranks, and the backends that run it interleaved."""

    ranks: int
    op: str
    nbytes: int
    backends: tuple[str, ...]


@dataclass(frozen=True)
class ProcessSet:
    """Cases that the same processes measure one after another; `launcher` starts them."""

    launcher: str
    ranks: int
    cases: tuple[CollectiveCase, ...]


def list_cases(settings: CollectiveSettings) -> list[CollectiveCase]:
    """Return all cases, by ranks, operation and size, with the backends that have the operation.

    Sizes are rounded to whole elements and equal parts.
    """
    cases: dict[CollectiveCase, None] = {}
    for ranks in settings.ranks:
        for op in settings.ops:
            backends = tuple(name for name in settings.backends if op in find_backend(name).ops)
            for size in settings.sizes:
                nbytes = find_operation(op).round(size, ranks, settings.itemsize)
                cases[CollectiveCase(ranks, op, nbytes, backends)] = None
    return [case for case in cases if case.backends]


def process_sets(cases: Iterable[CollectiveCase]) -> list[ProcessSet]:
    """Return the cases grouped into processes: backends with the same launcher share them, to run interleaved."""
    groups: dict[tuple[int, str], list[CollectiveCase]] = {}
    for case in cases:
        for launcher in dict.fromkeys(find_backend(name).launcher for name in case.backends):
            sharing = tuple(name for name in case.backends if find_backend(name).launcher == launcher)
            group = groups.setdefault((case.ranks, launcher), [])
            group.append(CollectiveCase(case.ranks, case.op, case.nbytes, sharing))
    return [ProcessSet(launcher, ranks, tuple(group)) for (ranks, launcher), group in groups.items()]


def choose_iterations(settings: CollectiveSettings, once: Sequence[float]) -> int:
    """Return the number of timed calls of each backend at a case.

    Args:
        settings: with the number, or the time, of the calls.
        once: seconds of one call of each backend.
    """
    if settings.iterations is not None:
        return settings.iterations
    fitting = int(settings.seconds * len(once) / max(sum(once), 1e-9))
    return min(_MOST_ITERATIONS, max(_LEAST_ITERATIONS, fitting))


def split_into_turns(iterations: int) -> list[int]:
    """Return the iterations of each turn of a backend: up to `MOST_TURNS` turns, of nearly equal length.

    Example:
        >>> split_into_turns(23), split_into_turns(3)
        ([3, 3, 3, 2, 2, 2, 2, 2, 2, 2], [1, 1, 1])
    """
    turns = min(MOST_TURNS, iterations)
    least, longer = divmod(iterations, turns)
    return [least + 1] * longer + [least] * (turns - longer)


@dataclass(frozen=True)
class HostMemory:
    """Free memory of one host.

    Attributes:
        memory_nbytes: main memory.
        gpu_nbytes: memory of the smallest GPU; 0 without GPUs.
        local_ranks: ranks on the host; None: all.
    """

    memory_nbytes: int
    gpu_nbytes: int = 0
    local_ranks: int | None = None

    def ranks_of(self, case: CollectiveCase) -> int:
        """Return the number of a case's ranks on this host."""
        return case.ranks if self.local_ranks is None else min(self.local_ranks, case.ranks)


def _buffer_copies(case: CollectiveCase, device: str) -> float:
    """Return the bytes of a rank's buffers on a device ÷ S: the most of any set of processes."""
    backends = [find_backend(name) for name in case.backends if find_backend(name).device == device]

    def copies(sharing: Sequence[BenchmarkedBackend]) -> float:
        operation, kinds = find_operation(case.op), {each.buffer_kind(case.op) for each in sharing}
        scratch = operation.scratch + max(each.scratch for each in sharing)
        return len(kinds) * operation.buffers(case.ranks) + scratch

    launchers = {each.launcher for each in backends}
    return max((copies([each for each in backends if each.launcher == one]) for one in launchers), default=0)


def needed_nbytes(case: CollectiveCase, host: HostMemory) -> int:
    """Return the main memory that the ranks of a case need on one host."""
    return math.ceil(host.ranks_of(case) * (_PROCESS_NBYTES + case.nbytes * _buffer_copies(case, "cpu")))


def largest_nbytes(case: CollectiveCase, host: HostMemory) -> int:
    """Return the largest size that fits instead of the case's; 0 if none does."""
    on_cpu, on_gpu = _buffer_copies(case, "cpu"), _buffer_copies(case, "cuda")
    bounds = [(host.memory_nbytes / host.ranks_of(case) - _PROCESS_NBYTES) / on_cpu] if on_cpu else []
    bounds += [host.gpu_nbytes / on_gpu] if on_gpu else []
    return max(0, int(min(bounds)))


def fitting_cases(
    cases: Iterable[CollectiveCase], host: HostMemory
) -> tuple[list[CollectiveCase], list[str]]:
    """Return the cases that fit into memory, and for each of the others the reason why it does not."""
    kept, left_out = [], []
    for case in cases:
        reason = _why_too_large(case, host)
        if reason:
            left_out.append(reason)
        else:
            kept.append(case)
    return kept, left_out


def check_cases_fit(cases: Sequence[CollectiveCase], host: HostMemory) -> None:
    """Refuse cases that do not fit into memory.

    Raises:
        UsageError: for the first of them, with the sizes that fit.
    """
    for case in cases:
        reason = _why_too_large(case, host)
        if reason:
            least = min(largest_nbytes(each, host) for each in cases)
            smaller = f"--bytes up to {_round_down(least)}, " if least else ""
            raise UsageError(reason, remedy=f"give {smaller}fewer --nproc-per-node or fewer --backend")


def _why_too_large(case: CollectiveCase, host: HostMemory) -> str:
    largest = largest_nbytes(case, host)
    if case.nbytes <= largest:
        return ""
    needed = needed_nbytes(case, host)
    if needed > host.memory_nbytes:
        why = f"needs about {format_bytes(needed)} of memory, {format_bytes(host.memory_nbytes)} are free"
    else:
        why = f"needs more than the {format_bytes(host.gpu_nbytes)} of a GPU"
    fitting = f"up to {_round_down(largest)}" if largest else "no size"
    return f"{case.op} of {format_size(case.nbytes)} with {case.ranks} ranks {why}; {fitting} would fit"


def _round_down(nbytes: int) -> str:
    """Return a size of at most `nbytes` with two digits, in the syntax of the command line.

    Example:
        >>> _round_down(1_684_458_854), _round_down(999)
        ('1.6GB', '990B')
    """
    digit = 10 ** max(0, len(str(nbytes)) - 2)
    lower = nbytes // digit * digit
    units = {"GB": 10**9, "MB": 10**6, "kB": 10**3}
    unit = next((unit for unit, scale in units.items() if lower >= scale), "B")
    return f"{lower / units.get(unit, 1):g}{unit}"
