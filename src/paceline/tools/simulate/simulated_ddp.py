"""Simulation of DDP in virtual time, with the tasks and machines of asynchronous simulations and real gradients.

A step takes the slowest machine's step plus a ring all-reduce of all gradients: 2(N − 1)/N times their bytes over the
slowest link and 2(N − 1) latencies (Patarasuk and Yuan, JPDC 2009). Buckets are reduced during backward, so only the
part of communication beyond `overlap` of the slowest machine's step is exposed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from xxhash import xxh3_64_hexdigest

from paceline._core.keyed_random import derive_key
from paceline.errors import UsageError
from paceline.tools.plan.compression_or_local_sgd import BACKWARD_SHARE
from paceline.tools.simulate.async_results import LossPoint
from paceline.tools.simulate.async_settings import LrSchedule
from paceline.tools.simulate.learning_tasks import Learner, LearningTask
from paceline.tools.simulate.simulated_machines import SimulatedMachine, jitter_factor
from paceline.transport.virtual_time import WIRE_OVERHEAD

__all__ = ["DdpPlan", "DdpResult", "ring_all_reduce_seconds", "simulate_ddp"]


@dataclass(frozen=True, kw_only=True)
class DdpPlan:
    """Settings of a DDP simulation, which ends after `seconds` or `steps`, whichever is first.

    Attributes:
        machines: one per worker; their learning rates are ignored, since DDP has a single one.
        seconds: virtual time.
        steps: steps of all workers together.
        parameters: size gradients for a model of so many parameters; None: the task's model.
        latency: seconds per message.
        overlap: share of a step that hides communication; 0: none.
        schedule: learning-rate schedule; None: constant.
        score_every: virtual seconds between points of the loss curve; 0: only at the end.
        seed: seed of the jitter.
        members: number of shares of the data; None: one per machine.

    Raises:
        UsageError: there are no workers or no end, or a number is out of range.
    """

    machines: Sequence[SimulatedMachine]
    seconds: float = math.inf
    steps: int | None = None
    parameters: int | None = None
    latency: float = 1e-4
    overlap: float = BACKWARD_SHARE
    schedule: LrSchedule | None = None
    score_every: float = 0.0
    seed: int = 0
    members: int | None = None

    def __post_init__(self) -> None:
        if not self.machines:
            raise UsageError("a simulation without workers", remedy="give one or more")
        if self.steps is None and self.seconds == math.inf:
            raise UsageError("a simulation without an end", remedy="give seconds or steps")
        if not 0 <= self.overlap <= 1:
            raise UsageError(f"overlap={self.overlap!r}", remedy="give a share of a step, 0 to 1")


@dataclass(frozen=True, kw_only=True)
class DdpResult:
    """Result of a DDP simulation.

    Attributes:
        points: loss over time.
        loss: loss at the end.
        seconds: virtual time.
        steps: steps of each worker.
        nbytes: bytes sent (and received) by a worker, network headers included.
        communication: share of time in exposed communication.
        waiting: share of time that a worker waits for the slowest machine, on average.
        digest: hash of the parameters.
    """

    points: tuple[LossPoint, ...]
    loss: float
    seconds: float
    steps: int
    nbytes: float
    communication: float
    waiting: float
    digest: str


def ring_all_reduce_seconds(workers: int, nbytes: float, rate: float, latency: float) -> float:
    """Return the seconds of a ring all-reduce.

    Args:
        workers: N.
        nbytes: size of the gradients.
        rate: bytes per second of the slowest link.
        latency: seconds per message.

    Example:
        >>> round(ring_all_reduce_seconds(4, 80e6, 25e6, 0.0), 9)
        4.8
    """
    return 2 * (workers - 1) * (nbytes / workers / rate + latency)


def simulate_ddp(
    plan: DdpPlan, task: LearningTask, tick: Callable[[LossPoint], object] = lambda _: None
) -> DdpResult:
    """Simulate DDP.

    Args:
        plan: settings.
        task: the task to train.
        tick: called with every point of the loss curve.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _DdpSimulation(plan, task, tick).run()
    finally:
        torch.set_num_threads(threads)


class _DdpSimulation:
    def __init__(self, plan: DdpPlan, task: LearningTask, tick: Callable[[LossPoint], object]) -> None:
        self._plan, self._tick = plan, tick
        workers = len(plan.machines)
        self._keys = [derive_key(plan.seed, worker + 1) for worker in range(workers)]
        members = plan.members or workers
        self._learners = [task.learner(worker, members) for worker in range(workers)]
        self._params = [list(each.module.parameters()) for each in self._learners]
        numel = plan.parameters or sum(param.numel() for param in self._params[0])
        rate = min(min(each.up, each.down) for each in plan.machines)
        self._comm_seconds = ring_all_reduce_seconds(workers, WIRE_OVERHEAD * 4.0 * numel, rate, plan.latency)
        self._nbytes_of_step = 2 * (workers - 1) / workers * WIRE_OVERHEAD * 4.0 * numel
        self._now = self._exposed = self._waited = 0.0
        self._points: list[LossPoint] = []
        self._next_point = plan.score_every or math.inf

    def run(self) -> DdpResult:
        """Run the simulation."""
        plan, step = self._plan, 0
        while plan.steps is None or step < plan.steps:
            seconds = self._seconds(step)
            if self._now + seconds > plan.seconds:
                self._evaluate_until(plan.seconds, step)
                self._now = plan.seconds
                break
            self._evaluate_until(self._now + seconds, step)
            self._now += seconds
            self._train(step)
            step += 1
        self._evaluate(self._now, step)
        return self._result(step)

    def _seconds(self, step: int) -> float:
        """Return the seconds of a step, and account for waiting."""
        plan = self._plan
        each = [
            machine.step_seconds * jitter_factor(machine.jitter, key, step)
            for machine, key in zip(plan.machines, self._keys, strict=True)
        ]
        slowest = max(each)
        exposed = max(0.0, self._comm_seconds - plan.overlap * slowest)
        self._exposed += exposed
        self._waited += slowest - sum(each) / len(each)
        return slowest + exposed

    def _train(self, step: int) -> None:
        """Run a step with averaged gradients on all workers."""
        plan = self._plan
        share = 1.0
        if plan.schedule is not None:
            done = step / plan.steps if plan.steps is not None else self._now / plan.seconds
            share = plan.schedule(min(1.0, done))
        for learner in self._learners:
            learner.gradient(step)
        average_gradients(self._params)
        for learner in self._learners:
            learner.apply(share)

    def _evaluate_until(self, seconds: float, step: int) -> None:
        """Record the points due until a time; nothing changes before it."""
        while self._next_point <= seconds:
            self._evaluate(self._next_point, step)
            self._next_point += self._plan.score_every

    def _evaluate(self, seconds: float, step: int) -> None:
        if self._points and self._points[-1].seconds >= seconds:
            return
        self._points.append(LossPoint(seconds, step * len(self._learners), step, self._learners[0].score()))
        self._tick(self._points[-1])

    def _result(self, steps: int) -> DdpResult:
        seconds = self._now or 1.0
        return DdpResult(
            points=tuple(self._points),
            loss=self._points[-1].loss,
            seconds=self._now,
            steps=steps,
            nbytes=steps * self._nbytes_of_step,
            communication=self._exposed / seconds,
            waiting=self._waited / seconds,
            digest=_digest(self._learners[0]),
        )


@torch.no_grad()
def average_gradients(params_of: Sequence[Sequence[nn.Parameter]]) -> None:
    """Replace the gradients of all workers by their mean, in place.

    Args:
        params_of: each worker's parameters, in the same order.
    """
    for params in zip(*params_of, strict=True):
        grads = [param.grad for param in params if param.grad is not None]
        if not grads:
            continue
        mean = torch.stack(grads).mean(0)
        for param in params:
            param.grad = mean.clone()


def _digest(learner: Learner) -> str:
    numbers = [param.detach().numpy().tobytes() for param in learner.module.parameters()]
    return xxh3_64_hexdigest(b"".join(numbers))
