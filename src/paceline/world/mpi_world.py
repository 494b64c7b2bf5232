"""The MPI world that this process was started in; the only module that loads mpi4py."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline._core.job_key import JobKey
from paceline.errors import UsageError, WorldError
from paceline.world.environment import MPICH, OPEN_MPI, SLURM, find_launcher

__all__ = [
    "INSTALL_MPI",
    "broadcast_job_key",
    "find_mpiexec",
    "load_mpi",
    "mpi_launcher_size",
    "unlink_mpich_shared_memory",
]

INSTALL_MPI = "pip install 'paceline[mpi]'"
"""How MPI and its Python module are installed."""


def mpi_launcher_size(env: Mapping[str, str]) -> int | None:
    """Return the number of ranks an MPI launcher (mpiexec, mpirun, srun) started; None: none started this process.

    Raises:
        WorldError: variables are malformed or contradict each other.
    """
    launcher = find_launcher(env)
    if launcher not in (MPICH, OPEN_MPI, SLURM):
        return None
    text = env.get(launcher.size, "")
    return int(text) if text.isdecimal() else None


def load_mpi(size: int | None = None) -> Any:
    """Return the module ``mpi4py.MPI``, initialised for calls from several threads.

    Args:
        size: least number of ranks; None: any.

    Raises:
        UsageError: mpi4py is not installed, or finds no MPI library.
        WorldError: this process is not a rank of an MPI world of that size, or MPI supports one thread only.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:  # RuntimeError: mpi4py is installed, but no library
        raise UsageError(f"MPI can't be used: {error}", remedy=INSTALL_MPI) from error
    started, there = mpi_launcher_size(os.environ), MPI.COMM_WORLD.size
    if started is not None and started > 1 and there == 1:
        raise WorldError(
            f"the launcher started {started} ranks, but MPI knows of one: they belong to two different MPIs",
            remedy=f"start with the mpiexec that belongs to {MPI.Get_library_version().split(',')[0].split()[0]}",
        )
    if size is not None and size > there:
        raise WorldError(
            f"there are {size} ranks, but the MPI world that this process was started in has {there}",
            remedy=f"start with `mpiexec -n {size} python …` ({INSTALL_MPI} installs mpiexec)",
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise WorldError(
            "MPI was initialised for fewer threads than may call it here",
            remedy="leave MPI4PY_RC_THREAD_LEVEL and mpi4py.rc.thread_level at 'multiple'",
        )
    return MPI


def broadcast_job_key(mpi: Any) -> JobKey:
    """Return one job key for all ranks of the MPI world: rank 0's, which draws one if it has none; a collective.

    Args:
        mpi: the module that `load_mpi` returned.
    """
    comm = mpi.COMM_WORLD
    secret = bytearray(32)
    if comm.rank == 0:
        secret[:] = (JobKey.from_environment(os.environ) or JobKey.generate()).secret
    comm.Bcast(secret, root=0)
    return JobKey(bytes(secret))


def unlink_mpich_shared_memory(comm: Any) -> None:
    """Unlink MPICH's shared memory once all ranks have mapped it, so that it disappears however they end; a collective.

    MPICH removes its segment from /dev/shm only if the ranks end in order, not if they are killed or abort.

    Args:
        comm: a communicator of all ranks of the world.
    """
    comm.Barrier()
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return  # not Linux, no /dev/shm
    for name in set(re.findall(r"/dev/shm/mpich_shm_\w+", maps)):
        with contextlib.suppress(OSError):  # another rank was faster
            os.unlink(name)


def find_mpiexec(python: str | None = None, path: str | None = None) -> str | None:
    """Return the path of mpiexec; None: not found.

    Args:
        python: the interpreter in whose folder it is searched first, where a wheel installs it; None: this one.
        path: folders to search next, separated as in ``PATH``, which is the default.
    """
    folders = os.environ.get("PATH", "") if path is None else path
    return shutil.which(
        "mpiexec", path=os.pathsep.join([str(Path(python or sys.executable).parent), folders])
    )
