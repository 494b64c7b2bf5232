"""A worker in virtual time: computes for real, talks by the very code of a star, and waits for nothing.

    block      as many local steps as there are up to the next that may have something due, computed at once
    pump       what the conversation has to say, now and when it wants to

A worker that leaves ends without a word; one that comes back begins a new life, with what its outbox kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline._core.keyed_random import derive_key
from paceline.async_dp.protocol.message_assembly import split_message
from paceline.async_dp.protocol.update_codec import UpdateCodec
from paceline.async_dp.wal.worker_outbox import Outbox
from paceline.async_dp.worker.async_worker import AsyncWorker
from paceline.async_dp.worker.fragment_replica import FragmentReplica
from paceline.async_dp.worker.hub_session import HubSession
from paceline.parallel.compression.compression_config import Compression
from paceline.tools.simulate.async_settings import jitter_factor
from paceline.transport.transport_interface import Envelope
from paceline.transport.virtual_time import Link, VirtualExchange

if TYPE_CHECKING:
    from paceline.tools.simulate.async_simulation import AsyncSimulation

__all__ = ["SimulatedWorker"]

_TICK = 1e-9
_SESSIONS_OF_A_LIFE = 1_000_000


class SimulatedWorker:
    """A worker in virtual time.

    Args:
        simulation: that it is in. index: its place, from 0.

    Attributes:
        number: of it among the star's workers, from 1. made: local steps in all its lives. alive: whether it is there.
        learner: what it trains. worker, spoke: what decides and talks for it.
        link: to the network.
    """

    def __init__(self, simulation: AsyncSimulation, index: int) -> None:
        plan = simulation.plan
        self._simulation, self.index, self.number = simulation, index, index + 1
        self._clock, self._plan = simulation.clock, plan
        self._machine = machine = plan.machines[index]
        self.learner = simulation.task.learner(index, len(plan.machines), same_init=plan.same_init, lr=machine.lr)
        self._lr = machine.lr if machine.lr is not None else simulation.task.lr
        self._key = derive_key(plan.seed, self.number)
        self.steps_done, self.alive = 0, False
        self.link = Link(machine.up, machine.down, plan.latency)
        self._outbox = Outbox(None, self.number)
        self._incarnation = 0
        self._earlier_counts = Counter[str]()  # what was counted in lives that are over
        self._wakeups: list[float] = []  # when it is to be woken, the next one last
        self.sessionon, self.worker = self._connect()

    def _connect(self) -> tuple[HubSession, AsyncWorker]:
        """Return what talks and decides for this worker, from the beginning of a life."""
        plan, layout = self._plan, self._simulation.layout
        compression, module = Compression.of(plan.compression), self.learner.module
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        sides = [
            FragmentReplica(fragment, tensors, UpdateCodec.with_compression(fragment, compression))
            for fragment in layout.fragments
        ]
        self._incarnation += 1
        sessions = iter(range(self._incarnation * _SESSIONS_OF_A_LIFE, 2**53))
        session = HubSession(
            self.number,
            f"worker{self.number}",
            layout,
            dict(enumerate(sides)),
            self._outbox,
            facts={"every": plan.cadence.every, "delay": plan.cadence.delay},
            new_session=lambda: next(sessions),
        )
        session.beat_seconds = plan.rules.silent_after / 3
        worker = AsyncWorker(
            sides,
            [session],
            plan.cadence,
            plan.policy,
            score=self.learner.score if plan.policy.scores or plan.rules.population else None,
            forget=self.learner.forget,
            warmup=plan.warmup,
            stagger=plan.stagger,
        )
        return session, worker

    @property
    def counts(self) -> Mapping[str, Any]:
        """What the worker counted in all its lives, with what became of its updates."""
        return dict(self._counted())

    @property
    def has_pending(self) -> bool:
        """Whether something is under way, or not told yet."""
        return not self.sessionon.idle

    def _counted(self) -> Counter[str]:
        session = self.sessionon
        counts = {"acknowledged": session.acknowledged, "refused": session.refused, "resent": session.resent}
        counts |= vars(self.worker.counts)
        return Counter({name: count + self._earlier_counts[name] for name, count in counts.items()})

    # ------------------------------------------------------------------ coming and leaving

    def start(self) -> None:
        """Begin to train, and to talk."""
        self.alive = True
        self._exchange = VirtualExchange(self.number, self._simulation.network, self.link, self._receive)
        self._clock.at(self._clock.now, self._pump, self._incarnation)
        self._schedule_steps()

    def stop(self) -> None:
        """End without a word."""
        self.alive = False
        self._exchange.close()

    def restart(self) -> None:
        """Come back as a new process would: with its outbox, and without what it had not sent."""
        self._earlier_counts = self._counted()
        self.sessionon, self.worker = self._connect()
        self._wakeups = []
        self.start()

    # ------------------------------------------------------------------ computing

    def _schedule_steps(self) -> None:
        """Plan the next steps, up to the one after which something may be due."""
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
        self._clock.at(self._clock.now + seconds, self._computed, self._incarnation, count)

    def _computed(self, incarnation: int, count: int) -> None:
        """Compute the steps whose time has passed, and do what is due."""
        if incarnation != self._incarnation or not self.alive:
            return
        if count > 1 and (self._plan.schedule is not None or self.worker.steps_until_due() < count):
            for _ in range(count):
                self._compute(1)
        else:
            self._compute(count)
        self._simulation.steps += count
        if self.sessionon.orders:
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

    # ------------------------------------------------------------------ talking

    def _pump(self, incarnation: int) -> None:
        """Say what the conversation has to say, and come back when it wants to say more."""
        if incarnation != self._incarnation or not self.alive:
            return
        session, now = self.sessionon, self._clock.now
        for message in session.pump(now):
            for envelope in split_message(message, session.terms.run, session.sequence, session.session):
                session.sequence += 1
                if not self._exchange.send(envelope):
                    session.lost(now)
                    break
            else:
                session.left(message, max(now, self.link.up_free, self._simulation.hub_link.down_free))
        self._schedule_wakeup(now)

    def _schedule_wakeup(self, now: float) -> None:
        """See to it that this worker is woken when something is due."""
        when, alarms = self.sessionon.wants(), self._wakeups
        if not alarms or when < alarms[-1]:
            when = max(when, now + _TICK)
            alarms.append(when)
            self._clock.at(when, self._wake, self._incarnation)

    def _wake(self, incarnation: int) -> None:
        if incarnation != self._incarnation or not self.alive:
            return
        self._wakeups.pop()
        now = self._clock.now
        if now < self.sessionon.wants():  # what was due has become due later
            self._schedule_wakeup(now)
        else:
            self._pump(incarnation)

    def _receive(self, envelope: Envelope) -> None:
        self.sessionon.receive(envelope, self._clock.now)
        self._pump(self._incarnation)
