"""Collective schedules on hosts: links carry exactly the predicted bytes."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from wire import Wire

from paceline.collectives.topology import star
from paceline.tools.bench.schedule_benchmark import ScheduleCase

HEADERS = 1.08  # Ethernet, IP, TCP, and acknowledgements of what goes the other way
START = 300_000  # bytes: rendezvous, and an exchange of times
NBYTES, TIMES = 600_000, 2
CASES = [
    ScheduleCase("broadcast", "one-by-one", 3),
    ScheduleCase("broadcast", "chain", 3, segments=4),
    ScheduleCase("reduce", "tree", 3, root=1),
    ScheduleCase("all-reduce", "ring", 3),
]


@pytest.mark.thorough
@pytest.mark.parametrize("stream", [False, True])
def test_links_carry_the_priced_bytes(wire: Wire, tmp_path, stream):
    lab, job, out = wire.lab, tmp_path / "job.json", tmp_path / "found.json"
    description = {
        "cases": [asdict(case) for case in CASES],
        "nbytes": NBYTES,
        "iterations": TIMES,
        "backend": "gloo",
        "network": "test",
        "stream": stream,
        "timeout": 60,
        "out": str(out),
    }
    job.write_text(json.dumps(description))
    before = [lab.bytes(host) for host in range(3)]
    lab.torchrun(["-m", "paceline.tools.bench.schedule_worker", str(job)], ranks_per_host=1, timeout=120)
    moved = [lab.bytes(host) - before[host] for host in range(3)]
    found = json.loads(out.read_text())
    assert [(len(one["seconds"]), len(one["receipts"])) for one in found] == [(TIMES, 3)] * len(CASES)
    prices = [case.price(star(3, 12.5e6), NBYTES) for case in CASES]
    for host in range(3):
        sent, received = (
            TIMES * sum(price.nbytes_of_link[f"{way} {host}"] for price in prices) for way in ("up", "down")
        )
        assert sent <= moved[host].sent <= HEADERS * sent + START
        assert received <= moved[host].received <= HEADERS * received + START
