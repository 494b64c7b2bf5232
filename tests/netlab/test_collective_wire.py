"""Schedules on hosts: links carry the bytes that the price says, no more and no fewer."""

from __future__ import annotations

import json

import pytest
from wire import Wire

from paceline.bench.schedules.case import Case
from paceline.topology import star

HEADERS = 1.08  # Ethernet, IP, TCP, acknowledgements of what goes the other way, and the start of the world
NBYTES = 600_000


@pytest.mark.parametrize(
    ("op", "algorithm", "segments"),
    [
        ("broadcast", "one-by-one", 1),
        ("broadcast", "tree", 1),
        ("broadcast", "chain", 4),
        ("all-reduce", "ring", 1),
    ],
)
def test_links_carry_what_is_priced(wire: Wire, tmp_path, op, algorithm, segments):
    lab, case = wire.lab, Case(op, algorithm, 3, segments=segments)
    job, out = tmp_path / "job.json", tmp_path / "found.json"
    description = {
        "cases": [case.to_json()],
        "nbytes": NBYTES,
        "iterations": 3,
        "backend": "gloo",
        "network": "test",
        "stream": segments == 1,
        "receipts": True,
        "timeout": 60,
        "out": str(out),
    }
    job.write_text(json.dumps(description))
    before = [lab.bytes(host) for host in range(3)]
    lab.torchrun(["-m", "paceline.bench.schedules.worker", str(job)], ranks_per_host=1, timeout=120)
    moved = [lab.bytes(host) - before[host] for host in range(3)]
    (found,) = json.loads(out.read_text())
    assert len(found["seconds"]) == 3
    assert len(found["receipts"]) == 3
    price = case.price(star(3, 12.5e6), NBYTES)
    for host in range(3):
        sent, received = 3 * price.nbytes_of_link[f"up {host}"], 3 * price.nbytes_of_link[f"down {host}"]
        assert sent <= moved[host].sent <= HEADERS * sent + 300_000
        assert received <= moved[host].received <= HEADERS * received + 300_000
