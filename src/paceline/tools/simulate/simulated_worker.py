"""Worker in virtual time: trains a real model and runs the production code of an asynchronous worker.

Local steps up to the next one with a possible exchange are computed at once. A worker that leaves crashes without
signing off; one that returns is a new process (incarnation) with the old outbox.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from paceline._core.keyed_random import derive_key
from paceline.async_dp.protocol.parameter_layout import ParameterLayout
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.async_dp.wal.worker_outbox import Outbox
from paceline.async_dp.worker.async_worker import AsyncWorker
from paceline.async_dp.worker.fragment_replica import FragmentReplica
from paceline.async_dp.worker.hub_session import HubSession
from paceline.async_dp.worker.session_driver import SessionDriver
from paceline.parallel.compression.compression_config import Compression
from paceline.tools.simulate.async_settings import AsyncPlan
from paceline.tools.simulate.learning_tasks import LearningTask
from paceline.tools.simulate.simulated_machines import jitter_factor
from paceline.transport.envelope import Envelope
from paceline.transport.virtual_time import VirtualClock, VirtualExchange, VirtualLink, VirtualNetwork

__all__ = ["SimulatedWorker", "WorkerEnvironment"]

_TICK = 1e-9
_SESSIONS_PER_INCARNATION = 1_000_000


class WorkerEnvironment(Protocol):
    """The simulation that a worker belongs to.

    Attributes:
        plan: settings.
        task: the task to train.
        clock: virtual clock.
        network: virtual network.
        layout: layout of the model's fragments.
        hub_link: the hub's link.
        frame_nbytes: most bytes per frame.
        steps: local steps of all workers so far.
    """

    plan: AsyncPlan
    task: LearningTask
    clock: VirtualClock
    network: VirtualNetwork
    layout: ParameterLayout
    hub_link: VirtualLink
    frame_nbytes: int
    steps: int

    def worker_finished(self, worker: SimulatedWorker) -> None:
        """Register that a worker has completed all its steps."""
        ...

    def progress(self, worker: SimulatedWorker) -> float:
        """Return the share of the training that a worker has completed."""
        ...


class SimulatedWorker:
    """A worker in virtual time.

    Args:
        simulation: the simulation it belongs to.
        index: its index, from 0.

    Attributes:
        number: its number at the hub, from 1.
        steps_done: local steps in all incarnations.
        alive: whether it is running.
        learner: its model, optimizer and data.
        worker: the asynchronous worker.
        session: its session with the hub.
        link: its link to the network.
    """

    def __init__(self, simulation: WorkerEnvironment, index: int) -> None:
        plan = simulation.plan
        self._simulation, self.index, self.number = simulation, index, index + 1
        self._clock, self._plan = simulation.clock, plan
        self._machine = machine = plan.machines[index]
        self.learner = simulation.task.learner(
            index, len(plan.machines), same_init=plan.same_init, lr=machine.lr
        )
        self._lr = machine.lr if machine.lr is not None else simulation.task.lr
        self._key = derive_key(plan.seed, self.number)
        self.steps_done, self.alive = 0, False
        self.link = VirtualLink(machine.up, machine.down, plan.latency)
        self._outbox = Outbox(None, self.number)
        self._incarnation = 0
        self._earlier_counts = Counter[str]()  # of previous incarnations
        self._wakeups: list[float] = []  # scheduled times, the next one last
        self._due_at = math.inf  # when the next turn is due
        self.session, self.worker = self._connect()

    def _connect(self) -> tuple[HubSession, AsyncWorker]:
        """Start an incarnation: return its session and worker."""
        plan, layout = self._plan, self._simulation.layout
        compression, module = Compression.of(plan.compression), self.learner.module
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        replicas = [
            FragmentReplica(fragment, tensors, UpdateCodec.with_compression(fragment, compression))
            for fragment in layout.fragments
        ]
        self._incarnation += 1
        sessions = iter(range(self._incarnation * _SESSIONS_PER_INCARNATION, 2**53))
        session = HubSession(
            self.number,
            f"worker{self.number}",
            layout,
            dict(enumerate(replicas)),
            self._outbox,
            hello_meta={"every": plan.cadence.every, "delay": plan.cadence.delay},
            new_session_id=lambda: next(sessions),
        )
        session.heartbeat_seconds = plan.rules.silent_after / 3
        worker = AsyncWorker(
            replicas,
            [session],
            plan.cadence,
            plan.policy,
            score=self.learner.score if plan.policy.scores or plan.rules.population else None,
            reset_optimizer=self.learner.forget,
            warmup=plan.warmup,
            stagger=plan.stagger,
        )
        return session, worker

    @property
    def counts(self) -> Mapping[str, Any]:
        """Counters of all incarnations, including the outcome of updates."""
        return dict(self._counted())

    @property
    def has_pending(self) -> bool:
        """Whether messages are in transit or unsent."""
        return not self.session.idle

    def _counted(self) -> Counter[str]:
        session = self.session
        counts = {
            "acknowledged": session.acknowledged,
            "refused": session.refused,
            "resent": session.exchanges.resent,
        }
        counts |= vars(self.worker.counts)
        return Counter({name: count + self._earlier_counts[name] for name, count in counts.items()})

    # ------------------------------------------------------------------ start and stop

    def start(self) -> None:
        """Start training and communicating."""
        self.alive = True
        simulation = self._simulation
        self._exchange = VirtualExchange(self.number, simulation.network, self.link, self._receive)
        self._driver = SessionDriver(
            self.session, self._exchange, self._sent_at, frame_nbytes=simulation.frame_nbytes
        )
        self._clock.schedule(self._clock.now, self._pump, self._incarnation)
        self._schedule_steps()

    def stop(self) -> None:
        """Crash: stop without signing off."""
        self.alive = False
        self._exchange.close()

    def restart(self) -> None:
        """Start a new incarnation, with the old outbox but without unsent messages."""
        self._earlier_counts = self._counted()
        self.session, self.worker = self._connect()
        self._wakeups = []
        self.start()

    # ------------------------------------------------------------------ computing

    def _schedule_steps(self) -> None:
        """Schedule the next steps, up to the one after which an exchange may be due."""
        plan, machine = self._plan, self._machine
        count = self.worker.steps_until_due()
        if plan.steps is not None:
            left = plan.steps - self.steps_done
            if left <= 0:
                self._simulation.worker_finished(self)
                return
            if count > left:
                count = left
        seconds = machine.step_seconds * count * jitter_factor(machine.jitter, self._key, self.steps_done)
        self._clock.schedule(self._clock.now + seconds, self._computed, self._incarnation, count)

    def _computed(self, incarnation: int, count: int) -> None:
        """Compute the steps whose time has passed, and exchange if due."""
        if incarnation != self._incarnation or not self.alive:
            return
        if count > 1 and (self._plan.schedule is not None or self.worker.steps_until_due() < count):
            for _ in range(count):
                self._compute(1)
        else:
            self._compute(count)
        self._simulation.steps += count
        if self.session.requests:
            self._pump(incarnation)
        self._schedule_steps()

    def _compute(self, count: int) -> None:
        worker, schedule = self.worker, self._plan.schedule
        share = worker.lr_scale
        if schedule is not None:
            share *= schedule(self._simulation.progress(self))
        samples = self.learner.steps(self.steps_done, count, share)
        self.steps_done += count
        worker.step(samples, self._lr, self._clock.now, self._machine.step_seconds, count)

    # ------------------------------------------------------------------ communicating

    def _pump(self, incarnation: int, envelopes: Sequence[Envelope] = ()) -> None:
        """Handle what arrived, send the messages that are due, and schedule the next turn."""
        if incarnation != self._incarnation or not self.alive:
            return
        now = self._clock.now
        self._due_at = now + self._driver.turn(envelopes, now)
        self._schedule_wakeup(now)

    def _schedule_wakeup(self, now: float) -> None:
        when, wakeups = self._due_at, self._wakeups
        if when < math.inf and (not wakeups or when < wakeups[-1]):
            when = when if when > now else now + _TICK
            wakeups.append(when)
            self._clock.schedule(when, self._wake, self._incarnation)

    def _wake(self, incarnation: int) -> None:
        if incarnation != self._incarnation or not self.alive:
            return
        self._wakeups.pop()
        now = self._clock.now
        if now < self._due_at:  # postponed
            self._schedule_wakeup(now)
        else:
            self._pump(incarnation)

    def _sent_at(self) -> float:
        """Return when what was accepted for sending by now will have arrived."""
        return max(self._clock.now, self.link.up_free, self._simulation.hub_link.down_free)

    def _receive(self, envelope: Envelope) -> None:
        self._pump(self._incarnation, (envelope,))
