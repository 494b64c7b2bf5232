"""MPICH from a wheel: how ranks are started under it, and which of its settings suits an all-reduce here.

MPICH's guide to tuning (doc/mpich/tuning_parameters.md in its repository, sections 2.3 and 2.6) names what may be
chosen: the algorithm inside a host and its buffers; how often a waiting rank yields its core is a variable too. A
setting holds for a whole process, so settings can't take turns with the other contestants; each is tried in fresh
processes before, three times, and the best one runs in the comparison.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean, median
from typing import Any

from paceline.launch.targets.mpiexec_command import mpi_command, mpich_settings, require_mpi

__all__ = ["command", "thread_level", "tries", "turns"]

_RELEASE_GATHER = {"MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM": "release_gather"}
_YIELD_OFTEN = mpich_settings(crowded=True)
_HEAVY_YIELD = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}

_SCATTER_GATHER = {"MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "reduce_scatter_allgather"}

_ROOMY: dict[str, dict[str, str]] = {
    "defaults": {},
    "release-gather": _RELEASE_GATHER,
    "release-gather, 1 MiB buffers": mpich_settings(crowded=False),
    "reduce-scatter, all-gather": _SCATTER_GATHER,
    "without CMA": {"MPIR_CVAR_CH4_CMA_ENABLE": "0"},
}
_CROWDED: dict[str, dict[str, str]] = {
    "defaults": {},
    "yield often": _YIELD_OFTEN,
    "yield often; reduce-scatter, all-gather": _YIELD_OFTEN | _SCATTER_GATHER,
    "heavy yield": _HEAVY_YIELD,
    "heavy yield; release-gather": _HEAVY_YIELD | _RELEASE_GATHER,
}

_SIZES_NBYTES = (4_000, 1_000_000, 100_000_000)
_LEAST_CALLS, _MOST_CALLS, _SECONDS = 3, 200, 0.3  # at each size
_PASSES = 3


def command(ranks: int, program: Sequence[str]) -> list[str]:
    """Return the command that runs a Python program as ranks of MPI; if one raises, all end.

    Raises:
        UsageError: MPI is not installed.
    """
    return mpi_command(ranks, ["-m", "mpi4py", *program], require_mpi())


def thread_level(crowded: bool) -> str:
    """Return what mpi4py is to ask for: below "multiple" MPICH has no lock, and it yields a core only in its lock."""
    return "multiple" if crowded else "funneled"


def settings(crowded: bool) -> dict[str, dict[str, str]]:
    """Return the variables of every setting that is tried, by name."""
    return _CROWDED if crowded else _ROOMY


def tries(
    ranks: int, crowded: bool, env: Mapping[str, str], tick: Callable[[], None]
) -> list[dict[str, Any]]:
    """Return every setting with its median seconds by size, the best first.

    The best has the least geometric mean over sizes of its time ÷ the least time of any setting.

    Args:
        ranks: how many run.
        crowded: whether they share cores.
        env: variables that all of them get.
        tick: called after each try.
    """
    tried = settings(crowded)
    passes: dict[str, list[list[float]]] = {name: [] for name in tried}
    for number in range(_PASSES):
        for name in list(tried)[:: -1 if number % 2 else 1]:
            told = subprocess.run(
                command(ranks, [__file__]),
                env={**env, **tried[name]},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            passes[name].append(json.loads(told.stdout))
            tick()
    seconds = {name: [median(times) for times in zip(*found, strict=True)] for name, found in passes.items()}
    least = [min(times) for times in zip(*seconds.values(), strict=True)]

    def score(name: str) -> float:
        return geometric_mean(time / low for time, low in zip(seconds[name], least, strict=True))

    return [
        {
            "name": name,
            "variables": tried[name],
            "seconds": dict(zip(map(str, _SIZES_NBYTES), seconds[name], strict=True)),
            "score": score(name),
        }
        for name in sorted(tried, key=score)
    ]


def turns(crowded: bool) -> int:
    """Return how often `tries` ticks."""
    return _PASSES * len(settings(crowded))


def main() -> None:
    """Be a rank: print the slowest rank's median seconds by size."""
    import numpy as np
    from mpi4py import MPI

    ranks, found = MPI.COMM_WORLD, []
    for nbytes in _SIZES_NBYTES:
        buffer = np.zeros(nbytes // 4, np.float32)

        def seconds_of(calls: int, buffer: np.ndarray = buffer) -> np.ndarray:
            seconds = np.zeros(calls)
            for call in range(calls):
                ranks.Barrier()
                started = time.perf_counter()
                ranks.Allreduce(MPI.IN_PLACE, buffer)
                seconds[call] = time.perf_counter() - started
            ranks.Allreduce(MPI.IN_PLACE, seconds, op=MPI.MAX)
            return seconds

        once = seconds_of(2)[1]  # the same on all ranks; the first is warm-up
        calls = min(_MOST_CALLS, max(_LEAST_CALLS, int(_SECONDS / once)))
        found.append(float(np.median(seconds_of(calls))))
    if ranks.rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
