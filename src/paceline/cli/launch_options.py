"""Options that the launchers of ``paceline launch`` share, and the work that they describe."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.errors import UsageError
from paceline.launch.work import Work
from paceline.units import parse_bytes, parse_seconds

__all__ = [
    "CpusOption",
    "EnvOption",
    "FolderOption",
    "GpusOption",
    "HostOption",
    "HostsOption",
    "MemoryOption",
    "MinHostsOption",
    "NameOption",
    "OutOption",
    "PortOption",
    "ProgramArgument",
    "PythonOption",
    "RanksOption",
    "RestartsOption",
    "SubmitOption",
    "TimeOption",
    "described",
]

ProgramArgument = Annotated[
    list[str],
    typer.Argument(metavar="SCRIPT...", help="A Python script or -m MODULE, and its own arguments."),
]
NameOption = Annotated[str, typer.Option(help="Of the job.")]
HostsOption = Annotated[int, typer.Option(help="How many hosts.")]
HostOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="A host; repeated, the ranks meet on the first.")
]
MinHostsOption = Annotated[
    int | None, typer.Option(help="Go on with so many hosts after a loss; else with all only.")
]
RanksOption = Annotated[int, typer.Option(help="Processes on each host.")]
CpusOption = Annotated[int, typer.Option(help="Cores for each rank.")]
GpusOption = Annotated[int, typer.Option(help="GPUs for each rank.")]
MemoryOption = Annotated[
    str | None, typer.Option(help="Of each host, such as 64GiB; else what the cluster gives.")
]
TimeOption = Annotated[
    str | None, typer.Option("--time", help="Limit, such as 8h; else what the cluster gives.")
]
EnvOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable to set; may be repeated.")
]
FolderOption = Annotated[
    str | None,
    typer.Option(help="Where the program runs, the same path on all hosts: on a shared disk. Else here."),
]
RestartsOption = Annotated[int, typer.Option(help="Failures after which the ranks are started again.")]
PortOption = Annotated[int, typer.Option(help="Where the ranks meet, on the first host.")]
PythonOption = Annotated[str | None, typer.Option(help="The interpreter on the hosts; else this one's path.")]
OutOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Write it there; else to the terminal.")]
SubmitOption = Annotated[bool, typer.Option("--submit", help="Start it, rather than show it.")]

DEFAULT = Work(("train.py",))


def described(options: Mapping[str, Any]) -> Work:
    """Return the work that options describe; the number of hosts is that of their names, if they have any.

    Args:
        options: by name, of any command of ``paceline launch``; what it does not have is left at its default.

    Raises:
        UsageError: an option that can't be.
    """
    host, memory, time, folder = (options.get(name) for name in ("host", "memory", "time", "folder"))
    return Work(
        tuple(options["program"]),
        name=options.get("name", DEFAULT.name),
        hosts=len(host) if host else options.get("hosts", 1),
        host_names=tuple(host or ()),
        min_hosts=options.get("min_hosts"),
        ranks_per_host=options["ranks"],
        cpus_per_rank=options["cpus"],
        gpus_per_rank=options.get("gpus", 0),
        memory=None if memory is None else parse_bytes(memory),
        seconds=None if time is None else parse_seconds(time),
        env=_variables(options["env"] or ()),
        folder=os.getcwd() if folder is None else folder,
        max_restarts=options["max_restarts"],
        port=options.get("port", DEFAULT.port),
        python=options["python"] or sys.executable,
    )


def _variables(texts: Sequence[str]) -> dict[str, str]:
    """Return the variables of ``NAME=VALUE``.

    Raises:
        UsageError: a text of another form, or a name twice.
    """
    variables: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name in variables:
            wrong = "is no NAME=VALUE" if not equals else f"sets {name} a second time"
            raise UsageError(f"--env {text!r} {wrong}", remedy="for example --env NCCL_DEBUG=INFO")
        variables[name] = value
    return variables
