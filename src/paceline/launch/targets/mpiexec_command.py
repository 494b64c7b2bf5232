"""mpiexec: runs a program as the ranks of an MPI world on this machine, or returns the command for several hosts.

mpiexec is next to this Python if MPI was installed from a wheel (``pip install 'paceline[mpi]'``), else on the PATH. It
must belong to the MPI library that mpi4py loads: a foreign one starts a world of size 1 per process.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Literal

from paceline._core.job_key import KEY_VARIABLE
from paceline.errors import UsageError
from paceline.launch.process.foreground_commands import run_commands
from paceline.launch.targets.cluster_job import ClusterJob
from paceline.world.mpi_world import INSTALL_MPI, find_mpiexec

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

    They are MPICH's own (doc/mpich/tuning_parameters.md, 2.3 and 2.6); other MPIs ignore them.

    Args:
        crowded: whether there are more ranks than cores.
    """
    return dict(_YIELD_OFTEN if crowded else _RELEASE_GATHER)


def require_mpi() -> str:
    """Return the path of mpiexec.

    Raises:
        UsageError: mpiexec or mpi4py is not installed.
    """
    if find_spec("mpi4py") is None:
        raise UsageError("MPI needs mpi4py, which is not installed", remedy=INSTALL_MPI)
    mpiexec = find_mpiexec()
    if mpiexec is None:
        raise UsageError(f"no mpiexec, neither next to {sys.executable} nor on the PATH", remedy=INSTALL_MPI)
    return mpiexec


def mpi_command(ranks: int, program: Sequence[str], mpiexec: str) -> list[str]:
    """Return the command that runs ``python *program`` as ranks of one MPI world.

    Example:
        >>> mpi_command(4, ["train.py"], "mpiexec")[:3]
        ['mpiexec', '-n', '4']
    """
    return [mpiexec, "-n", str(ranks), sys.executable, *program]


def mpiexec_command(
    job: ClusterJob, mpi: MpiImplementation, mpiexec: str = "mpiexec", hosts: str = ""
) -> list[str]:
    """Return the command that runs a job's ranks on its hosts.

    MPI assigns ranks but no rendezvous, so the first host is passed to all as MASTER_ADDR. mpiexec needs a job key in
    its environment, which it passes on.

    Args:
        job: to run.
        mpi: implementation, whose options differ; Intel's MPI has MPICH's.
        mpiexec: path of mpiexec.
        hosts: file with the hosts, see :func:`host_file`; empty: they are listed in the command.

    Example:
        >>> job = ClusterJob(("train.py",), hosts=2, host_names=("pc1", "pc2"), ranks_per_host=4)
        >>> " ".join(mpiexec_command(job, "mpich")[:7])
        'mpiexec -n 8 -ppn 4 -hosts pc1,pc2'
    """
    each, names, mpich = job.ranks_per_host, job.host_names, mpi == "mpich"
    command = [mpiexec, "-n", str(job.ranks)]
    command += ["-ppn", str(each)] if mpich else ["--map-by", f"ppr:{each}:node"]
    if hosts:
        command += ["-f" if mpich else "--hostfile", hosts]
    elif names:
        command += (
            ["-hosts", ",".join(names)] if mpich else ["--host", ",".join(f"{one}:{each}" for one in names)]
        )
    if job.folder:
        command += ["-wdir" if mpich else "--wdir", job.folder]
    variables = {"MASTER_ADDR": job.first_host, "MASTER_PORT": str(job.port), **job.variables()}
    for name, value in variables.items():
        command += ["-genv", name, value] if mpich else ["-x", f"{name}={value}"]
    if not mpich:  # MPICH passes its whole environment on
        command += ["-x", KEY_VARIABLE]
    return [*command, job.python, "-u", *job.program]


def host_file(job: ClusterJob, mpi: MpiImplementation) -> str:
    """Return the text of mpiexec's file of hosts and their ranks.

    Example:
        >>> host_file(ClusterJob(("train.py",), hosts=2, host_names=("pc1", "pc2"), ranks_per_host=4), "openmpi")
        'pc1 slots=4\\npc2 slots=4\\n'
    """
    separator = ":" if mpi == "mpich" else " slots="
    return "".join(f"{host}{separator}{job.ranks_per_host}\n" for host in job.host_names)


def run_mpi(
    program: Sequence[str],
    ranks: int,
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> int:
    """Run ``python *program`` as `ranks` processes of one MPI world, and return mpiexec's exit status.

    All output goes to this terminal. The ranks end with this process, however it ends, Ctrl-C included.

    Args:
        program: arguments to this Python, such as ``["-m", "my.module"]``.
        ranks: number of processes, at least 1.
        env: variables to set in addition to those of this process.
        timeout: seconds until the run counts as hung; None: no limit.

    Raises:
        UsageError: mpiexec or mpi4py is not installed, or fewer than one rank.
        RankFailed: time was up; the ranks have been ended.
    """
    if ranks < 1:
        raise UsageError(f"ranks={ranks}: a world has at least one rank", remedy="give 1 or more")
    return run_commands({"": mpi_command(ranks, program, require_mpi())}, env=env, timeout=timeout)
