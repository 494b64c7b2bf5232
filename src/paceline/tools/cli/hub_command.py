"""``paceline hub``: the switch node of asynchronous training.

Options of ``paceline hub`` alone: where it serves, whom it lets in, and whom it refuses.
"""

from __future__ import annotations

import secrets
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline._core.units import parse_seconds
from paceline.errors import UsageError
from paceline.tools.cli.hub_options import (
    BoundOption,
    DownOption,
    MarginOption,
    OuterLrOption,
    OuterMomentumOption,
    OuterOption,
    OuterWarmupOption,
    PopulationOption,
    StalenessOption,
    UnstableOption,
    outer_of,
)

if TYPE_CHECKING:
    from paceline.async_dp.hub.hub_rules import HubRules

__all__ = [
    "BandwidthOption",
    "BindOption",
    "ExplodingOption",
    "FolderOption",
    "GapOption",
    "InsecureOption",
    "KeysOption",
    "NewOption",
    "PerturbOption",
    "QuarantineOption",
    "RunOption",
    "ShardOption",
    "SilentAfterOption",
    "SnapshotEveryOption",
    "StrikesOption",
    "UntilOption",
    "WorseOption",
    "app",
]

_PORT = 7077


app = typer.Typer(invoke_without_command=True, no_args_is_help=False)


@app.callback()
def hub(
    context: typer.Context,
    bind: BindOption = f"tcp://127.0.0.1:{_PORT}",
    folder: FolderOption = Path("runs/hub"),
    run: RunOption = "",
    new: NewOption = False,
    keys: KeysOption = None,
    insecure: InsecureOption = False,
    outer: OuterOption = "averaging",
    outer_lr: OuterLrOption = None,
    outer_momentum: OuterMomentumOption = 0.9,
    outer_warmup: OuterWarmupOption = 1,
    unstable: UnstableOption = False,
    staleness: StalenessOption = "accept",
    bound: BoundOption = 16.0,
    exploding: ExplodingOption = 10.0,
    worse: WorseOption = 0.05,
    strikes: StrikesOption = 3,
    quarantine: QuarantineOption = "60s",
    down: DownOption = "bf16",
    population: PopulationOption = None,
    margin: MarginOption = 0.05,
    perturb: PerturbOption = 1.0,
    gap: GapOption = None,
    shard: ShardOption = "0/1",
    bandwidth: BandwidthOption = None,
    silent_after: SilentAfterOption = "15s",
    snapshot_every: SnapshotEveryOption = 500,
    until: UntilOption = None,
) -> None:
    """Serve asynchronous training: take in what workers send, in the order in which it comes.

    Workers are programs with paceline.AsyncDataParallel(model, optim, hub=...). The hub needs no model and no
    GPU. Killed and started
    again with the same folder it goes on where it was, and workers connect again by themselves.
    """
    if context.invoked_subcommand is not None:
        return
    from paceline.async_dp.hub.hub_rules import (
        HubRules,
        HubShard,
        PopulationRules,
        ScreeningRules,
        StalenessPolicy,
    )
    from paceline.async_dp.worker.worker_resources import bandwidth_limit

    if not (exploding == 0 or exploding > 1):
        raise UsageError(
            f"--exploding {exploding:g}", remedy="give a number above 1, such as 10, or 0 for none"
        )
    rules = HubRules(
        outer=outer_of(outer, outer_lr, outer_momentum, outer_warmup, unstable),
        staleness=StalenessPolicy(staleness, bound),
        screen=ScreeningRules(exploding, worse, strikes, 10, parse_seconds(quarantine)),
        population=None
        if population is None
        else PopulationRules(population, margin, perturb=perturb, gap=gap),
        down=down,
        shard=HubShard(*_shard(shard)),
        bandwidth=bandwidth_limit(bandwidth, None),
        silent_after=parse_seconds(silent_after),
        snapshot_every=snapshot_every,
    )
    seconds = None if until is None else parse_seconds(until)
    _serve(bind, folder, run, new, keys, insecure, rules, seconds)


@app.command("keygen")
def keygen(
    folder: Annotated[Path, typer.Argument(help="Where keys are kept.")],
    worker: Annotated[str, typer.Option(help="Make a key for a worker of this name.")] = "worker",
) -> None:
    """Make the keys of a hub, and one for workers; again with another --worker for one more.

    Give each worker its file (key=), and the hub the folder (--keys). Whoever has none gets nowhere.
    """
    from paceline.transport.zmq.curve_keys import make_keys

    made = make_keys(folder, worker)
    typer.echo(f"hub:    paceline hub --bind 'tcp://*:{_PORT}' --keys {folder}")
    typer.echo(
        f"worker: paceline.AsyncDataParallel(..., key={str(made)!r})   (copy the file there; it is a secret)"
    )


def _shard(text: str) -> tuple[int, int]:
    index, _, of = text.partition("/")
    if not index.isdecimal() or not of.isdecimal():
        raise UsageError(f"--shard {text!r}", remedy="write which of how many, such as 0/2")
    return int(index), int(of)


def _serve(
    bind: str,
    folder: Path,
    run: str,
    new: bool,
    keys: Path | None,
    insecure: bool,
    rules: HubRules,
    seconds: float | None,
) -> None:
    """Serve until it is interrupted, or the time is up."""
    from paceline.async_dp.hub.hub import Hub
    from paceline.async_dp.hub.hub_server import HubServer
    from paceline.async_dp.wal.hub_journal import HubJournal
    from paceline.tools.cli.hub_live_table import HubTable
    from paceline.transport.zmq import HubExchange, SocketSettings
    from paceline.transport.zmq.curve_keys import HubKeys

    exchange = HubExchange(
        bind,
        "",
        keys=None if keys is None else HubKeys.read(keys),
        insecure=insecure,
        settings=SocketSettings(rate=rules.bandwidth),
    )
    try:
        with HubJournal.open(folder, resume=not new) as journal:
            name = _name_of_run(run, journal)
            hub_ = Hub(name, rules, journal, time.time)
            server, ended = HubServer(hub_, exchange), _Ended(seconds)
            with HubTable(hub_, exchange, folder) as table:
                server.run(ended, table.look)
    finally:
        exchange.close()


def _name_of_run(run: str, journal: object) -> str:
    from paceline.async_dp.wal.hub_journal import HubJournal

    assert isinstance(journal, HubJournal)
    known = str(journal.run_facts.get("run", ""))
    if known and run and run != known:
        raise UsageError(
            f"the folder holds run {known!r}, --run says {run!r}",
            remedy="choose another folder, or leave --run out",
        )
    name = known or run or f"run-{secrets.token_hex(4)}"
    if not known:
        journal.describe({"run": name})
    return name


class _Ended:
    """Tells whether to stop: after SIGINT or SIGTERM, or when the time is up."""

    def __init__(self, seconds: float | None) -> None:
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        if self._asked:
            sys.exit(130)
        self._asked = True

    def __call__(self) -> bool:
        return self._asked or (self._deadline is not None and time.monotonic() >= self._deadline)


BindOption = Annotated[
    str, typer.Option(help="Where workers connect: tcp://HOST:PORT, tcp://*:PORT for all interfaces.")
]


FolderOption = Annotated[
    Path, typer.Option(help="Journal, snapshots and ledger; a run that is there goes on.")
]


RunOption = Annotated[str, typer.Option(help="Name of the run; else drawn, or the one in the folder.")]


NewOption = Annotated[bool, typer.Option("--new", help="Begin a run; refuse a folder that holds one.")]


KeysOption = Annotated[Path | None, typer.Option(help="Folder that keygen made; needed beyond this machine.")]


InsecureOption = Annotated[
    bool, typer.Option("--insecure", help="Let everybody in who can reach the address.")
]


ExplodingOption = Annotated[
    float, typer.Option(help="Refuse updates of so many times the usual norm; 0: none.")
]


WorseOption = Annotated[float, typer.Option(help="Refuse updates whose score got worse by so much.")]


StrikesOption = Annotated[int, typer.Option(help="Refusals of ten after which a worker is in quarantine.")]


QuarantineOption = Annotated[str, typer.Option(help="How long, the first time.")]


PerturbOption = Annotated[
    float, typer.Option(help="Of a population: factor on the learning rate of who is replaced.")
]


GapOption = Annotated[
    float | None, typer.Option(help="Of a population: share ahead at which all join the best early.")
]


ShardOption = Annotated[str, typer.Option(metavar="I/N", help="Which of several hubs this is.")]


BandwidthOption = Annotated[
    str | None, typer.Option(help="Most to send and to receive: 40MB/s, 30% of 1Gbit/s.")
]


SilentAfterOption = Annotated[str, typer.Option(help="Silence after which a worker does not count.")]


SnapshotEveryOption = Annotated[int, typer.Option(help="Updates between snapshots.")]


UntilOption = Annotated[str | None, typer.Option(help="Stop after so long, such as 8h.")]
