"""``paceline launch mpi``: the command for one MPI or the other, and starting it again after a failure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import typer

from paceline.cli.writable import check_writable
from paceline.durable import write_text
from paceline.errors import UsageError, unknown
from paceline.launch.foreground import run_commands
from paceline.launch.mpi import Mpi, host_file, mpiexec_command
from paceline.machine.mpiexec import find_mpiexec

if TYPE_CHECKING:
    from paceline.launch.work import Work

__all__ = ["command_of", "run_again"]

_CALLED_WRONGLY = 2


def command_of(work: Work, flavour: str, hostfile: Path | None, *, submit: bool) -> list[str]:
    """Return mpiexec's command, and write the file of hosts that it names, if one is asked for.

    Raises:
        UsageError: an MPI that is none, no mpiexec to submit it to, a file of no hosts or that can't be written.
    """
    if flavour not in get_args(Mpi):
        raise unknown("MPI", flavour, get_args(Mpi))
    mpi: Mpi = "mpich" if flavour == "mpich" else "openmpi"
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


def run_again(command: Sequence[str], max_restarts: int) -> int:
    """Run `command`, again after each failure up to `max_restarts`, and return its last exit code.

    Exit code 2 says by Python's custom that the program was called wrongly: it is final.
    """
    restart = 0
    while (code := run_commands({"": command})) not in (0, _CALLED_WRONGLY) and restart < max_restarts:
        restart += 1
        typer.echo(f"paceline: restart {restart}: mpiexec ended with exit code {code}", err=True)
    return code
