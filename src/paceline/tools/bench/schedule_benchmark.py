"""Schedules carried out by real processes: priced beside measured.

What is priced and run: an algorithm, in how many segments (pure).

Prices schedules and, if asked, has ranks carry them out; the result beside the price.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from paceline.collectives.algorithms import algorithms_of, has_root, make_schedule
from paceline.collectives.schedule import Schedule, pipelined
from paceline.collectives.simulated_cost import ScheduleCost, simulate_cost
from paceline.collectives.topology import Topology
from paceline.errors import UsageError
from paceline.tools.bench.step.step_benchmark import StartRanks
from paceline.tools.result_files import machine_record

__all__ = ["ELEMENT_NBYTES", "Case", "Priced", "best_segments", "carry_out", "contenders", "price", "result"]

ELEMENT_NBYTES = 4
"""Of the float32 that are carried."""


_SEGMENTS = (1, 2, 4, 8, 16, 32, 64)


_WORTH = 0.02  # of the price: more segments must save that much to be taken


@dataclass(frozen=True)
class Case:
    """An algorithm as it is priced and run.

    Attributes:
        op, algorithm: as `catalogue.schedule` knows them.
        ranks: how many take part.
        root: the rank it is about.
        segments: pieces of every chunk, each one round behind the one before.
        per_node: of two-level: ranks of a node.
    """

    op: str
    algorithm: str
    ranks: int
    root: int = 0
    segments: int = 1
    per_node: int | None = None

    @property
    def label(self) -> str:
        """Its name in a table."""
        return self.algorithm if self.segments == 1 else f"{self.algorithm}, {self.segments} segments"

    def schedule(self) -> Schedule:
        """Return its schedule."""
        made = make_schedule(self.op, self.algorithm, self.ranks, root=self.root, per_node=self.per_node)
        return pipelined(made, self.segments)

    def price(self, topology: Topology, nbytes: float, gamma: float = 0.0) -> ScheduleCost:
        """Return what it costs."""
        return simulate_cost(self.schedule(), topology, nbytes, gamma)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Case:
        """Return what :meth:`to_json` gave."""
        return cls(**stored)


def best_segments(price_of: Callable[[int], float]) -> int:
    """Return the number of segments, of 1, 2, 4 … 64, beyond which more save less than 2 %."""
    best, least = 1, price_of(1)
    for segments in _SEGMENTS[1:]:
        price = price_of(segments)
        if price < (1 - _WORTH) * least:
            best, least = segments, price
    return best


def contenders(
    op: str, topology: Topology, nbytes: float, gamma: float = 0.0, root: int = 0
) -> Iterator[Case]:
    """Yield every algorithm of an operation whole, and in segments where the price says that they pay.

    Raises:
        UsageError: no such operation, or no such root.
    """
    ranks = topology.ranks
    for name in algorithms_of(op):
        rooted = root if has_root(op, name) else 0
        per_node = max(2, topology.per_node) if name == "two-level" else None
        whole = Case(op, name, ranks, rooted, 1, per_node)
        yield whole

        def price_of(
            segments: int, name: str = name, rooted: int = rooted, per_node: int | None = per_node
        ) -> float:
            return Case(op, name, ranks, rooted, segments, per_node).price(topology, nbytes, gamma).seconds

        segments = best_segments(price_of) if ranks > 2 and nbytes else 1
        if segments > 1:
            yield Case(op, name, ranks, rooted, segments, per_node)


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
    price: ScheduleCost
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
        start(["-m", "paceline.tools.bench.schedule_worker", str(job)], ranks, env={})
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
