"""Does a star keep to its share of the network, and leave the rest to others?

    python benchmarks/star/share.py

Two hosts on a link of 200 Mbit/s (`paceline.testing.netlab`; needs root): a hub with ``--bandwidth`` on one, a
worker with ``bandwidth=`` on the other, which exchange a large model as often as they may. The interfaces are read
every 100 ms; then a file is sent beside them, in each direction, and alone.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bench_harness.program import run_program
from paceline._core.files import write_json
from paceline._core.units import parse_rate
from paceline.testing.netlab import Lab, LabJob
from paceline.tools.cli.shared_options import JsonOption
from paceline.tools.result_files import check_writable, result_head

HERE = Path(__file__).parent
TICK = 0.1
WARM_SECONDS = 15.0


def watch(lab: Lab, seconds: float) -> list[dict[str, float]]:
    """Return what the worker's interface had sent and received, every 100 ms."""
    rows, began = [], time.monotonic()
    while (past := time.monotonic() - began) < seconds:
        traffic = lab.bytes(1)
        rows.append({"seconds": past, "sent": traffic.sent, "received": traffic.received})
        time.sleep(max(0.0, TICK - (time.monotonic() - began - past)))
    return rows


def busiest(rows: list[dict[str, float]], name: str) -> float:
    """Return the most bytes of any second, as a rate."""
    most, first = 0.0, 0
    for row in rows:
        while row["seconds"] - rows[first]["seconds"] > 1.0:
            first += 1
        span = row["seconds"] - rows[first]["seconds"]
        if span > 0.85:
            most = max(most, (row[name] - rows[first][name]) / span)
    return most


def mean(rows: list[dict[str, float]], name: str) -> float:
    """Return the mean rate."""
    return (rows[-1][name] - rows[0][name]) / (rows[-1]["seconds"] - rows[0]["seconds"])


def sent_file(lab: Lab, source: int, seconds: float) -> float:
    """Return bytes per second of a file that is sent from one host to the other as fast as it goes."""
    target = 1 - source
    receiving = lab.start([str(HERE / "transfer.py"), "receive", str(9000 + source)], on=target)
    time.sleep(1.5)
    address = f"{lab.addresses[target]}:{9000 + source}"
    sending = lab.start([str(HERE / "transfer.py"), "send", address, str(seconds)], on=source)
    sending.wait(seconds + 60)
    (result,) = receiving.wait(60)
    return float(result.stdout.split()[-1])


def main(
    rate: Annotated[str, typer.Option(help="Of the link, each direction.")] = "200Mbit/s",
    share: Annotated[str, typer.Option(help="Of it, for the star.")] = "30%",
    seconds: Annotated[float, typer.Option(help="That the interfaces are watched.")] = 30.0,
    json_file: JsonOption = None,
) -> None:
    """Watch a star that keeps to a share of a link, alone and beside a file."""
    path = json_file or HERE / "share.json"
    check_writable(path, make_folder=True)
    link = parse_rate(rate)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, Lab(2, rate) as lab:
        alone = {name: sent_file(lab, source, 8.0) for name, source in (("up", 1), ("down", 0))}
        bandwidth = f"{share} of {rate}"
        hub = lab.start(
            ["paceline", "hub", "--bind", "tcp://*:7077", "--insecure", "--bandwidth", bandwidth]
            + ["--folder", str(Path(folder, "hub"))],
            on=0,
        )
        worker = lab.start([str(HERE / "share_worker.py"), f"tcp://{lab.addresses[0]}:7077", bandwidth], on=1)
        time.sleep(WARM_SECONDS)
        rows = watch(lab, seconds)
        beside = {name: sent_file(lab, source, 8.0) for name, source in (("up", 1), ("down", 0))}
        _end(worker, hub)
    result: dict[str, Any] = result_head("share-of-a-link") | {
        "settings": {"rate": rate, "share": share, "seconds": seconds},
        "link": link,
        "busiest": {"up": busiest(rows, "sent") / link, "down": busiest(rows, "received") / link},
        "mean": {"up": mean(rows, "sent") / link, "down": mean(rows, "received") / link},
        "file_alone": {name: each / link for name, each in alone.items()},
        "file_beside": {name: each / link for name, each in beside.items()},
        "rows": rows,
    }
    write_json(path, result)
    print(
        json.dumps(
            {name: result[name] for name in ("busiest", "mean", "file_alone", "file_beside")}, indent=1
        )
    )
    print(path)


def _end(*jobs: LabJob) -> None:
    for job in jobs:
        job.end()


if __name__ == "__main__":
    run_program(main)
