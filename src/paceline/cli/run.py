"""``paceline run``: the user's own script as ranks on one host or several, restarted after failures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.errors import RankFailed, UsageError
from paceline.launch.elastic import run_job, serve_rendezvous
from paceline.launch.hosts import read_address
from paceline.launch.job import Job, Patience
from paceline.units import parse_seconds

__all__ = ["run"]

DEFAULT = Patience()


def run(
    script: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT...", help="A Python script, and its own arguments."),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Processes on this host (torchrun: --nproc-per-node).")] = 1,
    hosts: Annotated[int, typer.Option(help="Hosts at most (torchrun: --nnodes).")] = 1,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where several hosts meet; the same on each.")
    ] = None,
    min_ranks: Annotated[
        int | None, typer.Option(help="Go on with so many ranks, of all hosts; else with all only.")
    ] = None,
    max_restarts: Annotated[int, typer.Option(help="Failures after which it goes on.")] = 3,
    rejoin: Annotated[
        bool,
        typer.Option(help="Restart as soon as a host comes (back), or let it wait for the next failure."),
    ] = True,
    log_dir: Annotated[
        Path | None, typer.Option(help="Folder for restarts.jsonl and what ranks 1 and up write.")
    ] = None,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as for python -m.")
    ] = False,
    last_call: Annotated[
        str, typer.Option(help="How long a world that may begin waits for missing hosts.")
    ] = f"{DEFAULT.last_call:g}s",
    wait: Annotated[
        str, typer.Option(help="How long to wait for enough hosts before giving up.")
    ] = f"{DEFAULT.join:g}s",
    grace: Annotated[
        str, typer.Option(help="From SIGTERM to SIGKILL, for ranks that have to end.")
    ] = f"{DEFAULT.end:g}s",
    name: Annotated[str, typer.Option(help="Of the run, where one server serves several.")] = "run",
    serve: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Only serve a rendezvous, on a host that does not train."),
    ] = None,
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
