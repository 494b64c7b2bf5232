"""``paceline hub``: serves asynchronous training, and makes the keys for it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument

from paceline._core.units import parse_seconds
from paceline.errors import UsageError, require
from paceline.tools.cli.shared_options import hub_optimizer, merge_rules
from paceline.tools.command_options import own, shared

if TYPE_CHECKING:
    from paceline.async_dp.hub.hub_settings import HubRules
    from paceline.async_dp.wal.hub_journal import HubJournal
    from paceline.transport.zmq import HubExchange
    from paceline.transport.zmq.curve_keys import HubKeys

__all__ = ["app"]

_PORT = 7077
_FOLDER = Path("runs/hub")
_KEYS = "keys"  # folder in that of the hub
_SERVER, _RUN, _MERGING, _SCREENING, _POPULATION = (
    "Server",
    "Run folder",
    "Merging",
    "Screening",
    "Population",
)

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback()
def hub() -> None:
    """Serve asynchronous training, and make the keys for it."""


@app.command("serve")
def serve(
    bind: Annotated[
        str,
        own(
            "ADDRESS",
            "Address for workers: tcp://HOST:PORT, tcp://*:PORT for all interfaces, or ipc://PATH.",
            panel=_SERVER,
        ),
    ] = f"tcp://127.0.0.1:{_PORT}",
    keys: Annotated[
        Path | None,
        own(
            "FOLDER",
            "Folder of keys, made by keygen; default: the job's key, else keys in --out.",
            panel=_SERVER,
        ),
    ] = None,
    insecure: Annotated[bool, shared("insecure", "; no keys", panel=_SERVER)] = False,
    shard: Annotated[str, own("I/N", "Index of this hub, number of hubs.", panel=_SERVER)] = "0/1",
    standby: Annotated[
        str | None,
        own(
            "ADDRESS",
            "Wait, and take over from the hub at ADDRESS, whose folder is copied to --out; or shared: from the hub "
            "that has --out open.",
            panel=_SERVER,
        ),
    ] = None,
    bandwidth: Annotated[
        str | None, own("RATE", "Limit each way: 40MB/s, 30% of 1Gbit/s.", panel=_SERVER)
    ] = None,
    silent_after: Annotated[
        str, own("TIME", "Silence after which a worker no longer counts.", panel=_SERVER)
    ] = "15s",
    until: Annotated[str | None, own("TIME", "Stop after this time, such as 8h.", panel=_SERVER)] = None,
    out: Annotated[
        Path, shared("out", ": journal, snapshots and ledger; a run in it is resumed", panel=_RUN)
    ] = _FOLDER,
    name: Annotated[str, shared("name", "; default that in --out, or random", panel=_RUN)] = "",
    new: Annotated[
        bool, own(None, "Start a run; refuse a folder that holds one.", "--new", panel=_RUN)
    ] = False,
    snapshot_every: Annotated[int, own("N", "Updates between snapshots.", panel=_RUN)] = 500,
    merge: Annotated[str, shared("merge", panel=_MERGING)] = "arrival",
    quorum: Annotated[str | None, shared("quorum", "; default 50%", panel=_MERGING)] = None,
    outer: Annotated[
        str, shared("outer", ": averaging, delayed-nesterov, nesterov", panel=_MERGING)
    ] = "averaging",
    outer_lr: Annotated[
        float | None, shared("outer-lr", "; default 1 (averaging), else 0.7", panel=_MERGING)
    ] = None,
    outer_momentum: Annotated[float, shared("outer-momentum", panel=_MERGING)] = 0.9,
    outer_warmup: Annotated[int, shared("outer-warmup", panel=_MERGING)] = 1,
    unstable: Annotated[bool, shared("unstable", panel=_MERGING)] = False,
    staleness: Annotated[str, shared("staleness", panel=_MERGING)] = "accept",
    bound: Annotated[float, shared("bound", panel=_MERGING)] = 16.0,
    down: Annotated[str, shared("down", panel=_MERGING)] = "bf16",
    exploding: Annotated[
        float, own("X", "Reject updates of this many times the usual norm; 0: none.", panel=_SCREENING)
    ] = 10.0,
    worse: Annotated[
        float, own("X", "Reject updates whose score worsened by this share.", panel=_SCREENING)
    ] = 0.05,
    strikes: Annotated[
        int, own("N", "Rejections, of the last ten updates, before quarantine.", panel=_SCREENING)
    ] = 3,
    quarantine: Annotated[str, own("TIME", "Length of the first quarantine.", panel=_SCREENING)] = "60s",
    population: Annotated[int | None, shared("population", panel=_POPULATION)] = None,
    margin: Annotated[float, shared("margin", panel=_POPULATION)] = 0.05,
    perturb: Annotated[
        float, own("X", "Population: factor on a replaced worker's learning rate.", panel=_POPULATION)
    ] = 1.0,
    gap: Annotated[
        float | None, own("X", "Population: lead at which all adopt the best early.", panel=_POPULATION)
    ] = None,
    prometheus: Annotated[
        str | None, own("HOST:PORT", "Serve metrics for Prometheus at this address.", panel=_SERVER)
    ] = None,
) -> None:
    """Serve asynchronous training: merge the updates of workers, each on arrival or those of a round together.

    Workers are programs with paceline.AsyncDataParallel(model, optim, hub=...). The hub needs no model and no GPU.
    Killed and restarted with the same folder, it resumes, and workers reconnect automatically.

    On this machine hub="runs/hub", the folder of --out, is enough: it holds the address, and the keys if there are none
    elsewhere. Workers on other machines need a copy of the file FOLDER/keys/worker.key (key=).
    """
    from paceline.async_dp.hub.hub_settings import HubRules, HubShard, PopulationRules, ScreeningRules
    from paceline.async_dp.hub.staleness_policy import StalenessPolicy
    from paceline.async_dp.worker.worker_resources import bandwidth_limit
    from paceline.transport.zmq import HubExchange, SocketSettings

    if not (exploding == 0 or exploding > 1):
        raise UsageError(
            f"--exploding {exploding:g}", remedy="give a number above 1, such as 10, or 0 for none"
        )
    rules = HubRules(
        outer=hub_optimizer(outer, outer_lr, outer_momentum, outer_warmup, unstable),
        merge=merge_rules(merge, quorum),
        staleness=StalenessPolicy(staleness, bound),
        screen=ScreeningRules(exploding, worse, strikes, 10, parse_seconds(quarantine)),
        population=None
        if population is None
        else PopulationRules(population, margin, perturb=perturb, gap=gap),
        down=down,
        shard=HubShard(*_parse_shard(shard)),
        bandwidth=bandwidth_limit(bandwidth, None),
        silent_after=parse_seconds(silent_after),
        snapshot_every=snapshot_every,
    )
    seconds = None if until is None else parse_seconds(until)
    _check_standby(standby, new, keys, insecure, out)
    hub_keys, worker_key = _hub_keys(keys, bind, insecure, out)
    exchange = HubExchange(
        bind, "", keys=hub_keys, insecure=insecure, settings=SocketSettings(rate=rules.bandwidth)
    )
    stop = _StopCondition(seconds)
    try:
        journal = _open_journal(out, new, standby, exchange, hub_keys, rules.silent_after, stop)
        if journal is None:
            return
        with journal:
            run = _run_name(name, journal)
            _serve_run(journal, rules, exchange, hub_keys, run, standby, worker_key, prometheus, stop)
    finally:
        stop.restore()
        exchange.close()


def _serve_run(
    journal: HubJournal,
    rules: HubRules,
    exchange: HubExchange,
    keys: HubKeys | None,
    run: str,
    standby: str | None,
    worker_key: Path | None,
    prometheus: str | None,
    stop: Callable[[], bool],
) -> None:
    """Serve the run in a journal, with table and metrics, until `stop` returns True."""
    from paceline.async_dp.hub.hub import Hub
    from paceline.async_dp.hub.hub_server import HubServer
    from paceline.async_dp.protocol.hub_record import HubRecord
    from paceline.async_dp.standby.standby_hub import begin_term
    from paceline.async_dp.standby.standby_link import StandbyLink
    from paceline.async_dp.standby.takeover import SHARED, FormerHub
    from paceline.async_dp.wal.hub_term import HubTerm
    from paceline.integrations.loggers.hub_metrics import HubMetrics
    from paceline.tools.cli.hub_live_table import HubLiveTable

    folder = journal.folder.path
    term = HubTerm.read(folder) if standby is None else begin_term(journal, time.time)
    served = Hub(run, rules, journal, time.time)
    link = StandbyLink(journal, run, term, "" if keys is None else keys.secret, time.time)
    served.welcome_meta = link.welcome_meta
    server = HubServer(served, exchange, link)
    with contextlib.ExitStack() as stack:
        key = "" if worker_key is None else os.path.relpath(worker_key, folder)
        stack.enter_context(HubRecord(exchange.address, socket.gethostname(), key).kept_in(folder))
        shown: list[HubLiveTable | HubMetrics | FormerHub] = []
        if standby not in (None, SHARED):
            shown.append(stack.enter_context(FormerHub(standby, run, link.proof, keys)))
        metrics = None if prometheus is None else stack.enter_context(HubMetrics(server, prometheus))
        shown.append(stack.enter_context(HubLiveTable(served, exchange, folder)))
        if metrics is not None:
            typer.echo(f"metrics at {metrics.url}")
            shown.append(metrics)
        server.run(stop, lambda: [each.refresh() for each in shown])


@app.command("keygen")
def keygen(
    folder: Annotated[Path, Argument(help="Folder of the keys.")],
    worker: Annotated[str, own("NAME", "Make a key for a worker of this name.")] = "worker",
) -> None:
    """Make the keys of a hub, and one for workers; call it again with another --worker for one more.

    Give each worker its file (key=), and the hub the folder (--keys). Workers without a key are rejected, and a worker
    whose file in FOLDER/workers is removed is disconnected.
    """
    from paceline.transport.zmq.curve_keys import make_keys

    made = make_keys(folder, worker)
    typer.echo(f"hub:    paceline hub serve --bind 'tcp://*:{_PORT}' --keys {folder}")
    typer.echo(
        f"worker: paceline.AsyncDataParallel(..., key={str(made)!r})   (copy the file there; it is a secret)"
    )


def _hub_keys(keys: Path | None, bind: str, insecure: bool, out: Path) -> tuple[HubKeys | None, Path | None]:
    """Return the hub's keys, and the file with the key of workers of this user; None: there is none.

    The first that is given counts: the folder `keys`, `insecure`, the job's key. Else an ``ipc`` address, which only
    this user reaches, needs none; for others keys are made in the hub's folder.
    """
    from paceline._core.job_key import JobKey
    from paceline.transport.hub_address import parse_hub_address
    from paceline.transport.zmq.curve_keys import HubKeys, make_keys

    if keys is None:
        if insecure:
            return None, None
        job = JobKey.from_environment(os.environ)
        if job is not None:
            return HubKeys.of_job(job), None
        if parse_hub_address(bind, bind=True).transport == "ipc":
            return None, None
        keys = out / _KEYS
        if not keys.exists():
            make_keys(keys)
    worker = (keys.parent if keys.is_file() else keys) / "worker.key"
    return HubKeys.read(keys), worker if worker.exists() else None


def _parse_shard(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not index.isdecimal() or not count.isdecimal():
        raise UsageError(f"--shard {text!r} is not INDEX/COUNT", remedy="for example --shard 0/2")
    return int(index), int(count)


def _check_standby(standby: str | None, new: bool, keys: Path | None, insecure: bool, out: Path) -> None:
    """Raise unless the options of a standby belong together."""
    from paceline._core.job_key import JobKey
    from paceline.async_dp.standby.takeover import SHARED, check_shared_folder
    from paceline.transport.hub_address import parse_hub_address

    if standby is None:
        return
    require(not new, "--new with --standby", "leave --new out: a standby continues a run")
    if standby == SHARED:
        check_shared_folder(out)
    else:
        local = parse_hub_address(standby, bind=False).transport == "ipc"
        known = keys is not None or insecure or local or JobKey.from_environment(os.environ) is not None
        require(
            known,
            f"--standby {standby} without keys",
            "copy the active hub's folder of keys here: --keys FOLDER",
        )


def _open_journal(
    out: Path,
    new: bool,
    standby: str | None,
    exchange: HubExchange,
    keys: HubKeys | None,
    silent_after: float,
    stop: Callable[[], bool],
) -> HubJournal | None:
    """Open the journal; as a standby, once this hub must take over. None: `stop` returned True before."""
    from paceline.async_dp.standby.standby_hub import term_of
    from paceline.async_dp.standby.takeover import SHARED, follow_active_hub, wait_for_folder
    from paceline.async_dp.wal.hub_journal import HubJournal

    if standby is None:
        term_of(out)
        return HubJournal.open(out, resume=not new)
    where = f"standby, workers at {exchange.address}, folder {out}"
    if standby == SHARED:
        typer.echo(f"{where}: waiting until no other hub has the folder open")
        lock = wait_for_folder(out, exchange, stop)
        return None if lock is None else HubJournal.open(out, resume=True, lock=lock)
    typer.echo(f"{where}: following the hub at {standby}")
    taken = follow_active_hub(
        standby,
        out,
        exchange,
        keys,
        silent_after=silent_after,
        stop=stop,
        on_state=lambda state: typer.echo(f"standby: {state}"),
    )
    return HubJournal.open(out, resume=True) if taken else None


def _run_name(run: str, journal: HubJournal) -> str:
    """Return the name of the run in the journal; of a new run, record the given name or a random one."""
    from paceline.async_dp.wal.hub_term import StandbyMark

    mark = StandbyMark.read(journal.folder.path)
    known = str(journal.run_facts.get("run", "")) or ("" if mark is None else mark.run)
    if known and run and run != known:
        raise UsageError(
            f"the folder holds run {known!r}, but --name names {run!r}",
            remedy="choose another folder, or leave --name out",
        )
    name = known or run or f"run-{secrets.token_hex(4)}"
    if not journal.run_facts:
        journal.describe({"run": name})
    return name


class _StopCondition:
    """Callable that returns True after SIGINT, SIGTERM or a number of seconds; a second signal exits at once."""

    def __init__(self, seconds: float | None) -> None:
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._signalled = False
        self._before = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }

    def restore(self) -> None:
        """Restore the handlers before."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._signalled:
            sys.exit(130)
        self._signalled = True

    def __call__(self) -> bool:
        return self._signalled or (self._deadline is not None and time.monotonic() >= self._deadline)
