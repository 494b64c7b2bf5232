"""Prices schedules and, if asked, has ranks carry them out; the result beside the price."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from paceline.bench.facts import machine_record
from paceline.bench.schedules.case import ELEMENT_NBYTES, Case
from paceline.bench.step import StartRanks
from paceline.collectives.cost import Price
from paceline.errors import UsageError
from paceline.topology import Topology

__all__ = ["Priced", "carry_out", "price", "result"]

_LEAST_TIMEOUT = 120.0  # seconds


@dataclass(frozen=True)
class Priced:
    """A case, its price, and what it took.

    Attributes:
        case: what it is about.
        price: by the model.
        seconds: of each time it was carried out: of the slowest rank.
        receipts: of every rank, in words, of the last time.
    """

    case: Case
    price: Price
    seconds: Sequence[float] = field(default=())
    receipts: Sequence[str] = field(default=())

    @property
    def measured(self) -> float | None:
        """The median of `seconds`; None if it was not carried out."""
        return median(self.seconds) if self.seconds else None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON takes it: times in seconds, sizes in bytes."""
        made = self.case.schedule()
        return self.case.to_json() | {
            "rounds": len(made.rounds),
            "messages": len(self.price.messages),
            "nbytes_of_all_messages": round(self.price.nbytes),
            "priced_s": self.price.seconds,
            "measured_s": self.measured,
            "seconds": list(self.seconds),
            "receipts": list(self.receipts),
        }


def price(cases: Sequence[Case], topology: Topology, nbytes: int, gamma: float) -> list[Priced]:
    """Return the cases with their prices."""
    return [Priced(case, case.price(topology, nbytes, gamma)) for case in cases]


def carry_out(
    priced: Sequence[Priced],
    start: StartRanks,
    *,
    nbytes: int,
    iterations: int,
    backend: str,
    network: str,
    stream: bool,
) -> list[Priced]:
    """Have ranks carry out all cases, in turn, and return them with what they took.

    Args:
        priced: cases of one number of ranks.
        start: starts the ranks.
        nbytes: size of the vector.
        iterations: how often each is carried out.
        backend: what carries the messages, such as ``"gloo"``.
        network: what is between the ranks, in words.
        stream: let pieces go on as soon as they are there, instead of round by round.

    Raises:
        UsageError: fewer than one iteration, or a vector that has no element for each rank.
        RankFailed, HostFailed: a rank ended with an error; a wrong result is one.
    """
    ranks = priced[0].case.ranks
    if iterations < 1:
        raise UsageError(f"iterations={iterations}: give at least 1")
    if nbytes < ranks * ELEMENT_NBYTES:
        raise UsageError(
            f"{nbytes} bytes are no float32 for each of {ranks} ranks",
            remedy=f"give {ranks * ELEMENT_NBYTES} bytes or more to what is carried out",
        )
    longest = max((one.price.seconds for one in priced), default=0.0)
    with tempfile.TemporaryDirectory(prefix="paceline-collective-") as folder:
        job, out = Path(folder, "job.json"), Path(folder, "found.json")
        description = {
            "cases": [one.case.to_json() for one in priced],
            "nbytes": nbytes,
            "iterations": iterations,
            "backend": backend,
            "network": network,
            "stream": stream,
            "timeout": max(_LEAST_TIMEOUT, 4 * longest),
            "out": str(out),
        }
        job.write_text(json.dumps(description), encoding="utf-8")
        start(["-m", "paceline.bench.schedules.worker", str(job)], ranks, env={})
        found = json.loads(out.read_text(encoding="utf-8"))
    return [
        Priced(one.case, one.price, of_case["seconds"], of_case["receipts"])
        for one, of_case in zip(priced, found, strict=True)
    ]


def result(
    priced: Sequence[Priced], topology: Topology, settings: Mapping[str, object], command: str
) -> dict[str, Any]:
    """Return all of it for JSON."""
    return {
        "kind": "collective",
        "schema": 1,
        "command": command,
        "machine": machine_record(),
        "topology": {
            "name": topology.name,
            "ranks": topology.ranks,
            "links": [
                {"name": link.name, "bandwidth": min(link.bandwidth, 1e30), "latency": link.latency}
                for link in topology.links
            ],
        },
        "settings": dict(settings),
        "rows": [one.to_json() for one in priced],
    }
