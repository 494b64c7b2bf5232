"""A hub under load: many workers on slow and fast links, a centre of 8 MiB, for half an hour.

    python benchmarks/asynchronous/load.py run --workers 40      (as root, on Linux)
    python benchmarks/asynchronous/load.py run --workers 200
    python benchmarks/asynchronous/load.py table

The workers are sessions of Paceline's own worker code without a model to train: each sends an update of zeros as soon
as it has received the parameters, and compares every packet with what the parameters must be. They share eight hosts,
four on slow links and four on fast ones, so the links are always full.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import psutil
import torch
from torch import nn
from typer import Option

from bench_harness.benchmark import Benchmark
from bench_harness.lab_run import host_number, open_lab, results
from bench_harness.markdown import table
from paceline._core.units import parse_rate
from paceline.async_dp.hub.hub import Hub
from paceline.async_dp.hub.hub_server import HubServer
from paceline.async_dp.hub.hub_settings import HubRules
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.async_dp.wal.worker_outbox import Outbox
from paceline.async_dp.worker.fragment_replica import FragmentReplica, FragmentState
from paceline.async_dp.worker.hub_session import HubSession
from paceline.async_dp.worker.session_driver import SessionDriver
from paceline.async_dp.worker.session_state import SessionRequest
from paceline.tools.cli.shared_options import JsonOption
from paceline.transport.zmq import HubExchange, SocketSettings, WorkerExchange

NUMEL = 2 << 20  # 8 MiB of float32
HOSTS = 8  # of workers; every other one is slow
MEMORY_SECONDS = 5.0
SETTLED = 0.2  # share of the time after which memory must be flat
_POLL_SECONDS = 0.05  # the workers of a host take turns

bench = Benchmark(__file__)


@bench.run
def run(
    workers: Annotated[int, Option(help="Number of workers; a multiple of 8.")] = 40,
    minutes: Annotated[float, Option(help="Length of the run.")] = 30.0,
    slow: Annotated[str, Option(help="Rate of a slow host's link.")] = "20Mbit/s",
    fast: Annotated[str, Option(help="Rate of a fast host's link.")] = "100Mbit/s",
    json_file: JsonOption = None,
) -> None:
    """Load a hub, and measure shares and memory."""
    path = bench.output(json_file, f"load-{workers}")
    with open_lab(1 + HOSTS, title=f"{workers} workers", turns=10) as (lab, folder, tick):
        for host in range(1, 1 + HOSTS):
            lab.rate(host, slow if host % 2 else fast)
        seconds = 60 * minutes
        job = {
            "hub": f"tcp://{lab.addresses[0]}:7077",
            "folder": str(folder),
            "workers": workers // HOSTS,
            "until": time.time() + 15 + seconds,
        }
        serving = lab.start(bench.command(hub, job), on=0)
        loading = lab.start(bench.command(worker_host, job), on=range(1, 1 + HOSTS))
        for _ in range(10):
            time.sleep((15 + seconds) / 10)
            tick()
        rows = [row for host in results(loading, 240) for row in host]
        (served,) = results(serving, 120)
    settings = {"workers": workers, "minutes": minutes, "slow": slow, "fast": fast, "numel": NUMEL}
    bench.write(path, "hub-load", settings, **summary(rows, served, {"slow": slow, "fast": fast}, seconds))


def summary(
    rows: list[dict[str, Any]], served: dict[str, Any], rates: dict[str, str], seconds: float
) -> dict[str, Any]:
    """Return what the result holds: by kind of link the workers' shares; memory of the hub over time."""
    links = {}
    for kind, rate in rates.items():
        group = [row for row in rows if (row["host"] % 2 == 1) == (kind == "slow")]
        received = [row["received"] for row in group]
        nbytes = sum(row["nbytes"] for row in group)
        links[kind] = {
            "workers": len(group),
            "rounds": sum(received),
            "least_share": min(received) / mean(received),
            "most_share": max(received) / mean(received),
            "link_used": nbytes / (HOSTS / 2 * parse_rate(rate) * seconds),
        }
    memory = [row for row in served["memory"] if row["seconds"] >= SETTLED * seconds]
    half = len(memory) // 2
    return {
        "links": links,
        "updates": served["updates"],
        "acknowledged": sum(row["acknowledged"] for row in rows),
        "refused": served["refused"],
        "wrong_packets": sum(row["wrong"] for row in rows),
        "resent": sum(row["resent"] for row in rows),
        "memory_growth": mean(row["rss"] for row in memory[half:])
        / mean(row["rss"] for row in memory[:half]),
        "memory_peak": max(row["rss"] for row in served["memory"]),
        "hub_core_share": served["core_share"],
        "memory": served["memory"],
    }


@bench.process
def hub(job: dict[str, Any]) -> dict[str, Any]:
    """Serve until the time is over, and return the hub's memory over time."""
    exchange = HubExchange("tcp://*:7077", "", insecure=True)
    process, memory, began = psutil.Process(), list[dict[str, float]](), time.monotonic()
    with HubJournal.open(Path(job["folder"], "hub"), resume=False) as journal:
        hub = Hub("load", HubRules(snapshot_every=2000), journal, time.time)

        def log_memory() -> None:
            elapsed = time.monotonic() - began
            if not memory or elapsed >= memory[-1]["seconds"] + MEMORY_SECONDS:
                rss = process.memory_info().rss
                memory.append({"seconds": elapsed, "rss": rss, "updates": hub.updates})

        HubServer(hub, exchange).run(lambda: time.time() > job["until"] + 30, log_memory)
        used, elapsed = process.cpu_times(), time.monotonic() - began
        found = {
            "memory": memory,
            "updates": hub.updates,
            "refused": {**hub.refused, **exchange.refused},
            "core_share": (used.user + used.system) / elapsed,
        }
    exchange.close()
    return found


@bench.process
def worker_host(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Be the workers of one host, in one thread, until the time is over; return what each did."""
    torch.set_num_threads(1)
    net = nn.Linear(NUMEL, 1, bias=False)
    with torch.no_grad():
        net.weight.copy_((torch.arange(NUMEL) % 251) / 256)  # exact in bfloat16
    layout = ParameterLayout.of(net)
    replica = FragmentReplica(
        layout.fragments[0], dict(net.named_parameters()), UpdateCodec(layout.fragments[0], "int4")
    )
    replica.snapshot()
    workers = [
        LoadingWorker(1000 * host_number() + n, job["hub"], layout, replica) for n in range(job["workers"])
    ]
    while time.time() < job["until"]:
        waits = [each.turn(time.monotonic()) for each in workers]
        time.sleep(max(0.0, min(_POLL_SECONDS, *waits)))
    until = time.monotonic() + 25  # for what is under way
    while time.monotonic() < until and any(not each.session.idle for each in workers):
        for each in workers:
            each.turn(time.monotonic(), more=False)
        time.sleep(0.005)
    for each in workers:
        each.close()
    return [each.row() for each in workers]


class LoadingWorker:
    """A worker that exchanges as often as it can; all on one host share the numbers of one model."""

    def __init__(self, number: int, hub: str, layout: ParameterLayout, replica: FragmentReplica) -> None:
        self.replica = copy.copy(replica)  # shares the numbers, has a state of its own
        self.outbox = Outbox(None, number)
        sessions = iter(range(number * 10**6, number * 10**6 + 10**6))
        self.session = HubSession(
            number, f"worker{number}", layout, {0: self.replica}, self.outbox,
            hello_meta={"every": 1, "delay": 0}, new_session_id=lambda: next(sessions),
        )  # fmt: skip
        self.exchange = WorkerExchange(hub, number, settings=SocketSettings())
        self.driver = SessionDriver(self.session, self.exchange, time.monotonic)
        self.received = self.wrong = 0

    def turn(self, now: float, *, more: bool = True) -> float:
        """Take what arrived; ask for more."""
        wait = self.driver.turn(self.exchange.poll(0.0), now)
        replica, session = self.replica, self.session
        if session.hub_status.wants_params and replica.state is FragmentState.IDLE:
            session.hub_status.take_ask(now)
            replica.state = FragmentState.EXCHANGING
            session.requests.append(SessionRequest(0, "parameters"))
        elif replica.state is FragmentState.RECEIVED:
            self.received += 1
            self.wrong += not torch.equal(
                torch.as_tensor(replica._received), torch.as_tensor(replica._snapshot)
            )
            replica.revision, replica.state = replica.received_revision, FragmentState.IDLE
            torch.as_tensor(replica.base).copy_(torch.as_tensor(replica._snapshot))
        if more and replica.state is FragmentState.IDLE and replica.revision >= 0 and session.connected:
            replica.state = FragmentState.EXCHANGING
            meta = {"samples": 1.0, "steps": 1, "rate": 1.0}
            session.requests.append(SessionRequest(0, "update", now, meta))
            return 0.0
        return wait

    def row(self) -> dict[str, Any]:
        """Return what this worker did."""
        exchange, session = self.exchange, self.session
        return {
            "host": host_number(),
            "received": self.received,
            "wrong": self.wrong,
            "acknowledged": session.acknowledged,
            "resent": session.exchanges.resent,
            "nbytes": max(exchange.sent_nbytes, exchange.received_nbytes),
        }

    def close(self) -> None:
        """Disconnect."""
        self.driver.say_goodbye(time.monotonic())
        self.exchange.close()
        self.outbox.close()


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md: a row per number of workers and kind of link."""
    rows = []
    for found in sorted(bench.find("load-*").values(), key=lambda each: each["settings"]["workers"]):
        for kind, link in found["links"].items():
            rows.append(
                [
                    f"{link['workers']} on {found['settings'][kind]}",
                    f"{link['rounds']:,}",
                    f"{link['least_share']:.2f} · {link['most_share']:.2f}",
                    f"{link['link_used']:.0%}",
                    str(found["wrong_packets"]),
                    f"{found['memory_growth']:.3f}",
                    f"{found['memory_peak'] / 2**20:.0f} MiB",
                    f"{found['hub_core_share']:.2f}",
                ]
            )
    titles = [
        "workers", "rounds", "least · most of a fair share", "link used", "packets not whole",
        "hub's memory, second half ÷ first", "most", "of a core",
    ]  # fmt: skip
    return {"load": table(titles, rows)}


if __name__ == "__main__":
    bench.main()
