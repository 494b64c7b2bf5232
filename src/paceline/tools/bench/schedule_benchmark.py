"""Schedules of collectives: their predicted cost, and their time when real processes run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from statistics import median
from typing import Any

from paceline._core.json_codec import encode
from paceline.collectives.algorithms import algorithms_of, has_root, make_schedule
from paceline.collectives.schedule import Schedule, pipelined
from paceline.collectives.simulated_cost import ScheduleCost, simulate_cost
from paceline.collectives.topology import Topology
from paceline.errors import UsageError
from paceline.tools.bench.rank_jobs import StartRanks, run_rank_job
from paceline.tools.result_files import result_head

__all__ = [
    "ELEMENT_NBYTES",
    "PricedCase",
    "ScheduleCase",
    "best_segments",
    "candidate_cases",
    "price_cases",
    "run_cases",
    "schedule_result",
]

ELEMENT_NBYTES = 4
"""Bytes of a vector's elements, which are float32."""

_SEGMENTS = (2, 4, 8, 16, 32, 64)
_LEAST_SAVING = 0.02  # share of the price that more segments must save
_LEAST_TIMEOUT = 120.0  # seconds


@dataclass(frozen=True)
class ScheduleCase:
    """An algorithm with its parameters.

    Attributes:
        op: the operation, as for `paceline.collectives.algorithms.make_schedule`.
        algorithm: likewise.
        ranks: number of ranks.
        root: the root, of operations that have one.
        segments: pieces of every chunk, each one round behind the one before.
        per_node: ranks of a node, of the two-level algorithm.
    """

    op: str
    algorithm: str
    ranks: int
    _: KW_ONLY
    root: int = 0
    segments: int = 1
    per_node: int | None = None

    @property
    def label(self) -> str:
        """Its name in a table."""
        return self.algorithm if self.segments == 1 else f"{self.algorithm}, {self.segments} segments"

    def schedule(self) -> Schedule:
        """Return its schedule."""
        whole = make_schedule(self.op, self.algorithm, self.ranks, root=self.root, per_node=self.per_node)
        return pipelined(whole, self.segments)

    def price(self, topology: Topology, nbytes: float, gamma: float = 0.0) -> ScheduleCost:
        """Return its predicted cost; parameters as for `paceline.collectives.simulated_cost.simulate_cost`."""
        return simulate_cost(self.schedule(), topology, nbytes, gamma)


def best_segments(price_of: Callable[[int], float]) -> int:
    """Return the number of segments, of 1, 2, 4 … 64, beyond which more save less than 2 %."""
    best, least = 1, price_of(1)
    for segments in _SEGMENTS:
        price = price_of(segments)
        if price < (1 - _LEAST_SAVING) * least:
            best, least = segments, price
    return best


def candidate_cases(
    op: str, topology: Topology, nbytes: float, gamma: float = 0.0, root: int = 0
) -> Iterator[ScheduleCase]:
    """Yield every algorithm of an operation, without segments and with as many as the model recommends.

    Raises:
        UsageError: the operation or the root is unknown.
    """
    for name in algorithms_of(op):
        whole = ScheduleCase(
            op,
            name,
            topology.ranks,
            root=root if has_root(op, name) else 0,
            per_node=max(2, topology.per_node) if name == "two-level" else None,
        )
        yield whole

        def price_of(segments: int, whole: ScheduleCase = whole) -> float:
            return replace(whole, segments=segments).price(topology, nbytes, gamma).seconds

        segments = best_segments(price_of) if topology.ranks > 2 and nbytes else 1
        if segments > 1:
            yield replace(whole, segments=segments)


@dataclass(frozen=True)
class PricedCase:
    """A case with its predicted and measured times.

    Attributes:
        case: the algorithm.
        price: its predicted cost.
        seconds: measured times of the slowest rank, one per run.
        receipts: of every rank, as text, of the last run.
    """

    case: ScheduleCase
    price: ScheduleCost
    seconds: Sequence[float] = ()
    receipts: Sequence[str] = ()

    @property
    def measured(self) -> float | None:
        """The median of `seconds`; None if it was not run."""
        return median(self.seconds) if self.seconds else None

    def to_json(self) -> dict[str, Any]:
        """Return it for JSON: times in seconds, sizes in bytes."""
        return encode(self.case) | {
            "rounds": len(self.case.schedule().rounds),
            "messages": len(self.price.messages),
            "nbytes_of_all_messages": round(self.price.nbytes),
            "priced_s": self.price.seconds,
            "measured_s": self.measured,
            "seconds": list(self.seconds),
            "receipts": list(self.receipts),
        }


def price_cases(
    cases: Sequence[ScheduleCase], topology: Topology, nbytes: int, gamma: float
) -> list[PricedCase]:
    """Return the cases with their predicted costs."""
    return [PricedCase(case, case.price(topology, nbytes, gamma)) for case in cases]


def run_cases(
    priced: Sequence[PricedCase],
    start: StartRanks,
    *,
    nbytes: int,
    iterations: int,
    backend: str,
    network: str,
    stream: bool,
) -> list[PricedCase]:
    """Run all cases on real ranks, interleaved, and return them with their times.

    Args:
        priced: cases of one number of ranks.
        start: starts the ranks.
        nbytes: size of the vector.
        iterations: runs of each case.
        backend: of the messages, such as ``"gloo"``.
        network: name of the network between the ranks.
        stream: forward each piece as soon as it has arrived, instead of round by round.

    Raises:
        UsageError: fewer than one iteration, or a vector with fewer elements than ranks.
        RankFailed: a rank ended with an error, such as a wrong result.
        HostFailed: a host failed.
    """
    ranks = priced[0].case.ranks
    if iterations < 1:
        raise UsageError(f"iterations={iterations}: give at least 1")
    if nbytes < ranks * ELEMENT_NBYTES:
        raise UsageError(
            f"{nbytes} bytes hold fewer float32 than there are ranks, {ranks}",
            remedy=f"give {ranks * ELEMENT_NBYTES} bytes or more when the collective is run",
        )
    job = {
        "cases": [encode(one.case) for one in priced],
        "nbytes": nbytes,
        "iterations": iterations,
        "backend": backend,
        "network": network,
        "stream": stream,
        "timeout": max(_LEAST_TIMEOUT, 4 * max(one.price.seconds for one in priced)),
    }
    found = run_rank_job(start, "paceline.tools.bench.schedule_worker", job, ranks)
    return [
        replace(one, seconds=of_case["seconds"], receipts=of_case["receipts"])
        for one, of_case in zip(priced, found, strict=True)
    ]


def schedule_result(
    priced: Sequence[PricedCase], topology: Topology, settings: Mapping[str, object], command: str
) -> dict[str, Any]:
    """Return predictions and measurements for JSON; `command` reproduces them."""
    links = [
        {"name": link.name, "bandwidth": min(link.bandwidth, 1e30), "latency": link.latency}
        for link in topology.links
    ]
    return result_head("collective", (), command=command) | {
        "topology": {"name": topology.name, "ranks": topology.ranks, "links": links},
        "settings": dict(settings),
        "rows": [one.to_json() for one in priced],
    }
