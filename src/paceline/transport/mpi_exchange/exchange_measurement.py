"""A rank's part in `paceline exchange`: the exchange alone, the work alone, both, round after round.

How far work and an exchange go on at the same time (pure), and work to try it with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from paceline.transport.mpi_exchange.exchange_settings import ExchangeSettings
from paceline.transport.mpi_exchange.polled_agreement import ExchangeProblem
from paceline.transport.mpi_exchange.ring_and_all_to_all import (
    AllToAllExchange,
    ExchangeOutcome,
    MpiCarrier,
    RingExchange,
)

__all__ = [
    "ExchangeMeasurement",
    "RankMeasurement",
    "SlicedWork",
    "measure_exchange",
    "overlap_share",
    "tick_count",
]

_SLICE_NUMEL = 50_000  # some 0.3 ms of sines


def overlap_share(work_seconds: float, exchange_seconds: float, both_seconds: float) -> float | None:
    """Return the part of the shorter of two times that is hidden behind the longer.

    1: both together take no longer than the longer one alone. 0: as long as one after the other. Below 0: they
    hinder each other. None: one of them takes no time at all.

        (work + exchange − both) ÷ min(work, exchange)

    Args:
        work_seconds: the work alone.
        exchange_seconds: the exchange alone.
        both_seconds: the same work and the same exchange at the same time.

    Example:
        >>> overlap(2.0, 1.0, 2.0), overlap(2.0, 1.0, 2.5), overlap(2.0, 1.0, 3.0)
        (1.0, 0.5, 0.0)
    """
    shorter = min(work_seconds, exchange_seconds)
    return (work_seconds + exchange_seconds - both_seconds) / shorter if shorter > 0 else None


class SlicedWork:
    """A fixed amount of computing on one core, done slice by slice.

    Args:
        seconds: about how long all of it takes alone; it is counted out when this is made, and then stays.

    Attributes:
        count: slices in all.
    """

    def __init__(self, seconds: float) -> None:
        self._numbers, self._out = np.linspace(0, 1, _SLICE_NUMEL), np.empty(_SLICE_NUMEL)
        self.count = self._left = 0
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            np.sin(self._numbers, out=self._out)
            self.count += 1

    def again(self) -> SlicedWork:
        """Make all of it left to do, and return this."""
        self._left = self.count
        return self

    def __call__(self) -> bool:
        """Do a slice, if one is left; return whether one was."""
        if self._left == 0:
            return False
        self._left -= 1
        np.sin(self._numbers, out=self._out)
        return True

    def alone(self) -> float:
        """Do all of it and return the seconds that it took."""
        self.again()
        started = time.perf_counter()
        while self():
            pass
        return time.perf_counter() - started


@dataclass(frozen=True)
class RankMeasurement:
    """What one rank saw.

    Attributes:
        rank: which.
        sent_to, received_from: ranks.
        nbytes: sent in a round, and received.
        sent_checksum: of what it sent last; told_checksum: what its sources told it of theirs;
            received_checksum: of what it received. Hexadecimal; told and received are equal where all is well.
        seconds: of a round without work, median; nbytes_per_second: `nbytes` in that time.
        work_seconds: of the work alone, median; both_seconds: of a round with the work, median; None without work.
        whole: every message that it last received was whole.
        overlap: as `overlap_share` defines it; under_way: share of the work done while messages were under way.
    """

    rank: int
    sent_to: tuple[int, ...]
    received_from: tuple[int, ...]
    nbytes: int
    sent_checksum: str
    told_checksum: str
    received_checksum: str
    whole: bool
    seconds: float
    nbytes_per_second: float
    work_seconds: float | None
    both_seconds: float | None
    overlap: float | None
    under_way: float | None

    @property
    def correct(self) -> bool:
        """Whether what came is what was sent."""
        return self.whole and self.told_checksum == self.received_checksum


@dataclass(frozen=True)
class ExchangeMeasurement:
    """What all ranks saw, the same on every rank.

    Attributes:
        rows: by rank.
        problems: what any rank found; the first round with one was the last.
        rounds: how many were begun.
        closed: whether all messages that were sent were also received; if not, MPI can't be left in order.
    """

    rows: tuple[RankMeasurement, ...]
    problems: tuple[ExchangeProblem, ...]
    rounds: int
    closed: bool


def tick_count(settings: ExchangeSettings) -> int:
    """Return how often `measure_exchange` ticks if all goes well."""
    return settings.rounds * (3 if settings.work_seconds else 1)


def measure_exchange(
    settings: ExchangeSettings, carrier: MpiCarrier, tick: Callable[[], None]
) -> ExchangeMeasurement:
    """Exchange, and return what all ranks saw; every rank of the carrier has to call.

    Args:
        settings: the same on all ranks.
        carrier: what carries the messages.
        tick: called after each turn.

    Raises:
        MissingEnvelope: some rank told nothing in time; it is named.
    """
    kind = {"ring": RingExchange, "all-to-all": AllToAllExchange}[settings.shape]
    exchange = kind(
        carrier,
        timeout=settings.timeout,
        frame_nbytes=settings.frame_nbytes,
        fault=settings.fault if carrier.rank == settings.faulty_rank else "",
    )
    nbytes = settings.nbytes_of_rank(carrier.size)
    data, into = _numbers(nbytes, carrier.rank), np.zeros(nbytes, np.uint8)
    slices = SlicedWork(settings.work_seconds) if settings.work_seconds else None
    alone: list[ExchangeOutcome] = []
    both: list[ExchangeOutcome] = []
    work: list[float] = []
    for _ in range(settings.rounds):
        exchange.meet()
        alone.append(exchange.exchange(data, into))
        tick()
        if slices is not None and not alone[-1].problems:
            exchange.meet()
            work.append(slices.alone())
            tick()
            exchange.meet()
            both.append(exchange.exchange(data, into, slices.again()))
            tick()
        if (both or alone)[-1].problems or alone[-1].problems:
            break
    last = alone[-1] if alone[-1].problems or not both else both[-1]
    row = _row(settings, carrier, nbytes, last, (alone, work, both), slices.count if slices else 0)
    rows = tuple(_unpacked(each) for each in exchange.meet(asdict(row)))
    return ExchangeMeasurement(rows, last.problems, len(alone), last.closed)


def _numbers(nbytes: int, rank: int) -> np.ndarray:
    """Return bytes of 32-bit numbers that are other ones on every rank."""
    numbers = np.arange(-(-nbytes // 4), dtype=np.int32)
    numbers *= 2 * rank + 1
    return numbers.view(np.uint8)[:nbytes]


def _row(
    settings: ExchangeSettings,
    carrier: MpiCarrier,
    nbytes: int,
    last: ExchangeOutcome,
    times: tuple[list[ExchangeOutcome], list[float], list[ExchangeOutcome]],
    slices: int,
) -> RankMeasurement:
    alone, work, both = times
    rank, size = carrier.rank, carrier.size
    ring = settings.shape == "ring"
    seconds = median(each.seconds for each in alone)
    work_seconds = median(work) if work else None
    both_seconds = median(each.seconds for each in both) if both else None
    return RankMeasurement(
        rank,
        ((rank + 1) % size,) if ring else tuple(range(size)),
        ((rank - 1) % size,) if ring else tuple(range(size)),
        nbytes,
        f"{last.sent_checksum:016x}",
        f"{last.told_checksum:016x}",
        f"{last.received_checksum:016x}",
        last.whole,
        seconds,
        nbytes / seconds if seconds else 0.0,
        work_seconds,
        both_seconds,
        None
        if work_seconds is None or both_seconds is None
        else overlap_share(work_seconds, seconds, both_seconds),
        median(each.slices_under_way / slices for each in both) if both and slices else None,
    )


def _unpacked(facts: Mapping[str, Any]) -> RankMeasurement:
    values: dict[str, Any] = {**facts}
    for name in ("sent_to", "received_from"):
        values[name] = tuple(values[name])
    return RankMeasurement(**values)
