"""``paceline launch mpi``: the command for one MPI or the other, and starting it again after a failure.

``paceline launch slurm --submit`` and ``--watch``: a batch script into Slurm's queue, and what becomes of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import typer

from paceline._core.files import write_text
from paceline.errors import UsageError, unknown
from paceline.launch.process.foreground_commands import run_commands
from paceline.launch.targets.mpiexec_command import MpiImplementation, host_file, mpiexec_command
from paceline.launch.targets.slurm import need_slurm, submit_script, watch_job
from paceline.tools.result_files import check_writable
from paceline.world.mpi_world import find_mpiexec

if TYPE_CHECKING:
    from paceline.launch.targets.cluster_job import ClusterJob

__all__ = ["build_mpiexec_command", "run_with_restarts", "submit_to_slurm"]

_CALLED_WRONGLY = 2


def build_mpiexec_command(work: ClusterJob, flavour: str, hostfile: Path | None, *, submit: bool) -> list[str]:
    """Return mpiexec's command, and write the file of hosts that it names, if one is asked for.

    Raises:
        UsageError: an MPI that is none, no mpiexec to submit it to, a file of no hosts or that can't be written.
    """
    if flavour not in get_args(MpiImplementation):
        raise unknown("MPI", flavour, get_args(MpiImplementation))
    mpi: MpiImplementation = "mpich" if flavour == "mpich" else "openmpi"
    mpiexec = find_mpiexec() if submit else "mpiexec"
    if mpiexec is None:
        raise UsageError(
            "there is no mpiexec on this machine",
            remedy="install one (pip install 'paceline[mpi]'), or leave out --submit to see the command",
        )
    if hostfile is not None:
        if not work.host_names:
            raise UsageError(
                f"--hostfile {hostfile}, but no hosts to write there", remedy="name them: --host pc1 …"
            )
        check_writable(hostfile, "--hostfile")
        write_text(hostfile, host_file(work, mpi))
    hosts = "" if hostfile is None else str(hostfile.absolute())
    return mpiexec_command(work, mpi, mpiexec, hosts)


def run_with_restarts(command: Sequence[str], max_restarts: int) -> int:
    """Run `command`, again after each failure up to `max_restarts`, and return its last exit code.

    Exit code 2 says by Python's custom that the program was called wrongly: it is final.
    """
    restart = 0
    while (code := run_commands({"": command})) not in (0, _CALLED_WRONGLY) and restart < max_restarts:
        restart += 1
        typer.echo(f"paceline: restart {restart}: mpiexec ended with exit code {code}", err=True)
    return code


def submit_to_slurm(work: ClusterJob, text: str, out: Path | None, *, watch: bool) -> int:
    """Submit the script `text`, and return 0; or follow the job, and return its exit code.

    Ctrl-C ends the following, not the job.

    Args:
        work: what it runs.
        text: the batch script.
        out: where it is kept besides; None: nowhere.
        watch: whether to follow the job.
    """
    need_slurm()
    if out is not None:
        check_writable(out, "--out")
        write_text(out, text)
    with tempfile.TemporaryDirectory(prefix="paceline-launch-") as folder:  # sbatch takes a copy
        script = out or Path(folder, work.name)
        if out is None:
            write_text(script, text)
        job = submit_script(script)
    log = Path(work.folder, f"{work.name}-{job}.log")
    typer.echo(f"job {job}; it writes to {log}", err=watch)
    if not watch:
        return 0
    try:
        state = watch_job(
            job, log, lambda line: typer.echo(line, err=True), lambda new: typer.echo(new, nl=False)
        )
    except KeyboardInterrupt:
        typer.echo(f"job {job} goes on; end it with: scancel {job}", err=True)
        return 130
    return state.exit_code
