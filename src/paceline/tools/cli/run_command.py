"""``paceline run``: runs a script as ranks on one host or several, restarted after failures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, cast

import typer
from typer import Argument

from paceline._core.units import parse_seconds
from paceline.errors import RankFailed, UsageError
from paceline.launch.agent.elastic_run import run_job, serve_rendezvous
from paceline.launch.agent.job_spec import JobSpec, JobTimeouts
from paceline.launch.agent.rendezvous_address import parse_rendezvous_address
from paceline.tools.cli.shared_options import NNODES_NOTE, parse_nnodes
from paceline.tools.command_options import own, shared

__all__ = ["run"]

DEFAULT = JobTimeouts()


def run(
    script: Annotated[
        list[str] | None, Argument(metavar="SCRIPT...", help="Script and its arguments.")
    ] = None,
    nproc_per_node: Annotated[int, shared("nproc-per-node")] = 1,
    nnodes: Annotated[str, shared("nnodes", NNODES_NOTE)] = "1",
    rendezvous: Annotated[
        str | None, own("HOST:PORT", "Rendezvous of several hosts, the same on each.")
    ] = None,
    min_ranks: Annotated[int | None, shared("min-ranks", "; default those of MIN hosts, or all")] = None,
    max_restarts: Annotated[int, shared("max-restarts")] = 3,
    rejoin: Annotated[bool, own(None, "Restart when a host joins, or let it wait for a failure.")] = True,
    recovery: Annotated[str, shared("recovery")] = "live",
    log_dir: Annotated[
        Path | None, own("FOLDER", "Folder for restarts.jsonl and the output of ranks 1 and up.")
    ] = None,
    module: Annotated[bool, own(None, "SCRIPT is a module, as for python -m.", "--module", "-m")] = False,
    last_call: Annotated[
        str, own("TIME", "How long a large enough world waits for missing hosts.")
    ] = f"{DEFAULT.last_call:g}s",
    wait: Annotated[str, shared("wait")] = f"{DEFAULT.join:g}s",
    grace: Annotated[
        str | None,
        own(
            "TIME",
            f"From SIGTERM to SIGKILL when ranks must end; default {DEFAULT.end:g}s, and {DEFAULT.leave:g}s where this "
            "command got SIGTERM or SIGUSR1, for them to save and leave.",
        ),
    ] = None,
    name: Annotated[str, shared("name", ", where one server serves several")] = "run",
    insecure: Annotated[bool, shared("insecure", ": several hosts without a job key")] = False,
    serve: Annotated[
        str | None, own("HOST:PORT", "Only serve a rendezvous, on a host that does not train.")
    ] = None,
) -> None:
    """Run a script as ranks on one host or several, and restart it after a failure.

    Examples: paceline run --nproc-per-node 4 train.py --epochs 3

    paceline run --nnodes 3 --nproc-per-node 2 --min-ranks 4 --rendezvous pc1:29400 train.py

    The second is started on every host. Ranks get the environment variables of torchrun. Arguments after the script
    are passed to it. Restarts lose little work if the script resumes from its last checkpoint.

    Several hosts need a job key, the same on each, which keeps others out of the run:
    (umask 077; openssl rand -hex 32 > job.key), and then PACELINE_JOB_KEY_FILE=job.key on every host.
    """
    if serve is not None:
        if script or rendezvous:
            raise UsageError(
                "--serve runs no script",
                remedy="serve on one host, and run the script on others by --rendezvous",
            )
        serve_rendezvous(parse_rendezvous_address(serve), insecure=insecure)
        return
    if not script:
        raise UsageError("no script to run", remedy="for example: paceline run --nproc-per-node 2 train.py")
    least, hosts = parse_nnodes(nnodes)
    if min_ranks is not None and ":" in nnodes:
        raise UsageError(
            "both --min-ranks and --nnodes MIN:MAX set the fewest ranks", remedy="give one of them"
        )
    job = JobSpec(
        ["-m", *script] if module else script,
        nproc_per_node,
        nproc_per_node * least if min_ranks is None else min_ranks,
        hosts=hosts,
        max_restarts=max_restarts,
        address=None if rendezvous is None else parse_rendezvous_address(rendezvous),
        name=name,
        rejoin=rejoin,
        recovery=cast(Literal["live", "restart"], recovery),  # checked by JobSpec
        insecure=insecure,
        log_dir=log_dir,
        timeouts=JobTimeouts(
            last_call=_positive_seconds("--last-call", last_call),
            join=_positive_seconds("--wait", wait),
            end=DEFAULT.end if grace is None else _positive_seconds("--grace", grace),
            leave=DEFAULT.leave if grace is None else _positive_seconds("--grace", grace),
        ),
    )
    try:
        run_job(job)
    except RankFailed as error:
        from paceline.tools.cli.app import print_error

        print_error(error)
        raise typer.Exit(error.exit_code) from None


def _positive_seconds(option: str, text: str) -> float:
    seconds = parse_seconds(text)
    if seconds <= 0:
        raise UsageError(f"{option} {text}: must be above 0", remedy=f"for example: {option} 10s")
    return seconds
