"""Whether asynchronous training keeps to its share of the network, and leaves the rest to others.

    python benchmarks/asynchronous/share.py run      (as root, on Linux)
    python benchmarks/asynchronous/share.py table

Two hosts on a link of 200 Mbit/s: a hub with ``--bandwidth`` on one, a worker with ``bandwidth=`` on the other, which
exchange a large model as often as they may. The interfaces are read every 100 ms; then a file is sent beside them, in
each direction, and alone.
"""

from __future__ import annotations

import socket
import time
from typing import Annotated

import torch
from typer import Option

import paceline
from bench_harness.benchmark import Benchmark
from bench_harness.lab_run import open_lab, results
from bench_harness.markdown import table
from paceline._core.units import parse_rate
from paceline.testing.netlab import Lab
from paceline.tools.cli.shared_options import JsonOption

WARM_SECONDS, FILE_SECONDS = 15.0, 8.0
TURNS = {"up": 1, "down": 0}
"""Host that sends the file."""

bench = Benchmark(__file__)


@bench.run
def run(
    rate: Annotated[str, Option(help="Rate of the link, each direction.")] = "200Mbit/s",
    share: Annotated[str, Option(help="Share of it for training.")] = "30%",
    seconds: Annotated[float, Option(help="Seconds for which the interfaces are watched.")] = 30.0,
    json_file: JsonOption = None,
) -> None:
    """Watch a training that keeps to a share of a link, alone and beside a file."""
    path = bench.output(json_file, "share")
    link, bandwidth = parse_rate(rate), f"{share} of {rate}"
    with open_lab(2, rate, title="share of a link", turns=5) as (lab, folder, tick):

        def send_files() -> dict[str, float]:
            found = {}
            for name, host in TURNS.items():
                found[name] = file_rate(lab, host) / link
                tick()
            return found

        alone = send_files()
        serve = ["paceline", "hub", "serve", "--bind", "tcp://*:7077", "--insecure", "--bandwidth", bandwidth]
        hub = lab.start([*serve, "--out", str(folder / "hub")], on=0)
        worker = lab.start(bench.command(exchange, f"tcp://{lab.addresses[0]}:7077", bandwidth), on=1)
        time.sleep(WARM_SECONDS)
        rows = traffic(lab, seconds)
        tick()
        beside = send_files()
        worker.end()
        hub.end()
    directions = {"up": "sent", "down": "received"}
    bench.write(
        path,
        "share-of-a-link",
        {"rate": rate, "share": share, "seconds": seconds},
        link=link,
        busiest={name: busiest(rows, column) / link for name, column in directions.items()},
        mean={name: mean(rows, column) / link for name, column in directions.items()},
        file_alone=alone,
        file_beside=beside,
        rows=rows,
    )


def traffic(lab: Lab, seconds: float) -> list[dict[str, float]]:
    """Return what the worker's interface had sent and received, every 100 ms."""
    rows, began = [], time.monotonic()
    while (elapsed := time.monotonic() - began) < seconds:
        passed = lab.bytes(1)
        rows.append({"seconds": elapsed, "sent": passed.sent, "received": passed.received})
        time.sleep(max(0.0, 0.1 - (time.monotonic() - began - elapsed)))
    return rows


def busiest(rows: list[dict[str, float]], column: str) -> float:
    """Return the most bytes of any second, as a rate."""
    most, first = 0.0, 0
    for row in rows:
        while row["seconds"] - rows[first]["seconds"] > 1.0:
            first += 1
        span = row["seconds"] - rows[first]["seconds"]
        if span > 0.85:
            most = max(most, (row[column] - rows[first][column]) / span)
    return most


def mean(rows: list[dict[str, float]], column: str) -> float:
    """Return the mean rate."""
    return (rows[-1][column] - rows[0][column]) / (rows[-1]["seconds"] - rows[0]["seconds"])


def file_rate(lab: Lab, source: int) -> float:
    """Return the bytes per second of a file that one host sends to the other as fast as it goes."""
    target, port = 1 - source, 9000 + source
    receiving = lab.start(bench.command(receive, port), on=target)
    time.sleep(1.5)
    sending = lab.start(bench.command(send, lab.addresses[target], port), on=source)
    sending.wait(FILE_SECONDS + 60)
    return results(receiving, 60)[0]


@bench.process
def receive(port: int) -> float:
    """Receive from one connection until it ends, and return the bytes per second."""
    with socket.create_server(("0.0.0.0", port)) as server:
        connection, _ = server.accept()
        with connection:
            began, nbytes = time.monotonic(), 0
            while data := connection.recv(1 << 20):
                nbytes += len(data)
            return nbytes / (time.monotonic() - began)


@bench.process
def send(address: str, port: int) -> None:
    """Send for some seconds."""
    block, until = bytes(1 << 18), time.monotonic() + FILE_SECONDS
    with socket.create_connection((address, port)) as connection:
        while time.monotonic() < until:
            connection.sendall(block)


@bench.process
def exchange(hub: str, bandwidth: str) -> None:
    """Exchange a large model as often as possible, computing next to nothing, until this process is ended."""
    torch.set_num_threads(1)
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    with paceline.AsyncDataParallel(
        net, optimizer, hub, 2, 1, compression=None, bandwidth=bandwidth, insecure=True
    ):
        while True:
            for param in net.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            time.sleep(0.05)


@bench.tables
def tables() -> dict[str, str]:
    """Return the block of README.md: shares of the link, by direction."""
    result, columns = bench.read("share"), ("busiest", "mean", "file_alone", "file_beside")
    rows = [[name, *(f"{100 * result[column][name]:.1f} %" for column in columns)] for name in TURNS]
    titles = ["", "busiest second", "mean", "a file alone", "a file beside training"]
    return {"share": table(titles, rows)}


if __name__ == "__main__":
    bench.main()
