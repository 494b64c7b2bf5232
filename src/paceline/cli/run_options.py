"""Options of ``paceline run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "GraceOption",
    "HostsOption",
    "LastCallOption",
    "LogDirOption",
    "MaxRestartsOption",
    "MinRanksOption",
    "ModuleOption",
    "NameOption",
    "RanksOption",
    "RejoinOption",
    "RendezvousOption",
    "ScriptArgument",
    "ServeOption",
    "WaitOption",
]

ScriptArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="SCRIPT...", help="A Python script, and its own arguments."),
]
RanksOption = Annotated[int, typer.Option(help="Processes on this host (torchrun: --nproc-per-node).")]
HostsOption = Annotated[int, typer.Option(help="Hosts at most (torchrun: --nnodes).")]
RendezvousOption = Annotated[
    str | None, typer.Option(metavar="HOST:PORT", help="Where several hosts meet; the same on each.")
]
MinRanksOption = Annotated[
    int | None, typer.Option(help="Go on with so many ranks, of all hosts; else with all only.")
]
MaxRestartsOption = Annotated[int, typer.Option(help="Failures after which it goes on.")]
RejoinOption = Annotated[
    bool,
    typer.Option(help="Restart as soon as a host comes (back), or let it wait for the next failure."),
]
LogDirOption = Annotated[
    Path | None, typer.Option(help="Folder for restarts.jsonl and what ranks 1 and up write.")
]
ModuleOption = Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as for python -m.")]
LastCallOption = Annotated[str, typer.Option(help="How long a world that may begin waits for missing hosts.")]
WaitOption = Annotated[str, typer.Option(help="How long to wait for enough hosts before giving up.")]
GraceOption = Annotated[str, typer.Option(help="From SIGTERM to SIGKILL, for ranks that have to end.")]
NameOption = Annotated[str, typer.Option(help="Of the run, where one server serves several.")]
ServeOption = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Only serve a rendezvous, on a host that does not train."),
]
