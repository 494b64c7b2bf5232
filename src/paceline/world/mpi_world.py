"""The MPI world that this process was started in; the only place that loads mpi4py.

Where mpiexec is: beside this Python, where a wheel puts it, or on the PATH.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import UsageError, WorldError
from paceline.world.environment import MPICH, OPEN_MPI, SLURM, find_launcher

__all__ = ["INSTALL_MPI", "find_mpiexec", "load_mpi", "mpi_launcher_size", "unlink_mpich_shared_memory"]

INSTALL_MPI = "pip install 'paceline[mpi]'"
"""How MPI and its Python module are installed."""


def mpi_launcher_size(env: Mapping[str, str]) -> int | None:
    """Return how many ranks an MPI launcher (mpiexec, mpirun, srun) says there are, None if none started this.

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
        size: how many ranks there have to be at least, if that is known.

    Raises:
        UsageError: mpi4py is not installed, or finds no MPI library.
        WorldError: this process is no rank of an MPI world of that size, or MPI takes one thread only.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:  # RuntimeError: mpi4py is there, but no library
        raise UsageError(f"MPI can't be used: {error}", remedy=INSTALL_MPI) from error
    told, there = mpi_launcher_size(os.environ), MPI.COMM_WORLD.size
    if told is not None and told > 1 and there == 1:
        raise WorldError(
            f"the launcher started {told} ranks, but MPI knows of one: they belong to two different MPIs",
            remedy=f"start with the mpiexec that belongs to {MPI.Get_library_version().split(',')[0].split()[0]}",
        )
    if size is not None and size > there:
        raise WorldError(
            f"there are {size} ranks, but the MPI world that this process was started in has {there}",
            remedy=f"start with `mpiexec -n {size} python …` ({INSTALL_MPI} brings mpiexec)",
        )
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise WorldError(
            "MPI was initialised for fewer threads than may call it here",
            remedy="leave MPI4PY_RC_THREAD_LEVEL and mpi4py.rc.thread_level at 'multiple'",
        )
    return MPI


def unlink_mpich_shared_memory(comm: Any) -> None:
    """Have MPICH's shared memory go with the ranks, however they end; all ranks of the world have to call.

    MPICH removes its segment from /dev/shm where the ranks leave in order, and leaves it there where they are killed
    or abort. Once all ranks have mapped it, nobody needs its name any more.

    Args:
        comm: a communicator of all ranks of the world.
    """
    comm.Barrier()
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return  # no Linux, no /dev/shm
    for name in set(re.findall(r"/dev/shm/mpich_shm_\w+", maps)):
        with contextlib.suppress(OSError):  # another rank was faster
            os.unlink(name)


def find_mpiexec(python: str | None = None, path: str | None = None) -> str | None:
    """Return the path of mpiexec, None if there is none.

    Args:
        python: the interpreter beside which it is looked for first; this one, if left out.
        path: folders to look in then, separated as in ``PATH``, which is the default.
    """
    folders = os.environ.get("PATH", "") if path is None else path
    return shutil.which(
        "mpiexec", path=os.pathsep.join([str(Path(python or sys.executable).parent), folders])
    )
