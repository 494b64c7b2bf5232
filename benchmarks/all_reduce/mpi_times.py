"""Times of MPI's all-reduce. As a program, a rank under any MPI: prints those of the slowest rank as JSON.

mpiexec -n 2 python benchmarks/all_reduce/mpi_times.py
"""

from __future__ import annotations

import json
import time

import numpy as np

SIZES = (4_000, 64_000, 1_000_000, 100_000_000)


def time_mpi() -> list[float]:
    """Return the slowest rank's median seconds for each of `SIZES`."""
    from mpi4py import MPI

    world, found = MPI.COMM_WORLD, []
    for nbytes in SIZES:
        buffer = np.zeros(nbytes // 4, np.float32)

        def seconds_of(calls: int, buffer: np.ndarray = buffer) -> np.ndarray:
            seconds = np.zeros(calls)
            for call in range(calls):
                world.Barrier()
                started = time.perf_counter()
                world.Allreduce(MPI.IN_PLACE, buffer)
                seconds[call] = time.perf_counter() - started
            world.Allreduce(MPI.IN_PLACE, seconds, op=MPI.MAX)
            return seconds

        once = seconds_of(2)[1]  # the same on all ranks; the first is warm-up
        calls = min(200, max(3, int(0.3 / once)))
        found.append(float(np.median(seconds_of(calls))))
    return found


if __name__ == "__main__":
    from mpi4py import MPI

    times = time_mpi()
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(times))
