"""Mutual slowdown of computing and exchanges.

Enough exchanges are launched to outlast a step's computing; then the step is computed, then the rest of the exchanges
is waited for. The end of each exchange is recorded, which gives the rate of exchanges during computing and after it:
their ratio is how much computing slows exchanges. The time of computing during exchanges, over that of the same step
just before, is how much they slow computing.
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
from paceline.tools.bench.device_clock import Moment, mark, seconds_between, slowest_rank
from paceline.tools.bench.step_parts.exchange_times import Exchanger, ExchangeWork
from paceline.tools.bench.step_parts.model_compute_times import WrappedModel
from paceline.world.accelerator import has_streams, make_stream, on_stream, synchronize

__all__ = ["completed_by", "measure_contention"]

_NBYTES = 1 << 20
_OUTLAST = 2.0  # time of the exchanges alone ÷ time of computing
_MOST_CALLS = 4000
_BUFFERS = 8
_LEAST_COMPLETED = 0.01  # of the exchanges that complete without computing; less counts as none


def measure_contention(
    exchanger: Exchanger,
    op: str,
    wrapped: WrappedModel,
    step: ModelStep,
    *,
    network: str,
    rounds: int,
    source: Source,
) -> Contention:
    """Return how much an exchange and the computing of a step slow each other; a collective.

    Args:
        exchanger: launches the exchanges.
        op: the exchange.
        wrapped: computes.
        step: the times of computing without exchanges.
        network: name of the network.
        rounds: repetitions.
        source: records how the measurement was started.
    """
    buffers = exchanger.buffers(_NBYTES, _BUFFERS)
    queue = [buffers[call % _BUFFERS] for call in range(4 * _BUFFERS)]
    (each,) = slowest_rank([exchanger.time(op, queue) / len(queue)], exchanger.device)
    calls = max(_BUFFERS, min(_MOST_CALLS, math.ceil(_OUTLAST * (step.forward + step.buffered) / each)))
    found = [_run_both(exchanger, op, wrapped, buffers, calls=calls, each=each) for _ in range(rounds + 1)][
        1:
    ]
    launch, computing, completed = (median(column) for column in zip(*found, strict=True))
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
        calls_slow=max(1.0, 1.0 / max(completed, _LEAST_COMPLETED)),
        source=source,
    )


def _run_both(
    exchanger: Exchanger,
    op: str,
    wrapped: WrappedModel,
    buffers: Sequence[torch.Tensor],
    *,
    calls: int,
    each: float,
) -> tuple[float, float, float]:
    """Return seconds of a launch, and two ratios, during ÷ without: time of computing, and rate of exchanges."""
    device = exchanger.device
    dist.barrier()
    bare = sum(wrapped.step()[:2])
    dist.barrier()
    start, times, pending = mark(device), [time.perf_counter()], []
    for call in range(calls):
        pending.append(exchanger.launch(op, buffers[call % len(buffers)]))
        times.append(time.perf_counter())
    recorder = _EndRecorder(pending, device)
    launch = median(later - earlier for earlier, later in itertools.pairwise(times))
    launched_at = mark(device)
    contended = sum(wrapped.step()[:2])
    computed_at = mark(device)
    ends = [seconds_between(start, moment) for moment in recorder.ends()]
    until, after = (seconds_between(start, moment) for moment in (launched_at, computed_at))
    before, done = completed_by(until, ends), completed_by(after, ends)
    rate = (done - before) / max(after - until, 1e-9)
    left = calls - done
    usual = left / (ends[-1] - after) if left >= 2 else 1.0 / each
    launch, bare, contended = slowest_rank([launch, bare, contended], device)
    return launch, contended / bare, rate / usual


def completed_by(seconds: float, ends: Sequence[float]) -> float:
    """Return the number of exchanges completed at a time, with the fraction of the current one.

    Args:
        seconds: the time.
        ends: end of each exchange; the first starts at 0, each further one at the end of the one before.

    Example:
        >>> completed_by(2.5, [1.0, 2.0, 4.0])
        2.25
    """
    ordered = list(itertools.accumulate(ends, max))
    whole = bisect.bisect_right(ordered, seconds)
    if whole == len(ordered):
        return float(whole)
    before = ordered[whole - 1] if whole else 0.0
    return whole + (seconds - before) / (ordered[whole] - before)


class _EndRecorder:
    """Records when each of many exchanges ends: by a thread that waits for them in order; on a GPU by a stream."""

    def __init__(self, pending: Sequence[ExchangeWork], device: str) -> None:
        self._ends: list[Moment] = []
        self._thread: threading.Thread | None = None
        self._device = torch.device(device)
        if has_streams(self._device):
            with on_stream(make_stream(self._device)):
                self._record(pending, device)
            return
        self._thread = threading.Thread(target=self._record, args=(pending, device), daemon=True)
        self._thread.start()

    def _record(self, pending: Sequence[ExchangeWork], device: str) -> None:
        for work in pending:
            work.wait()
            self._ends.append(mark(device))

    def ends(self) -> list[Moment]:
        """Return the moments, once all have passed."""
        if self._thread is not None:
            self._thread.join()
        else:
            synchronize(self._device)
        return self._ends
