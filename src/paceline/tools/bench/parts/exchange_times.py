"""What exchanges take as a training makes them: alone, and from one to the next where several are under way.

[Note: alone and queued] A call that is alone begins at a barrier and is waited for at once. Queued calls are launched
one after another without waiting, as buckets are while backward runs: latency, and whatever else calls can hide behind
each other, then counts once. What each further call adds is the time of k calls less that of one, by k − 1 (at least
half of a k-th, where one call was disturbed).
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
from paceline.parallel.engine.bucket import ALIGN
from paceline.parallel.engine.comm import Comm
from paceline.tools.bench.parts.device_clock import now, slowest

__all__ = ["OPS", "Exchanger", "Key", "Pending", "measure_points", "priced", "sizes_up_to"]

OPS = ("all-reduce", "reduce-scatter", "all-gather")
_LEAST_NBYTES = 1024
_LEAST_LARGEST = 1 << 20  # a smaller one tells nothing of the bandwidth
_MOST_ITERATIONS, _FEWEST_ITERATIONS = 60, 2
_QUEUED_BELOW = ((4 << 20, 16), (16 << 20, 4))  # bytes, calls in a row of messages that are smaller
_QUEUED_LARGEST = 2

Key = tuple[str, str, bool]  # caller, operation, queued


class Pending(Protocol):
    """An exchange under way."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class Exchanger:
    """Makes the exchanges of one caller on its group.

    Attributes:
        caller: ``"paceline"``: through the engine's `Comm`; ``"torch"``: by a call of ``torch.distributed``.
        backend: of the group.
        wire: the ranks. device: of the buffers.
    """

    caller: str
    backend: str
    comm: Comm
    device: str

    @property
    def ops(self) -> tuple[str, ...]:
        """The exchanges that the caller makes."""
        return OPS if self.caller == "paceline" else ("all-reduce",)

    def buffers(self, nbytes: int, count: int) -> list[torch.Tensor]:
        """Return zeros of at least so many bytes each, in parts alike for all ranks; sums of zeros stay zeros."""
        unit = ALIGN * self.comm.size
        numel = -(-nbytes // 4 // unit) * unit
        made = [self.comm.allocate(numel, torch.float32, torch.device(self.device)) for _ in range(count)]
        return [flat.zero_() for flat in made]

    def launch(self, op: str, flat: torch.Tensor) -> Pending:
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
    exchanger: Exchanger, sizes: Sequence[int], seconds: float, tick: Callable[[], None]
) -> dict[Key, list[MeasuredPoint]]:
    """Return the times of a caller's exchanges; all ranks call it.

    Args:
        exchanger: who makes them. sizes: in bytes. seconds: a size takes about so long, at most.
        tick: says that one more size is measured.
    """
    points: dict[Key, list[MeasuredPoint]] = {}
    for op in exchanger.ops:
        for nbytes in sizes:
            count = next((calls for below, calls in _QUEUED_BELOW if nbytes < below), _QUEUED_LARGEST)
            buffers = exchanger.buffers(nbytes, count)
            alone, several = _in_turns(exchanger, op, buffers, seconds)
            each = max((several - alone) / (count - 1), several / (2 * count))
            for queued, value in ((False, alone), (True, each)):
                point = MeasuredPoint(buffers[0].nbytes, exchanger.comm.size, value)
                points.setdefault((exchanger.caller, op, queued), []).append(point)
            tick()
    return points


def _in_turns(
    exchanger: Exchanger, op: str, buffers: Sequence[torch.Tensor], seconds: float
) -> tuple[float, float]:
    """Return the median times of one exchange and of exchanges of all buffers, of the slowest rank; both in turns."""

    def once(chosen: Sequence[torch.Tensor]) -> float:
        dist.barrier()
        began = now(exchanger.device)
        for pending in [exchanger.launch(op, flat) for flat in chosen]:
            pending.wait()
        return now(exchanger.device) - began

    def turn() -> tuple[float, float]:
        return once(buffers[:1]), once(buffers)

    turn()
    turns = [turn()]
    first = sum(slowest(turns[0], exchanger.device))
    iterations = max(_FEWEST_ITERATIONS, min(_MOST_ITERATIONS, int(seconds / max(first, 1e-6))))
    turns += [turn() for _ in range(iterations - 1)]
    alone, several = (median(slowest(column, exchanger.device)) for column in zip(*turns, strict=True))
    return alone, several


def priced(
    key: Key,
    backend: str,
    network: str,
    points: Sequence[MeasuredPoint],
    earlier: Sequence[ExchangeCost],
    source: Source,
) -> ExchangeCost:
    """Return the fitted cost of an exchange; earlier points of other numbers of ranks join in.

    Args:
        key: which exchange. backend, network: where. points: of one number of ranks.
        earlier: costs that a profile holds. source: how the points were made.
    """
    caller, op, queued = key
    ranks = {point.ranks for point in points}
    same = [each for each in earlier if each.key == (caller, backend, op, network, queued)]
    kept = [point for each in same for point in each.points if point.ranks not in ranks]
    every = sorted([*kept, *points], key=lambda point: (point.ranks, point.nbytes))
    return ExchangeCost(
        caller, backend, network, queued, fit=fit_points(every, op), points=tuple(every), source=source
    )
