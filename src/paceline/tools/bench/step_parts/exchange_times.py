"""Times of exchanges as training makes them: alone, and queued behind one another.

[Note: alone and queued] An exchange alone begins at a barrier and is waited for at once. Queued ones are launched one
after another without waiting, as buckets are during backward: latency, and all else that they can hide behind one
another, then counts once. The time of each further one is that of k exchanges less that of one, divided by k − 1 (and
at least half of a k-th of them, in case the single one was disturbed).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch
import torch.distributed as dist

from paceline.cost_model.fit_measurements import MeasuredPoint, fit_points
from paceline.cost_model.profile_entries import ExchangeCost, Source
from paceline.parallel.buckets.bucket import ALIGN
from paceline.parallel.gradient_collectives import Comm
from paceline.tools.bench.device_clock import now, slowest_rank

__all__ = [
    "EXCHANGE_OPS",
    "ExchangeKey",
    "ExchangeWork",
    "Exchanger",
    "fit_exchange_cost",
    "measure_points",
    "sizes_up_to",
]

EXCHANGE_OPS = ("all-reduce", "reduce-scatter", "all-gather")
"""Exchanges of Paceline's engine."""

ExchangeKey = tuple[str, str, bool]
"""Caller, operation, queued."""

_LEAST_NBYTES = 1024
_LEAST_LARGEST = 1 << 20  # smaller messages do not show the bandwidth
_MOST_ITERATIONS, _FEWEST_ITERATIONS = 60, 2
_QUEUED_BELOW = ((4 << 20, 16), (16 << 20, 4))  # bytes, number of queued exchanges of smaller messages
_QUEUED_LARGEST = 2


class ExchangeWork(Protocol):
    """A pending exchange."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class Exchanger:
    """Launches exchanges as the engine does, or as torch does.

    Attributes:
        caller: ``"paceline"``: by the engine's `Comm`; ``"torch"``: by ``torch.distributed``.
        backend: of the group.
        comm: the ranks.
        device: of the buffers.
    """

    caller: str
    backend: str
    comm: Comm
    device: str

    @property
    def ops(self) -> tuple[str, ...]:
        """The exchanges that the caller makes."""
        return EXCHANGE_OPS if self.caller == "paceline" else ("all-reduce",)

    def buffers(self, nbytes: int, count: int) -> list[torch.Tensor]:
        """Return zeros of at least `nbytes` each, in equal parts for all ranks; sums of zeros stay zeros."""
        unit = ALIGN * self.comm.size
        numel = -(-nbytes // 4 // unit) * unit
        made = [self.comm.allocate(numel, torch.float32, torch.device(self.device)) for _ in range(count)]
        return [flat.zero_() for flat in made]

    def launch(self, op: str, flat: torch.Tensor) -> ExchangeWork:
        """Launch an exchange of a buffer."""
        if self.caller == "torch":
            work = dist.all_reduce(flat, group=self.comm.group, async_op=True)
            assert work is not None, "this rank belongs to the group"
            return work
        match op:
            case "all-reduce":
                return self.comm.all_reduce(flat)
            case "reduce-scatter":
                return self.comm.reduce_scatter(flat)
        return self.comm.all_gather(flat)

    def time(self, op: str, buffers: Sequence[torch.Tensor]) -> float:
        """Return this rank's seconds for one exchange of each buffer, queued; begins at a barrier."""
        dist.barrier()
        began = now(self.device)
        for work in [self.launch(op, flat) for flat in buffers]:
            work.wait()
        return now(self.device) - began


def sizes_up_to(nbytes: int) -> list[int]:
    """Return sizes from 1 KiB, each four times the one before, and at last `nbytes` itself, but 1 MiB at least.

    Example:
        >>> sizes_up_to(2_000_000)
        [1024, 4096, 16384, 65536, 262144, 1048576, 2000000]
    """
    most = max(nbytes, _LEAST_LARGEST)
    ladder = itertools.takewhile(
        lambda size: size < 0.7 * most, (_LEAST_NBYTES * 4**step for step in range(20))
    )
    return [*ladder, most]


def measure_points(
    exchanger: Exchanger, sizes: Sequence[int], seconds: float, advance: Callable[[], None]
) -> dict[ExchangeKey, list[MeasuredPoint]]:
    """Return the times of a caller's exchanges; a collective.

    Args:
        exchanger: launches them.
        sizes: in bytes.
        seconds: about the longest time for one size.
        advance: called after each size.
    """
    points: dict[ExchangeKey, list[MeasuredPoint]] = {}
    for op in exchanger.ops:
        for nbytes in sizes:
            count = next((calls for below, calls in _QUEUED_BELOW if nbytes < below), _QUEUED_LARGEST)
            buffers = exchanger.buffers(nbytes, count)
            alone, several = _time_interleaved(exchanger, op, buffers, seconds)
            each = max((several - alone) / (count - 1), several / (2 * count))
            for queued, value in ((False, alone), (True, each)):
                point = MeasuredPoint(buffers[0].nbytes, exchanger.comm.size, value)
                points.setdefault((exchanger.caller, op, queued), []).append(point)
            advance()
    return points


def _time_interleaved(
    exchanger: Exchanger, op: str, buffers: Sequence[torch.Tensor], seconds: float
) -> tuple[float, float]:
    """Return the slowest rank's median time of one exchange, and of exchanges of all buffers."""

    def turn() -> tuple[float, float]:
        return exchanger.time(op, buffers[:1]), exchanger.time(op, buffers)

    turn()
    turns = [turn()]
    first = sum(slowest_rank(turns[0], exchanger.device))
    iterations = max(_FEWEST_ITERATIONS, min(_MOST_ITERATIONS, int(seconds / max(first, 1e-6))))
    turns += [turn() for _ in range(iterations - 1)]
    alone, several = (median(slowest_rank(column, exchanger.device)) for column in zip(*turns, strict=True))
    return alone, several


def fit_exchange_cost(
    key: ExchangeKey,
    points: Sequence[MeasuredPoint],
    *,
    backend: str,
    network: str,
    earlier: Sequence[ExchangeCost],
    source: Source,
) -> ExchangeCost:
    """Return the fitted cost of an exchange, together with earlier points of other numbers of ranks.

    Args:
        key: the exchange.
        points: of one number of ranks.
        backend: of the exchange.
        network: name of the network.
        earlier: costs in a profile.
        source: records how the points were measured.
    """
    caller, op, queued = key
    ranks = {point.ranks for point in points}
    same = [each for each in earlier if each.key == (caller, backend, op, network, queued)]
    kept = [point for each in same for point in each.points if point.ranks not in ranks]
    every = sorted([*kept, *points], key=lambda point: (point.ranks, point.nbytes))
    return ExchangeCost(
        caller, backend, network, queued, fit=fit_points(every, op), points=tuple(every), source=source
    )
