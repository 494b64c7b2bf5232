"""Measurement behind ``paceline exchange``: the exchange alone, the work alone, and both overlapped, per round."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from paceline._core.json_codec import decode, encode
from paceline.transport.mpi_exchange.exchange_settings import ExchangeSettings
from paceline.transport.mpi_exchange.message_carrier import MpiCarrier
from paceline.transport.mpi_exchange.ring_and_all_to_all import (
    AllToAllExchange,
    ExchangeOutcome,
    RingExchange,
)
from paceline.transport.mpi_exchange.round_reports import ExchangeProblem

__all__ = [
    "ExchangeMeasurement",
    "RankMeasurement",
    "SlicedWork",
    "measure_exchange",
    "overlap_share",
    "tick_count",
]

_SLICE_NUMEL = 50_000  # about 0.3 ms of sines


def overlap_share(work_seconds: float, exchange_seconds: float, both_seconds: float) -> float | None:
    """Return the share of the shorter time that is hidden behind the longer one.

    (work + exchange − both) ÷ min(work, exchange): 1 if both together take as long as the longer one alone, 0 if as
    long as one after the other, negative if they slow each other down; None if one of them takes no time.

    Args:
        work_seconds: time of the work alone.
        exchange_seconds: time of the exchange alone.
        both_seconds: time of both, overlapped.

    Example:
        >>> overlap_share(2.0, 1.0, 2.0), overlap_share(2.0, 1.0, 2.5), overlap_share(2.0, 1.0, 3.0)
        (1.0, 0.5, 0.0)
    """
    shorter = min(work_seconds, exchange_seconds)
    return (work_seconds + exchange_seconds - both_seconds) / shorter if shorter > 0 else None


class SlicedWork:
    """Fixed amount of computation on one core, done in slices.

    Args:
        seconds: approximate time of all slices; their number is calibrated once, on construction.

    Attributes:
        count: number of slices.
    """

    def __init__(self, seconds: float) -> None:
        self._numbers, self._out = np.linspace(0, 1, _SLICE_NUMEL), np.empty(_SLICE_NUMEL)
        self.count = self._left = 0
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            np.sin(self._numbers, out=self._out)
            self.count += 1

    def restart(self) -> SlicedWork:
        """Mark all slices as not done, and return self."""
        self._left = self.count
        return self

    def __call__(self) -> bool:
        """Do a slice, if any is left; return whether one was."""
        if self._left == 0:
            return False
        self._left -= 1
        np.sin(self._numbers, out=self._out)
        return True

    def run_alone(self) -> float:
        """Do all slices and return the seconds they took."""
        self.restart()
        started = time.perf_counter()
        while self():
            pass
        return time.perf_counter() - started


@dataclass(frozen=True, kw_only=True)
class RankMeasurement:
    """Measurement of one rank; the fields are those of the JSON output.

    Attributes:
        rank: its number.
        sent_to: target ranks.
        received_from: source ranks.
        nbytes: bytes sent, and received, per round.
        sent_checksum: of the last sent messages, hexadecimal.
        told_checksum: of the last received messages, as their senders computed it; hexadecimal.
        received_checksum: of the last received messages; hexadecimal.
        whole: whether the last received messages were whole.
        seconds: median time of a round without work.
        nbytes_per_second: `nbytes` divided by that time.
        work_seconds: median time of the work alone; None without work.
        both_seconds: median time of a round with work; None without work.
        overlap: see `overlap_share`.
        under_way: median share of the work done while messages were in flight.
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
        """Whether the received data equals the sent data."""
        return self.whole and self.told_checksum == self.received_checksum


@dataclass(frozen=True)
class ExchangeMeasurement:
    """Measurements of all ranks, equal on every rank.

    Attributes:
        rows: by rank.
        problems: errors of any rank; the first round with one is the last round.
        rounds: number of rounds begun.
        closed: whether all sent messages were received; if not, MPI can't be finalised.
    """

    rows: tuple[RankMeasurement, ...]
    problems: tuple[ExchangeProblem, ...]
    rounds: int
    closed: bool


def tick_count(settings: ExchangeSettings) -> int:
    """Return how often `measure_exchange` ticks if there are no problems."""
    return settings.rounds * (3 if settings.work_seconds else 1)


def measure_exchange(
    settings: ExchangeSettings, carrier: MpiCarrier, tick: Callable[[], None]
) -> ExchangeMeasurement:
    """Run and measure an exchange; a collective call.

    Args:
        settings: equal on all ranks.
        carrier: of the messages.
        tick: called after each step of a round.

    Raises:
        MissingEnvelope: a rank reported nothing in time; names it.
    """
    kind = {"ring": RingExchange, "all-to-all": AllToAllExchange}[settings.shape]
    exchange = kind(
        carrier,
        timeout=settings.timeout,
        frame_nbytes=settings.frame_nbytes,
        fault=settings.fault if carrier.rank == settings.faulty_rank else "",
    )
    nbytes = settings.nbytes_of_rank(carrier.size)
    data, into = _test_data(nbytes, carrier.rank), np.zeros(nbytes, np.uint8)
    work = SlicedWork(settings.work_seconds) if settings.work_seconds else None
    alone: list[ExchangeOutcome] = []
    both: list[ExchangeOutcome] = []
    work_seconds: list[float] = []
    for _ in range(settings.rounds):
        exchange.all_gather()  # a barrier
        alone.append(exchange.exchange(data, into))
        tick()
        if work is not None and not alone[-1].problems:
            exchange.all_gather()
            work_seconds.append(work.run_alone())
            tick()
            exchange.all_gather()
            both.append(exchange.exchange(data, into, work.restart()))
            tick()
        if (both or alone)[-1].problems or alone[-1].problems:
            break
    last = alone[-1] if alone[-1].problems or not both else both[-1]
    shares = [each.overlapped_slices / work.count for each in both] if work and work.count else []
    row = _measurement(
        settings,
        carrier,
        last,
        seconds=[each.seconds for each in alone],
        work_seconds=work_seconds,
        both_seconds=[each.seconds for each in both],
        shares=shares,
    )
    rows = tuple(decode(each, RankMeasurement, "measurement") for each in exchange.all_gather(encode(row)))
    return ExchangeMeasurement(rows, last.problems, len(alone), last.closed)


def _test_data(nbytes: int, rank: int) -> np.ndarray:
    """Return bytes that differ between ranks."""
    numbers = np.arange(-(-nbytes // 4), dtype=np.int32)
    numbers *= 2 * rank + 1
    return numbers.view(np.uint8)[:nbytes]


def _measurement(
    settings: ExchangeSettings,
    carrier: MpiCarrier,
    last: ExchangeOutcome,
    *,
    seconds: list[float],
    work_seconds: list[float],
    both_seconds: list[float],
    shares: list[float],
) -> RankMeasurement:
    rank, size, ring = carrier.rank, carrier.size, settings.shape == "ring"
    nbytes, alone = settings.nbytes_of_rank(size), median(seconds)
    work = median(work_seconds) if work_seconds else None
    both = median(both_seconds) if both_seconds else None
    return RankMeasurement(
        rank=rank,
        sent_to=((rank + 1) % size,) if ring else tuple(range(size)),
        received_from=((rank - 1) % size,) if ring else tuple(range(size)),
        nbytes=nbytes,
        sent_checksum=f"{last.sent_checksum:016x}",
        told_checksum=f"{last.expected_checksum:016x}",
        received_checksum=f"{last.received_checksum:016x}",
        whole=last.whole,
        seconds=alone,
        nbytes_per_second=nbytes / alone if alone else 0.0,
        work_seconds=work,
        both_seconds=both,
        overlap=None if work is None or both is None else overlap_share(work, alone, both),
        under_way=median(shares) if shares else None,
    )
