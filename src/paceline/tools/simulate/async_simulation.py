"""Simulation of asynchronous training: hub and workers of `paceline.async_dp` on virtual clocks, links and churn.

Workers compute real gradients; the durations of steps and messages are simulated. The same plan gives bitwise
identical results.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from paceline.async_dp.hub.hub import Hub
from paceline.async_dp.hub.hub_server import HubServer
from paceline.async_dp.protocol.message_assembly import FRAME_NBYTES, MIN_FRAME_NBYTES
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.wal.memory_journal import MemoryJournal
from paceline.parallel.compression.compression_config import Compression
from paceline.tools.simulate.async_results import LossPoint
from paceline.tools.simulate.async_settings import AsyncPlan
from paceline.tools.simulate.learning_tasks import LearningTask
from paceline.tools.simulate.simulated_machines import ChurnEvent
from paceline.tools.simulate.simulated_worker import SimulatedWorker
from paceline.transport.envelope import Bytes, Envelope
from paceline.transport.transport_interface import HUB
from paceline.transport.virtual_time import VirtualClock, VirtualExchange, VirtualLink, VirtualNetwork

__all__ = ["AsyncResult", "AsyncSimulation", "simulate_async"]

_RUN = "simulated"
_NEVER = 2**62
_MAX_FRAMES = 32  # of a message, however large the simulated model
_DRAIN_SECONDS, _DRAIN_POLL_SECONDS = 30.0, 0.1
"""Longest wait for pending messages after the last step, and the interval of checks."""


@dataclass(frozen=True, kw_only=True)
class AsyncResult:
    """Result of an asynchronous simulation.

    Attributes:
        points: loss of the global model over time.
        loss: loss of the global model at the end.
        best: best loss of a worker's own parameters at the end.
        seconds: virtual time.
        trained_seconds: virtual time until the last worker's last step.
        steps: local steps of all workers.
        samples: samples of all accepted updates.
        updates: number of accepted updates.
        refused: refused updates by reason.
        staleness: histogram (lower edge, upper edge, count), in rounds.
        staleness_median: exact median in rounds; None without updates.
        staleness_max: exact maximum in rounds; None without updates.
        nbytes_up: bytes sent by workers, headers included.
        nbytes_down: bytes sent by the hub, headers included.
        hub_busy: utilisation of the busier direction of the hub's link.
        messages: envelopes sent in both directions.
        counts: counters of each worker.
        decisions: decisions in the hub's journal.
        digest: hash of the global model's parameters.
    """

    points: tuple[LossPoint, ...]
    loss: float
    best: float
    seconds: float
    trained_seconds: float
    steps: int
    samples: float
    updates: int
    refused: Mapping[str, int]
    staleness: Sequence[tuple[float, float, int]]
    staleness_median: float | None
    staleness_max: float | None
    nbytes_up: float
    nbytes_down: float
    hub_busy: float
    messages: int
    counts: Sequence[Mapping[str, Any]]
    decisions: Sequence[Mapping[str, Any]]
    digest: str


class AsyncSimulation:
    """One run of a simulation; see `WorkerEnvironment` for its attributes.

    Args:
        plan: settings.
        task: the task to train.
        tick: called with every point of the loss curve.
    """

    def __init__(self, plan: AsyncPlan, task: LearningTask, tick: Callable[[LossPoint], object]) -> None:
        self.plan, self.task, self._tick = plan, task, tick
        self.clock = VirtualClock()
        self._journal = _Journal(keep=any(each.worker < 0 for each in plan.churn))
        self._evaluator = task.learner(0, 1)
        self._initial_loss = self._evaluator.score()
        self.layout = ParameterLayout.of(
            self._evaluator.module, plan.cadence.fragments, Compression.of(plan.compression)
        )
        scale = 1.0 if plan.parameters is None else plan.parameters / self.layout.numel
        self.network = VirtualNetwork(self.clock, plan.fault, scale)
        self._hub: Hub | None = None
        self._refused = Counter[str]()  # by killed hubs
        self.hub_link = VirtualLink(plan.hub_up, plan.hub_down, plan.latency)
        largest = max(4 * each.numel * scale for each in self.layout.fragments)
        self.frame_nbytes = max(MIN_FRAME_NBYTES, round(max(FRAME_NBYTES, largest / _MAX_FRAMES) / scale))
        self._workers = [SimulatedWorker(self, index) for index in range(len(plan.machines))]
        self._points: list[LossPoint] = []
        self.steps = 0
        self._working = set(range(len(self._workers)))  # with steps left
        self._trained_seconds = 0.0

    # ------------------------------------------------------------------ the hub

    def _start_hub(self) -> None:
        rules = self.plan.rules
        if not self._journal.keeps:
            rules = replace(rules, snapshot_every=_NEVER)  # never read
        self._hub = Hub(_RUN, rules, self._journal, lambda: self.clock.now)
        self._exchange = VirtualExchange(HUB, self.network, self.hub_link, self._receive)
        self._server = HubServer(self._hub, self._exchange, frame_nbytes=self.frame_nbytes)
        self._turn_at = math.inf

    def _kill_hub(self) -> None:
        """Crash the hub: uncommitted records are lost."""
        self._exchange.close()
        self._journal.crash()
        if self._hub is not None:
            self._refused.update(self._hub.refused)
        self._hub = None

    def _receive(self, envelope: Envelope) -> None:
        if self._hub is not None:
            self._turn((envelope,))

    def _turn(self, envelopes: Sequence[Envelope] = ()) -> None:
        wait, now = self._server.turn(envelopes, self.clock.now), self.clock.now
        if wait < self._turn_at - now:
            self._turn_at = now + wait
            self.clock.schedule(self._turn_at, self._turn_due, self._hub)

    def _turn_due(self, hub: Hub) -> None:
        if hub is self._hub and self.clock.now >= self._turn_at:
            self._turn_at = math.inf
            self._turn()

    # ------------------------------------------------------------------ events

    def worker_finished(self, worker: SimulatedWorker) -> None:
        """Register that a worker has completed all its steps or left for good."""
        if worker.index not in self._working:
            return
        self._working.discard(worker.index)
        if not self._working:
            self._trained_seconds = self.clock.now
            self._drain(self.clock.now + _DRAIN_SECONDS)

    def _drain(self, until: float) -> None:
        """Stop once no messages are pending, or at `until`."""
        now = self.clock.now
        if now >= until or not any(worker.alive and worker.has_pending for worker in self._workers):
            self.clock.stop()
        else:
            self.clock.schedule(now + _DRAIN_POLL_SECONDS, self._drain, until)

    def progress(self, worker: SimulatedWorker) -> float:
        """Return the share of the training that a worker has completed."""
        if self.plan.steps is not None:
            return worker.steps_done / self.plan.steps
        return min(1.0, self.clock.now / self.plan.seconds)

    def run(self) -> AsyncResult:
        """Run the simulation."""
        plan = self.plan
        self._start_hub()
        for worker in self._workers:
            if plan.starts_present(worker.index):
                worker.start()
        for each in plan.churn:
            self.clock.schedule(each.seconds, self._churn, each)
        if plan.score_every:
            self.clock.schedule(plan.score_every, self._evaluate)
        self.clock.run(plan.seconds)
        return self._result()

    def _churn(self, each: ChurnEvent) -> None:
        if each.worker < 0:
            (self._start_hub if each.joins else self._kill_hub)()
        elif each.joins:
            self._workers[each.worker].restart()
        else:
            worker = self._workers[each.worker]
            worker.stop()
            if not any(later.seconds > each.seconds for later in self.plan.churn_of(each.worker)):
                self.worker_finished(worker)

    def _evaluate(self) -> None:
        self._points.append(self._point())
        self._tick(self._points[-1])
        self.clock.schedule(self.clock.now + self.plan.score_every, self._evaluate)

    # ------------------------------------------------------------------ results

    def _point(self) -> LossPoint:
        updates = self._hub.updates if self._hub is not None else 0
        return LossPoint(self.clock.now, self.steps, updates, self._loss())

    @torch.no_grad()
    def _loss(self) -> float:
        """Return the held-out loss of the global model.

        While the hub is down, this is the previous loss; while workers train separately, the best worker's; before
        training, the initial one.
        """
        hub = self._hub
        if hub is None and self._points:
            return self._points[-1].loss
        if hub is not None and hub.phase == "population":
            return self._best()
        if hub is None or hub.params is None or hub.phase != "together":
            return self._initial_loss
        module = self._evaluator.module
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        for number, fragment in enumerate(self.layout.fragments):
            theta = hub.params.fragments[number].theta
            for place in fragment.tensors:
                tensors[place.name].copy_(place.view_in(theta))
        return self._evaluator.score()

    def theta(self) -> Tensor:
        """Return the global parameters as 1-D float32, fragment by fragment; empty without any."""
        params = self._hub.params if self._hub is not None else None
        if params is None:
            return torch.empty(0)
        return torch.cat([each.theta for each in params.fragments.values()])

    def _best(self) -> float:
        """Return the best finite loss of a worker's own parameters, or NaN."""
        scores = [worker.learner.score() for worker in self._workers]
        return min((score for score in scores if math.isfinite(score)), default=math.nan)

    def _busy(self) -> float:
        """Return the utilisation of the busier direction of the hub's link."""
        seconds, link = self._trained_seconds or self.clock.now, self.hub_link
        busy = max(link.sent_nbytes / link.up, link.received_nbytes / link.down)
        return min(1.0, busy / seconds) if seconds else 0.0

    def _result(self) -> AsyncResult:
        if self._hub is None:  # as its successor would recover
            self._start_hub()
        hub, link, journal = self._hub, self.hub_link, self._journal
        assert hub is not None
        self._refused.update(hub.refused)
        point = self._point()
        if not self._points or self._points[-1].seconds < point.seconds:
            self._points.append(point)
        return AsyncResult(
            points=tuple(self._points),
            loss=point.loss,
            best=self._best(),
            seconds=self.clock.now,
            trained_seconds=self.clock.now if self._working else self._trained_seconds,
            steps=self.steps,
            samples=hub.counters.samples,
            updates=hub.updates,
            refused=dict(self._refused),
            staleness=hub.counters.histogram.rows(),
            staleness_median=median(journal.staleness) if journal.staleness else None,
            staleness_max=max(journal.staleness, default=None),
            nbytes_up=sum(worker.link.sent_nbytes for worker in self._workers),
            nbytes_down=link.sent_nbytes,
            hub_busy=self._busy(),
            messages=self.network.messages,
            counts=[worker.counts for worker in self._workers],
            decisions=journal.decisions,
            digest=xxh3_64_hexdigest(self.theta().numpy().tobytes()),
        )


class _Journal(MemoryJournal):
    """Journal that always keeps decisions and the staleness of updates."""

    def __init__(self, *, keep: bool) -> None:
        super().__init__(keep=keep)
        self.decisions: list[Mapping[str, Any]] = []
        self.staleness = array("d")

    def append(self, values: Mapping[str, Any], payload: Bytes = b"") -> int:
        if values["kind"] == "update":
            self.staleness.append(values["staleness"])
        elif values["kind"] in _DECISIONS:
            self.decisions.append(values)
        return super().append(values, payload)


_DECISIONS = ("merge", "replace", "together", "refuse", "begin", "silent", "join")


def simulate_async(
    plan: AsyncPlan, task: LearningTask, tick: Callable[[LossPoint], object] = lambda _: None
) -> AsyncResult:
    """Simulate asynchronous training.

    Args:
        plan: settings.
        task: the task to train.
        tick: called with every point of the loss curve.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return AsyncSimulation(plan, task, tick).run()
    finally:
        torch.set_num_threads(threads)
