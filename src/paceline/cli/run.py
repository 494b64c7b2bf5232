"""``paceline run``: the user's own script as ranks on one host or several, restarted after failures."""

from __future__ import annotations

import typer

from paceline.cli.run_options import (
    GraceOption,
    HostsOption,
    LastCallOption,
    LogDirOption,
    MaxRestartsOption,
    MinRanksOption,
    ModuleOption,
    NameOption,
    RanksOption,
    RejoinOption,
    RendezvousOption,
    ScriptArgument,
    ServeOption,
    WaitOption,
)
from paceline.errors import RankFailed, UsageError
from paceline.launch.elastic import run_job, serve_rendezvous
from paceline.launch.hosts import read_address
from paceline.launch.job import Job, Patience
from paceline.units import parse_seconds

__all__ = ["run"]

DEFAULT = Patience()


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
    job = Job(
        ["-m", *script] if module else script,
        ranks,
        ranks * hosts if min_ranks is None else min_ranks,
        hosts=hosts,
        max_restarts=max_restarts,
        address=None if rendezvous is None else read_address(rendezvous),
        name=name,
        rejoin=rejoin,
        log_dir=log_dir,
        patience=Patience(
            last_call=_seconds("--last-call", last_call),
            join=_seconds("--wait", wait),
            end=_seconds("--grace", grace),
        ),
    )
    try:
        run_job(job)
    except RankFailed as error:
        from paceline.cli.app import show

        show(error)
        raise typer.Exit(error.exit_code) from None


def _seconds(option: str, text: str) -> float:
    seconds = parse_seconds(text)
    if seconds <= 0:
        raise UsageError(f"{option} {text}: no time", remedy="give more than 0s")
    return seconds
