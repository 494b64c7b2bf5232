"""A star in virtual time: the hub and workers that run over a network, on simulated clocks, speeds, links and churn.

Every worker computes real gradients; how long a step takes, and a message on its way, is simulated. Whatever decides
is the code of `paceline.star`. Two runs of the same plan are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from xxhash import xxh3_64_hexdigest

from paceline.exchange.envelope import Bytes
from paceline.exchange.seam import HUB, Envelope
from paceline.exchange.virtual import Clock, Link, Network, VirtualExchange
from paceline.simulate.node import Node
from paceline.simulate.plan import AsyncPlan, Churn, Machine
from paceline.simulate.tasks import Task
from paceline.star.hub import Hub
from paceline.star.keeping.memory import MemoryJournal
from paceline.star.layout import Layout
from paceline.star.mail import cut
from paceline.sync.compress import Compression

__all__ = ["AsyncPlan", "AsyncResult", "Churn", "Machine", "Point", "Simulation", "simulate"]

_RUN = "simulated"
_DRAIN_SECONDS = 30.0
"""For what is under way when the last worker has made its last step."""


@dataclass(frozen=True)
class Point:
    """The centre at a time: virtual seconds, local steps of all workers until then, updates, its loss."""

    seconds: float
    steps: int
    updates: int
    loss: float


@dataclass(frozen=True)
class AsyncResult:
    """What came out.

    Attributes:
        points: the centre over time. loss: of the centre at the end. best: the best score of a worker then.
        seconds: of virtual time. steps, samples: of all workers.
        updates: taken in; refused: by reason. staleness: (from, below, count), in rounds.
        nbytes: sent by workers, and by the hub, headers included.
        counts: of each worker. decisions: what the hub wrote down of its decisions.
        digest: of the centre's numbers.
    """

    points: tuple[Point, ...]
    loss: float
    best: float
    seconds: float
    steps: int
    samples: float
    updates: int
    refused: Mapping[str, int]
    staleness: Sequence[tuple[float, float, int]]
    nbytes_up: float
    nbytes_down: float
    counts: Sequence[Mapping[str, Any]]
    decisions: Sequence[Mapping[str, Any]]
    digest: str


class Simulation:
    """All that happens in one run.

    Args:
        plan: machines, links and rules. task: what is learnt. tick: called with every point of the curve.

    Attributes:
        clock, network: of all. layout: of the model. steps: local ones of all workers so far.
        finished: nobody begins anything any more.
    """

    def __init__(self, plan: AsyncPlan, task: Task, tick: Callable[[Point], object]) -> None:
        self.plan, self.task, self._tick = plan, task, tick
        self.clock = Clock()
        self.network = Network(self.clock, plan.spoil)
        self._journal = _Journal(keep=any(each.worker < 0 for each in plan.churn))
        self._judge = task.learner(0, 1)
        self.layout = Layout.of(self._judge.module, plan.cadence.fragments, Compression.of(plan.compression))
        self._hub: Hub | None = None
        self._hub_link = Link(plan.hub_up, plan.hub_down, plan.latency)
        self._sequence = 0
        self._nodes = [Node(self, index) for index in range(len(plan.machines))]
        self._points: list[Point] = []
        self.steps, self.finished = 0, False
        self._working = len(self._nodes)

    # ------------------------------------------------------------------ the hub

    def _start_hub(self) -> None:
        """Start it, or its heir."""
        self._hub = Hub(_RUN, self.plan.rules, self._journal, lambda: self.clock.now)
        self._exchange = VirtualExchange(HUB, self.network, self._hub_link, self._arrive)

    def _kill_hub(self) -> None:
        """End it without a word: what was not committed is gone."""
        self._exchange.close()
        self._journal.crash()
        self._hub = None

    def _arrive(self, envelope: Envelope) -> None:
        hub, now = self._hub, self.clock.now
        if hub is None:
            return
        hub.receive(envelope, now)
        for message in hub.settle(now):
            for out in cut(message, _RUN, self._sequence):
                self._sequence += 1
                self._exchange.send(out)

    # ------------------------------------------------------------------ the course of it

    def ended(self, node: Node) -> None:
        """Note that a worker has made all its steps."""
        self._working -= 1
        if self._working == 0:
            self.clock.at(self.clock.now + _DRAIN_SECONDS, self._leave)

    def _leave(self) -> None:
        self.finished = True

    def share_done(self, node: Node) -> float:
        """Return which share of the training a worker has done."""
        if self.plan.steps is not None:
            return node.made / self.plan.steps
        return min(1.0, self.clock.now / self.plan.seconds)

    def run(self) -> AsyncResult:
        """Go through all of it."""
        plan = self.plan
        self._start_hub()
        for node in self._nodes:
            if plan.begins(node.index):
                node.start()
        for each in plan.churn:
            self.clock.at(each.seconds, self._churn, each)
        if plan.score_every:
            self.clock.at(plan.score_every, self._look)
        self.clock.run(plan.seconds)
        self.finished = True
        return self._result()

    def _churn(self, each: Churn) -> None:
        if each.worker < 0:
            (self._start_hub if each.comes else self._kill_hub)()
        elif each.comes:
            self._nodes[each.worker].begin_again()
        else:
            self._nodes[each.worker].stop()

    def _look(self) -> None:
        if self.finished:
            return
        self._points.append(self._point())
        self._tick(self._points[-1])
        self.clock.at(self.clock.now + self.plan.score_every, self._look)

    # ------------------------------------------------------------------ what comes out

    def _point(self) -> Point:
        updates = self._hub.updates if self._hub is not None else 0
        return Point(self.clock.now, self.steps, updates, self._loss())

    @torch.no_grad()
    def _loss(self) -> float:
        """Return the held-out loss of the centre; of the best worker's parameters while there is none."""
        hub = self._hub
        if hub is None or hub.centres is None or hub.phase != "together":
            return min(node.learner.score() for node in self._nodes)
        module = self._judge.module
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        for number, fragment in enumerate(self.layout.fragments):
            theta = hub.centres.of_fragment[number].theta
            for place in fragment.places:
                tensors[place.name].copy_(place.of(theta))
        return self._judge.score()

    def _result(self) -> AsyncResult:
        hub = self._hub
        assert hub is not None
        point = self._point()
        self._points.append(point)
        theta = b""
        if hub.centres is not None:
            theta = b"".join(each.theta.numpy().tobytes() for each in hub.centres.of_fragment.values())
        return AsyncResult(
            tuple(self._points),
            point.loss,
            min(node.learner.score() for node in self._nodes),
            self.clock.now,
            self.steps,
            hub.tally.samples,
            hub.updates,
            dict(hub.refused),
            hub.tally.histogram.rows(),
            sum(node.link.sent_nbytes for node in self._nodes),
            self._hub_link.sent_nbytes,
            [node.counts for node in self._nodes],
            self._journal.decisions,
            xxh3_64_hexdigest(theta),
        )


class _Journal(MemoryJournal):
    """Keeps decisions, whether or not it keeps all."""

    def __init__(self, *, keep: bool) -> None:
        super().__init__(keep=keep)
        self.decisions: list[Mapping[str, Any]] = []

    def append(self, values: Mapping[str, Any], payload: Bytes = b"") -> int:
        if values["kind"] in _DECISIONS:
            self.decisions.append(values)
        return super().append(values, payload)


_DECISIONS = ("replace", "together", "refuse", "begin", "silent", "join")


def simulate(plan: AsyncPlan, task: Task, tick: Callable[[Point], object] = lambda _: None) -> AsyncResult:
    """Return what becomes of a star in virtual time.

    Args:
        plan: machines, links and rules. task: what is learnt.
        tick: called with every point of the curve.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return Simulation(plan, task, tick).run()
    finally:
        torch.set_num_threads(threads)
