"""What can start the ranks of ``paceline bench collectives`` here, by the name that backends ask for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from paceline.bench.collectives.backends import MPI, RANKS
from paceline.bench.step import StartRanks
from paceline.errors import RankFailed
from paceline.launch.local import run_ranks
from paceline.launch.mpi import find_mpiexec, mpich_settings, run_mpi
from paceline.machine.cores import usable_cores
from paceline.world import Place
from paceline.world.mpi import under_mpi

__all__ = ["joined", "starters"]


def starters() -> dict[str, StartRanks]:
    """Return what starts ranks here: as Python processes, and where there is mpiexec, under it."""
    return {RANKS: run_ranks} | ({MPI: _start_under_mpi} if find_mpiexec() else {})


def joined(place: Place) -> set[str]:
    """Return whose ranks those are that a launcher started: MPI's too, if it was a launcher of MPI."""
    return {RANKS} | ({MPI} if under_mpi(os.environ) == place.size else set())


def _start_under_mpi(argv: Sequence[str], ranks: int, *, env: Mapping[str, str]) -> None:
    """Start ranks under mpiexec, with the settings that suit MPICH best; what the user has set stays."""
    best = {"OMP_NUM_THREADS": str(max(1, int(usable_cores() / ranks)))} | mpich_settings(
        ranks > usable_cores()
    )
    unset = {name: value for name, value in best.items() if name not in os.environ}
    code = run_mpi(argv, ranks, env={**unset, **env})
    if code:
        raise RankFailed(
            f"the {ranks} ranks under mpiexec ended with exit code {code}",
            remedy="what they and mpiexec wrote above says which rank was first, and why",
        )
