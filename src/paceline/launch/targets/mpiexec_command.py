"""Running a program as the ranks of an MPI world by mpiexec: on this machine, or as a command for several hosts.

mpiexec stands beside this Python where MPI came from a wheel (``pip install 'paceline[mpi]'``); else it is looked
for on the PATH. It has to belong to the MPI that mpi4py was loaded with: a foreign one starts as many worlds of one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Literal

from paceline._core.child_process import POLL_SECONDS, ChildProcess, end, sigterm_raises, with_pdeathsig
from paceline.errors import RankFailed, UsageError
from paceline.launch.targets.cluster_job import ClusterJob
from paceline.world.mpi_world import INSTALL, find_mpiexec

__all__ = [
    "MpiImplementation",
    "host_file",
    "mpi_command",
    "mpich_settings",
    "mpiexec_command",
    "require_mpi",
    "run_mpi",
]

MpiImplementation = Literal["mpich", "openmpi"]

_YIELD_OFTEN = {"MPIR_CVAR_POLLS_BEFORE_YIELD": "1", "MPIR_CVAR_POSIX_POLL_FREQUENCY": "1"}
_RELEASE_GATHER = {
    "MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM": "release_gather",
    "MPIR_CVAR_BCAST_INTRANODE_BUFFER_TOTAL_SIZE": str(1 << 20),
    "MPIR_CVAR_REDUCE_INTRANODE_BUFFER_TOTAL_SIZE": str(1 << 20),
}


def mpich_settings(crowded: bool) -> dict[str, str]:
    """Return the variables with which MPICH was fastest here, of those that benchmarks/all_reduce tries.

    They are MPICH's own (doc/mpich/tuning_parameters.md, 2.3 and 2.6); another MPI takes no notice of them.

    Args:
        crowded: whether there are more ranks than cores.
    """
    return dict(_YIELD_OFTEN if crowded else _RELEASE_GATHER)


def require_mpi() -> str:
    """Return the path of mpiexec, once it is clear that the ranks can use MPI.

    Raises:
        UsageError: mpiexec or mpi4py is not installed.
    """
    if find_spec("mpi4py") is None:
        raise UsageError("MPI needs mpi4py, which is not installed", remedy=INSTALL)
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise UsageError(
            f"there is no mpiexec, neither beside {sys.executable} nor on the PATH", remedy=INSTALL
        )
    return mpiexec


def mpi_command(ranks: int, program: Sequence[str], mpiexec: str) -> list[str]:
    """Return the command that runs ``python *program`` as ranks of one MPI world.

    Example:
        >>> mpi_command(4, ["train.py"], "mpiexec")[:3]
        ['mpiexec', '-n', '4']
    """
    return [mpiexec, "-n", str(ranks), sys.executable, *program]


def mpiexec_command(
    work: ClusterJob, mpi: MpiImplementation, mpiexec: str = "mpiexec", hosts: str = ""
) -> list[str]:
    """Return the command that runs a program as the ranks of one world on its hosts.

    MPI tells ranks their numbers, but not where to meet: the first host is told to all.

    Args:
        work: what is to be run.
        mpi: whose mpiexec it is: options differ. Intel's MPI has MPICH's.
        mpiexec: its path.
        hosts: a file with the hosts, as :func:`host_file` makes it; else they stand in the command.

    Example:
        >>> work = ClusterJob(("train.py",), hosts=2, host_names=("pc1", "pc2"), ranks_per_host=4)
        >>> " ".join(mpiexec_command(work, "mpich")[:7])
        'mpiexec -n 8 -ppn 4 -hosts pc1,pc2'
    """
    each, names, mpich = work.ranks_per_host, work.host_names, mpi == "mpich"
    command = [mpiexec, "-n", str(work.ranks)]
    command += ["-ppn", str(each)] if mpich else ["--map-by", f"ppr:{each}:node"]
    if hosts:
        command += ["-f" if mpich else "--hostfile", hosts]
    elif names:
        command += (
            ["-hosts", ",".join(names)] if mpich else ["--host", ",".join(f"{one}:{each}" for one in names)]
        )
    if work.folder:
        command += ["-wdir" if mpich else "--wdir", work.folder]
    variables = {"MASTER_ADDR": work.first_host, "MASTER_PORT": str(work.port), **work.variables()}
    for name, value in variables.items():
        command += ["-genv", name, value] if mpich else ["-x", f"{name}={value}"]
    return [*command, work.python, "-u", *work.program]


def host_file(work: ClusterJob, mpi: MpiImplementation) -> str:
    """Return the text of a file of hosts and their ranks for mpiexec.

    Example:
        >>> host_file(ClusterJob(("train.py",), hosts=2, host_names=("pc1", "pc2"), ranks_per_host=4), "openmpi")
        'pc1 slots=4\\npc2 slots=4\\n'
    """
    between = ":" if mpi == "mpich" else " slots="
    return "".join(f"{host}{between}{work.ranks_per_host}\n" for host in work.host_names)


def run_mpi(
    program: Sequence[str],
    ranks: int,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> int:
    """Run ``python *program`` as `ranks` processes of one MPI world, and return mpiexec's exit code.

    All output comes to this terminal. The ranks end with this process, however it ends; on Ctrl-C too.

    Args:
        program: arguments to this Python, such as ``["-m", "my.module"]``.
        ranks: how many processes, at least 1.
        env: variables to set besides those of this process.
        timeout: seconds until the run counts as hung; None: no limit.

    Raises:
        UsageError: mpiexec or mpi4py is not installed, or fewer than one rank.
        RankFailed: time was up; the ranks have been ended.
    """
    if ranks < 1:
        raise UsageError(f"ranks={ranks}: a world has at least one rank", remedy="ask for 1 or more")
    command = with_pdeathsig(mpi_command(ranks, program, require_mpi()))
    variables = {"PYTHONUNBUFFERED": "1", **os.environ, **(env or {})}
    deadline = None if timeout is None else time.monotonic() + timeout
    with sigterm_raises():
        child = ChildProcess(
            subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, process_group=0)
        )
        try:
            while (code := child.exit_code()) is None:
                if deadline is not None and time.monotonic() > deadline:
                    raise RankFailed(
                        f"the ranks under mpiexec had not ended after {timeout:g} s",
                        remedy="raise the time limit, or find out what they wait for",
                    )
                time.sleep(POLL_SECONDS)
            return code
        finally:
            end([child])
