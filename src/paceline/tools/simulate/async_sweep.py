"""Simulates the same machines with one schedule after another, DDP first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean

from paceline._core.keyed_random import derive_key
from paceline.errors import EnvelopeError, UsageError
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
from paceline.tools.simulate.async_results import AsyncRow, LossPoint
from paceline.tools.simulate.async_settings import AsyncPlan
from paceline.tools.simulate.async_simulation import AsyncResult, simulate_async
from paceline.tools.simulate.learning_tasks import LearningTask
from paceline.tools.simulate.simulated_ddp import DdpPlan, simulate_ddp
from paceline.transport.envelope import Envelope, decode, encode

__all__ = ["RandomFaults", "sweep_schedules"]

_Tick = Callable[[LossPoint], object]


def sweep_schedules(
    plan: AsyncPlan,
    cadences: Sequence[SyncSchedule],
    task: LearningTask,
    *,
    with_ddp: bool = True,
    fault_share: float = 0.0,
    tick: _Tick = lambda _: None,
) -> Iterator[AsyncRow]:
    """Yield a row per schedule as soon as it is simulated.

    Args:
        plan: settings except the schedule.
        cadences: schedules of the rows.
        task: the task to train.
        with_ddp: start with DDP on the same machines and links, without churn and faults.
        fault_share: share of envelopes that are lost, repeated, late or damaged.
        tick: called with every point of a curve.
    """
    initial = task.learner(0, len(plan.machines)).score()
    if with_ddp:
        yield _lockstep_row(plan, task, initial, tick)
    for cadence in cadences:
        fault = RandomFaults(fault_share, plan.seed) if fault_share else None
        found = simulate_async(replace(plan, cadence=cadence, fault=fault), task, tick)
        row = _star_row(cadence, found, len(plan.machines), initial)
        fault_counts = (
            {f"spoilt: {name}": count for name, count in sorted(fault.counts.items())} if fault else {}
        )
        yield replace(row, counts={**row.counts, **fault_counts})


def _lockstep_row(plan: AsyncPlan, task: LearningTask, initial: float, tick: _Tick) -> AsyncRow:
    found = simulate_ddp(
        DdpPlan(
            machines=plan.machines,
            seconds=plan.seconds,
            steps=plan.steps,
            parameters=plan.parameters,
            latency=plan.latency,
            schedule=plan.schedule,
            score_every=plan.score_every,
            seed=plan.seed,
        ),
        task,
        tick,
    )
    return AsyncRow(
        name="DDP",
        every=None,
        delay=None,
        loss=found.loss,
        best=found.loss,
        seconds=found.seconds,
        steps=found.steps * len(plan.machines),
        nbytes=2 * found.nbytes,
        points=found.points,
        digest=found.digest,
        initial_loss=initial,
        communication=found.communication,
        waiting=found.waiting,
    )


def _star_row(cadence: SyncSchedule, found: AsyncResult, workers: int, initial: float) -> AsyncRow:
    counts: Counter[str] = Counter()
    for each in found.counts:
        counts.update(each)
    replaced = [
        f"worker {each['worker']} at {each['t']:.1f} s: {each['why']}"
        for each in found.decisions
        if each["kind"] == "replace"
    ]
    merges = [each for each in found.decisions if each["kind"] == "merge"]
    return AsyncRow(
        name=f"k {cadence.every}, d {cadence.delay}",
        every=cadence.every,
        delay=cadence.delay,
        loss=found.loss,
        best=found.best,
        seconds=found.trained_seconds,
        steps=found.steps,
        nbytes=(found.nbytes_up + found.nbytes_down) / workers,
        points=found.points,
        digest=found.digest,
        initial_loss=initial,
        staleness_median=found.staleness_median,
        staleness_max=found.staleness_max,
        updates=found.updates,
        refused=dict(sorted(found.refused.items())),
        merges=len(merges),
        late=sum(len(each["late"]) for each in merges),
        grace=fmean(each["grace"] for each in merges) if merges else 0.0,
        counts={name: count if math.isfinite(count) else 0 for name, count in counts.items()},
        hub_busy=found.hub_busy,
        replaced=replaced,
    )


_KINDS = ("lost", "repeated", "late", "damaged")
_MOST_LATE_SECONDS = 5.0


class RandomFaults:
    """Injects faults into a share of all envelopes; counts them, so create one per run.

    A damaged envelope is encoded, has one bit flipped, and is decoded as by a receiver: markers and checksums detect
    the damage, and the envelope is dropped.

    Args:
        share: share of envelopes, 0 to below 1; a quarter each is lost, repeated, late by up to 5 s, and damaged.
        seed: seed of the random choices.

    Attributes:
        counts: faults by kind; "let through": damaged envelopes that no checksum detected.

    Raises:
        UsageError: the share is out of range.
    """

    def __init__(self, share: float, seed: int = 0) -> None:
        if not 0 <= share < 1:
            raise UsageError(
                f"faults in {share!r} of all messages", remedy="give a share from 0 to below 1, or 1%"
            )
        self._share, self._key, self._seen = share, derive_key(seed, 5), 0
        self.counts: Counter[str] = Counter()

    def __call__(self, envelope: Envelope) -> list[tuple[float, Envelope]]:
        """Return (delay in seconds, envelope) of each envelope that arrives instead."""
        self._seen += 1
        drawn = derive_key(self._seen, after=self._key)
        if (drawn >> 11) / 2**53 >= self._share:
            return [(0.0, envelope)]
        drawn = derive_key(1, after=drawn)
        kind = _KINDS[drawn % len(_KINDS)]
        self.counts[kind] += 1
        later = _MOST_LATE_SECONDS * (drawn >> 32) / 2**32
        if kind == "lost":
            return []
        if kind == "repeated":
            return [(0.0, envelope), (later, envelope)]
        if kind == "late":
            return [(later, envelope)]
        return self._damaged(envelope, drawn >> 3)

    def _damaged(self, envelope: Envelope, drawn: int) -> list[tuple[float, Envelope]]:
        data = bytearray().join(encode(envelope.header, envelope.payload))
        bit = drawn % (8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        try:
            header, payload = decode(data)
        except EnvelopeError:
            return []
        self.counts["let through"] += 1
        return [(0.0, Envelope(header, payload))]
