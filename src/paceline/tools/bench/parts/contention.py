"""How much computing slows while exchanges are under way, and the other way round.

So many exchanges are launched that they outlast a step's computing; then comes the computing, then what is left of
them. When each of them ended is noted, so both rates are of the same seconds: exchanges per second beside computing,
and after it. The first over the second is how much computing slows them; the time of computing beside them, over that
of the same just before, is how much they slow computing.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
import time
from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from paceline.cost_model.profile_entries import Contention, ModelStep, Source
from paceline.tools.bench.parts.compute_times_of_model import Wrapped
from paceline.tools.bench.parts.device_clock import Moment, mark, now, seconds_between, slowest
from paceline.tools.bench.parts.exchange_times import Exchanger, Pending

__all__ = ["measure_contention", "passed_by"]

_NBYTES = 1 << 20
_OUTLAST = 2.0  # exchanges alone take so many times as long as the computing beside them
_MOST_CALLS = 4000
_BUFFERS = 8
_LEAST_PASSED = 0.01  # of the exchanges that pass alone; less can't be told from nothing


def measure_contention(
    exchanger: Exchanger,
    op: str,
    wrapped: Wrapped,
    step: ModelStep,
    network: str,
    rounds: int,
    source: Source,
) -> Contention:
    """Return what an exchange and the computing of a step do to each other; all ranks call it.

    Args:
        exchanger: who makes the exchanges. op: which one. wrapped: what computes. step: what that takes by itself.
        network: what carries the exchanges. rounds: repetitions. source: how it was asked for.
    """
    buffers = exchanger.buffers(_NBYTES, _BUFFERS)
    (each,) = slowest([_alone(exchanger, op, buffers, 4 * _BUFFERS)], exchanger.device)
    calls = max(_BUFFERS, min(_MOST_CALLS, math.ceil(_OUTLAST * (step.forward + step.buffered) / each)))
    found = [_together(exchanger, op, buffers, calls, wrapped, each) for _ in range(rounds + 1)][1:]
    launch, computing, passed = (median(column) for column in zip(*found, strict=True))
    return Contention(
        caller=exchanger.caller,
        backend=exchanger.backend,
        network=network,
        op=op,
        device=step.device,
        ranks=step.ranks,
        threads=step.threads,
        nbytes=buffers[0].nbytes,
        launch_seconds=launch,
        computing_slows=max(1.0, computing),
        calls_slow=max(1.0, 1.0 / max(passed, _LEAST_PASSED)),
        source=source,
    )


def _alone(exchanger: Exchanger, op: str, buffers: Sequence[torch.Tensor], calls: int) -> float:
    """Return the seconds of each of so many exchanges in a row on this rank."""
    dist.barrier()
    began = now(exchanger.device)
    for pending in [exchanger.launch(op, buffers[call % len(buffers)]) for call in range(calls)]:
        pending.wait()
    return (now(exchanger.device) - began) / calls


def _together(
    exchanger: Exchanger, op: str, buffers: Sequence[torch.Tensor], calls: int, wrapped: Wrapped, each: float
) -> tuple[float, float, float]:
    """Return seconds of a launch, computing beside exchanges over that before, and the rate of exchanges likewise."""
    device = exchanger.device
    dist.barrier()
    bare = sum(wrapped.step()[:2])
    dist.barrier()
    start, times, under_way = mark(device), [time.perf_counter()], []
    for call in range(calls):
        under_way.append(exchanger.launch(op, buffers[call % len(buffers)]))
        times.append(time.perf_counter())
    watch = _Watch(under_way, device)
    launch = median(later - earlier for earlier, later in itertools.pairwise(times))
    launched_at = mark(device)
    beside = sum(wrapped.step()[:2])
    computed_at = mark(device)
    ends = [seconds_between(start, moment) for moment in watch.ends()]
    until, after = (seconds_between(start, moment) for moment in (launched_at, computed_at))
    came, gone = passed_by(until, ends), passed_by(after, ends)
    rate = (gone - came) / max(after - until, 1e-9)
    left = calls - gone
    usual = left / (ends[-1] - after) if left >= 2 else 1.0 / each
    launch, bare, beside = slowest([launch, bare, beside], device)
    return launch, beside / bare, rate / usual


def passed_by(seconds: float, ends: Sequence[float]) -> float:
    """Return how many exchanges had passed by then, the one that was under way in part.

    Args:
        seconds: when. ends: when each ended; from 0 on they ran one after another.

    Example:
        >>> passed_by(2.5, [1.0, 2.0, 4.0])
        2.25
    """
    ordered = list(itertools.accumulate(ends, max))
    whole = bisect.bisect_right(ordered, seconds)
    if whole == len(ordered):
        return float(whole)
    before = ordered[whole - 1] if whole else 0.0
    return whole + (seconds - before) / (ordered[whole] - before)


class _Watch:
    """Notes when each of many exchanges ends: a thread that waits for one after another; on a GPU a stream."""

    def __init__(self, under_way: Sequence[Pending], device: str) -> None:
        self._ends: list[Moment] = []
        self._thread: threading.Thread | None = None
        if device.startswith("cuda"):
            with torch.cuda.stream(torch.cuda.Stream()):
                self._note(under_way, device)
            return
        self._thread = threading.Thread(target=self._note, args=(under_way, device), daemon=True)
        self._thread.start()

    def _note(self, under_way: Sequence[Pending], device: str) -> None:
        for pending in under_way:
            pending.wait()
            self._ends.append(mark(device))

    def ends(self) -> list[Moment]:
        """Return the moments, once all have come."""
        if self._thread is not None:
            self._thread.join()
        else:
            torch.cuda.synchronize()
        return self._ends
