"""Submission by ``paceline launch``: mpiexec with restarts, and jobs in Slurm's queue."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import typer

from paceline._core.files import write_text
from paceline._core.job_key import JobKey
from paceline.errors import UsageError, unknown
from paceline.launch.process.foreground_commands import run_commands
from paceline.launch.targets.mpiexec_command import MpiImplementation, host_file, mpiexec_command
from paceline.launch.targets.slurm import require_slurm, submit_script, watch_job
from paceline.tools.result_files import check_writable
from paceline.world.mpi_world import find_mpiexec

if TYPE_CHECKING:
    from paceline.launch.targets.cluster_job import ClusterJob

__all__ = ["build_mpiexec_command", "run_with_restarts", "submit_to_slurm"]

_USAGE_ERROR = 2


def build_mpiexec_command(job: ClusterJob, flavour: str, hostfile: Path | None, *, submit: bool) -> list[str]:
    """Return the mpiexec command, and write the file of hosts that it names, if any.

    Raises:
        UsageError: the MPI is unknown, there is no mpiexec to submit to, or the file of hosts would be empty or can't
            be written.
    """
    if flavour not in get_args(MpiImplementation):
        raise unknown("MPI", flavour, get_args(MpiImplementation))
    implementation: MpiImplementation = "mpich" if flavour == "mpich" else "openmpi"
    mpiexec = find_mpiexec() if submit else "mpiexec"
    if mpiexec is None:
        raise UsageError(
            "there is no mpiexec on this machine",
            remedy="install one (pip install 'paceline[mpi]'), or leave out --submit to see the command",
        )
    if hostfile is not None:
        if not job.host_names:
            raise UsageError(
                f"--hostfile {hostfile}, but no hosts to write there", remedy="name them: --host pc1 …"
            )
        check_writable(hostfile, "--hostfile")
        write_text(hostfile, host_file(job, implementation))
    hosts = "" if hostfile is None else str(hostfile.absolute())
    return mpiexec_command(job, implementation, mpiexec, hosts)


def run_with_restarts(command: Sequence[str], max_restarts: int) -> int:
    """Run `command`, restart it after each failure up to `max_restarts` times, and return its last exit code.

    Exit code 2, by convention a usage error, is final. The command gets a job key in its environment.
    """
    restart = 0
    env = (JobKey.from_environment(os.environ) or JobKey.generate()).environment()
    while (code := run_commands({"": command}, env=env)) not in (0, _USAGE_ERROR) and restart < max_restarts:
        restart += 1
        typer.echo(f"paceline: restart {restart}: mpiexec ended with exit code {code}", err=True)
    return code


def submit_to_slurm(job: ClusterJob, text: str, file: Path | None, *, watch: bool) -> int:
    """Submit a batch script and return 0, or follow the job and return its exit code.

    Ctrl-C stops following, not the job.

    Args:
        job: the job.
        text: its batch script.
        file: where to keep the script in; None: it is not kept.
        watch: follow the job.
    """
    require_slurm()
    if file is not None:
        check_writable(file, "--file")
        write_text(file, text)
    with tempfile.TemporaryDirectory(prefix="paceline-launch-") as folder:  # sbatch copies the script
        script = file or Path(folder, job.name)
        if file is None:
            write_text(script, text)
        job_id = submit_script(script)
    log = Path(job.folder, f"{job.name}-{job_id}.log")
    typer.echo(f"job {job_id}; it writes to {log}", err=watch)
    if not watch:
        return 0
    try:
        state = watch_job(
            job_id, log, lambda line: typer.echo(line, err=True), lambda new: typer.echo(new, nl=False)
        )
    except KeyboardInterrupt:
        typer.echo(f"job {job_id} continues; cancel it with: scancel {job_id}", err=True)
        return 130
    return state.exit_code
