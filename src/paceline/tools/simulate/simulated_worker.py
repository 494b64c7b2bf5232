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
        self.learner = simulation.task.learner(index, len(plan.machines), alike=plan.alike, lr=machine.lr)
        self._lr = machine.lr if machine.lr is not None else simulation.task.lr
        self._key = derive_key(plan.seed, self.number)
        self.made, self.alive = 0, False
        self.link = Link(machine.up, machine.down, plan.latency)
        self._outbox = Outbox(None, self.number)
        self._life = 0
        self._past = Counter[str]()  # what was counted in lives that are over
        self._alarms: list[float] = []  # when it is to be woken, the next one last
        self.spoke, self.worker = self._born()

    def _born(self) -> tuple[HubSession, AsyncWorker]:
        """Return what talks and decides for this worker, from the beginning of a life."""
        plan, layout = self._plan, self._simulation.layout
        compression, module = Compression.of(plan.compression), self.learner.module
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        sides = [
            FragmentReplica(fragment, tensors, UpdateCodec.with_compression(fragment, compression))
            for fragment in layout.fragments
        ]
        self._life += 1
        sessions = iter(range(self._life * _SESSIONS_OF_A_LIFE, 2**53))
        spoke = HubSession(
            self.number,
            f"worker{self.number}",
            layout,
            dict(enumerate(sides)),
            self._outbox,
            facts={"every": plan.cadence.every, "delay": plan.cadence.delay},
            new_session=lambda: next(sessions),
        )
        spoke.beat_seconds = plan.rules.silent_after / 3
        worker = AsyncWorker(
            sides,
            [spoke],
            plan.cadence,
            plan.policy,
            score=self.learner.score if plan.policy.scores or plan.rules.population else None,
            forget=self.learner.forget,
            warmup=plan.warmup,
            stagger=plan.stagger,
        )
        return spoke, worker

    @property
    def counts(self) -> Mapping[str, Any]:
        """What the worker counted in all its lives, with what became of its updates."""
        return dict(self._counted())

    @property
    def busy(self) -> bool:
        """Whether something is under way, or not told yet."""
        return not self.spoke.idle

    def _counted(self) -> Counter[str]:
        spoke = self.spoke
        told = {"acknowledged": spoke.acknowledged, "refused": spoke.refused, "resent": spoke.resent}
        told |= vars(self.worker.counts)
        return Counter({name: count + self._past[name] for name, count in told.items()})

    # ------------------------------------------------------------------ coming and leaving

    def start(self) -> None:
        """Begin to train, and to talk."""
        self.alive = True
        self._exchange = VirtualExchange(self.number, self._simulation.network, self.link, self._arrive)
        self._clock.at(self._clock.now, self._pump, self._life)
        self._go_on()

    def stop(self) -> None:
        """End without a word."""
        self.alive = False
        self._exchange.close()

    def begin_again(self) -> None:
        """Come back as a new process would: with its outbox, and without what it had not sent."""
        self._past = self._counted()
        self.spoke, self.worker = self._born()
        self._alarms = []
        self.start()

    # ------------------------------------------------------------------ computing

    def _go_on(self) -> None:
        """Plan the next steps, up to the one after which something may be due."""
        plan, machine = self._plan, self._machine
        count = self.worker.steps_until_due()
        if plan.steps is not None:
            left = plan.steps - self.made
            if left <= 0:
                self._simulation.ended(self)
                return
            if count > left:
                count = left
        seconds = machine.step_seconds * count * jitter_factor(machine.jitter, self._key, self.made)
        self._clock.at(self._clock.now + seconds, self._computed, self._life, count)

    def _computed(self, life: int, count: int) -> None:
        """Compute the steps whose time has passed, and do what is due."""
        if life != self._life or not self.alive:
            return
        if count > 1 and (self._plan.schedule is not None or self.worker.steps_until_due() < count):
            for _ in range(count):
                self._compute(1)
        else:
            self._compute(count)
        self._simulation.steps += count
        if self.spoke.orders:
            self._pump(life)
        self._go_on()

    def _compute(self, count: int) -> None:
        worker, schedule = self.worker, self._plan.schedule
        share = worker.lr_scale
        if schedule is not None:
            share *= schedule(self._simulation.share_done(self))
        samples = self.learner.steps(self.made, count, share)
        self.made += count
        worker.step(samples, self._lr, self._clock.now, self._machine.step_seconds, count)

    # ------------------------------------------------------------------ talking

    def _pump(self, life: int) -> None:
        """Say what the conversation has to say, and come back when it wants to say more."""
        if life != self._life or not self.alive:
            return
        spoke, now = self.spoke, self._clock.now
        for message in spoke.pump(now):
            for envelope in split_message(message, spoke.terms.run, spoke.sequence, spoke.session):
                spoke.sequence += 1
                if not self._exchange.send(envelope):
                    spoke.lost(now)
                    break
            else:
                spoke.left(message, max(now, self.link.up_free, self._simulation.hub_link.down_free))
        self._set_alarm(now)

    def _set_alarm(self, now: float) -> None:
        """See to it that this worker is woken when something is due."""
        when, alarms = self.spoke.wants(), self._alarms
        if not alarms or when < alarms[-1]:
            when = max(when, now + _TICK)
            alarms.append(when)
            self._clock.at(when, self._woken, self._life)

    def _woken(self, life: int) -> None:
        if life != self._life or not self.alive:
            return
        self._alarms.pop()
        now = self._clock.now
        if now < self.spoke.wants():  # what was due has become due later
            self._set_alarm(now)
        else:
            self._pump(life)

    def _arrive(self, envelope: Envelope) -> None:
        self.spoke.receive(envelope, self._clock.now)
        self._pump(self._life)
