"""``paceline run``: the user's own script as ranks on one host or several, restarted after failures.

Options of ``paceline run``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline._core.units import parse_seconds
from paceline.errors import RankFailed, UsageError
from paceline.launch.agent.elastic_run import run_job, serve_rendezvous
from paceline.launch.agent.job_spec import JobSpec, JobTimeouts
from paceline.launch.agent.rendezvous_address import read_address

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
    "run",
]

DEFAULT = JobTimeouts()


def run(
    script: ScriptArgument = None,
    ranks: RanksOption = 1,
    hosts: HostsOption = 1,
    rendezvous: RendezvousOption = None,
    min_ranks: MinRanksOption = None,
    max_restarts: MaxRestartsOption = 3,
    rejoin: RejoinOption = True,
    log_dir: LogDirOption = None,
    module: ModuleOption = False,
    last_call: LastCallOption = f"{DEFAULT.last_call:g}s",
    wait: WaitOption = f"{DEFAULT.join:g}s",
    grace: GraceOption = f"{DEFAULT.end:g}s",
    name: NameOption = "run",
    serve: ServeOption = None,
) -> None:
    """Run a script as ranks on one host or several, and restart it after a failure.

    Examples: paceline run --ranks 4 train.py --epochs 3

    paceline run --hosts 3 --ranks 2 --min-ranks 4 --rendezvous pc1:29400 train.py

    The second is started on every host. Ranks are told their places as by torchrun. What follows the script's name is
    its own. Restarting is fast where the script goes on from its last checkpoint.
    """
    if serve is not None:
        if script or rendezvous:
            raise UsageError(
                "--serve runs no script",
                remedy="serve on one host, and run the script on others by --rendezvous",
            )
        serve_rendezvous(read_address(serve))
        return
    if not script:
        raise UsageError("there is no script to run", remedy="for example: paceline run --ranks 2 train.py")
    job = JobSpec(
        ["-m", *script] if module else script,
        ranks,
        ranks * hosts if min_ranks is None else min_ranks,
        hosts=hosts,
        max_restarts=max_restarts,
        address=None if rendezvous is None else read_address(rendezvous),
        name=name,
        rejoin=rejoin,
        log_dir=log_dir,
        patience=JobTimeouts(
            last_call=_seconds("--last-call", last_call),
            join=_seconds("--wait", wait),
            end=_seconds("--grace", grace),
        ),
    )
    try:
        run_job(job)
    except RankFailed as error:
        from paceline.tools.cli.app import print_error

        print_error(error)
        raise typer.Exit(error.exit_code) from None


def _seconds(option: str, text: str) -> float:
    seconds = parse_seconds(text)
    if seconds <= 0:
        raise UsageError(f"{option} {text}: no time", remedy="give more than 0s")
    return seconds


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
