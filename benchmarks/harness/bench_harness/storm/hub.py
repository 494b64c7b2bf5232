"""The hub in a storm: `paceline hub`, whose answers are spoilt too, and which tells how much memory it takes.

python -m bench_harness.storm.hub JOB.json
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import psutil

from bench_harness.storm.spoil import spoil
from paceline.async_dp.hub.hub import Hub
from paceline.async_dp.hub.hub_rules import HubRules
from paceline.async_dp.hub.hub_server import HubServer
from paceline.async_dp.wal.hub_journal import HubJournal
from paceline.transport.zmq import HubExchange

__all__ = ["main"]

_EVERY_SECONDS = 2.0


def main(job_file: str) -> None:
    """Serve until it is asked to end, or killed."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    exchange = HubExchange(job["bind"], "", insecure=True)
    spoil(exchange, job["spoil"], seed=time.time_ns())
    me, told = psutil.Process(), 0.0
    with (
        HubJournal.open(Path(job["folder"], "hub"), resume=True) as journal,
        Path(job["folder"], "memory.jsonl").open("a", encoding="utf-8", buffering=1) as memory,
    ):
        hub = Hub("storm", HubRules(silent_after=5.0, snapshot_every=200), journal, time.time)

        def look() -> None:
            nonlocal told
            if time.monotonic() - told > _EVERY_SECONDS:
                told = time.monotonic()
                row = {"t": time.time(), "pid": me.pid, "rss": me.memory_info().rss, "updates": hub.updates}
                memory.write(json.dumps({**row, "refused": {**hub.refused, **exchange.refused}}) + "\n")

        HubServer(hub, exchange).run(lambda: bool(asked), look)
    exchange.close()


if __name__ == "__main__":
    main(sys.argv[1])
