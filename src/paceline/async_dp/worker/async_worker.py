"""The training side of a worker: decides at which local steps it sends and applies (no thread, no clock).

    after every local step        count it; apply what was received and is due; snapshot and send what is due
    during warm-up                exchange at every other step, see [Note: warm-up]
    before the first parameters   nothing is sent: the worker trains alone until a hub answers
    in a population               every k-th step reports a score; a worker that is replaced takes another's parameters

`AsyncDataParallel` calls this from an optimizer's hooks, and a thread carries out its requests; the simulation drives
the same object in virtual time.

[Note: warm-up] In the first steps parameters change most, and workers that train separately for k steps are far from
each other when they are averaged. Exchanging often at first (post-local SGD: Lin et al., arXiv 1808.07217) costs few
bytes and lets an outer momentum start where the direction is clear; averaging alone gains little (see
benchmarks/asynchronous/README.md). Where the network can't carry every other step, updates are skipped until it can.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.async_dp.protocol.hub_messages import HubMessage, meta_number
from paceline.async_dp.worker.fragment_replica import FragmentReplica, FragmentState
from paceline.async_dp.worker.hub_session import HubSession
from paceline.async_dp.worker.score_based_selection import SelectionPolicy
from paceline.async_dp.worker.session_state import SessionRequest
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule

__all__ = ["AsyncWorker", "WorkerCounts"]

log = logging.getLogger("paceline.async_dp")

_SMOOTHING_STEPS = 20
_WARMUP_EVERY = 2


@dataclass(kw_only=True)
class WorkerCounts:
    """Counters of a worker.

    Attributes:
        steps: local steps.
        samples: in these steps.
        sent: updates.
        withheld: updates that were not sent, by score.
        taken: global parameters that were applied.
        declined: global parameters that were not applied, by score.
        replaced: times that another worker's parameters replaced its own.
        late: steps by which parameters were applied later than due, in total.
        skipped: updates that were due while the previous one was in progress.
    """

    steps: int = 0
    samples: float = 0.0
    sent: int = 0
    withheld: int = 0
    taken: int = 0
    declined: int = 0
    replaced: int = 0
    late: int = 0
    skipped: int = 0


class AsyncWorker:
    """Decides after every local step what to send and what to apply.

    Args:
        replicas: of all fragments.
        sessions: with the hubs; fragment f belongs to hub f mod their number.
        schedule: k, d and the number of fragments.
        policy: selects updates and global parameters by score.
        score: returns the score of the model's parameters, lower is better; None: no scores.
        reset_optimizer: called when the optimizer's state belongs to other parameters than the model has now.
        warmup: local steps during which it exchanges as often as possible, see [Note: warm-up].
        stagger: start the cycle of k steps at another step than other workers, so that they send in turns.

    Attributes:
        counts: of steps and updates.
        lr_scale: factor for the learning rate that the hub assigned.
        scores: (step, score, "own" or "global" for the global parameters).
    """

    def __init__(
        self,
        replicas: Sequence[FragmentReplica],
        sessions: Sequence[HubSession],
        schedule: SyncSchedule,
        policy: SelectionPolicy,
        *,
        score: Callable[[], float] | None = None,
        reset_optimizer: Callable[[], None] = lambda: None,
        warmup: int = 0,
        stagger: bool = True,
    ) -> None:
        self.replicas, self.sessions, self.schedule, self.policy = replicas, sessions, schedule, policy
        self.warmup, self.counts, self.lr_scale = warmup, WorkerCounts(), 1.0
        self.scores: list[tuple[int, float, str]] = []
        self._score, self._reset_optimizer = score, reset_optimizer
        self._cycle_step, self._staggered = 0, not stagger
        self._score_before: float | None = None  # of the global parameters that it started from
        self._best_score: float = math.inf
        self._finishing: dict[int, bool] = {}  # fragments not finished: whether their last update was sent
        self._mean_samples = self._throughput = 0.0  # per step; per second

    def step(self, samples: float, lr: float, now: float, step_seconds: float, count: int = 1) -> None:
        """Count local steps and do what is due after the last of them.

        Args:
            samples: of all these steps.
            lr: learning rate.
            now: seconds.
            step_seconds: duration of a step.
            count: number of steps; at most `steps_until_due`.
        """
        counts, schedule = self.counts, self._current_schedule()
        counts.steps += count
        counts.samples += samples
        fraction = min(1.0, count / min(counts.steps, _SMOOTHING_STEPS))
        self._mean_samples += (samples / count - self._mean_samples) * fraction
        self._throughput = self._mean_samples / step_seconds if step_seconds > 0 else 0.0
        for replica in self.replicas:
            replica.samples += samples
            replica.steps += count
            if replica.state is FragmentState.RECEIVED and (counts.steps >= replica.due or replica.overwrite):
                self._apply(replica)
        phase = self.sessions[0].hub_status.phase
        if phase == "population":
            self._step_in_population(lr)
        elif self._together:
            self._send_due(now, step_seconds, count, schedule)
        for session in self.sessions:
            if session.hub_status.wants_params:
                self._provide_params(session, now)

    def steps_until_due(self) -> int:
        """Return after how many more steps something is due, 1 or more, unless something arrives in between."""
        first = self.sessions[0]
        if first.adopted is not None or first.hub_status.phase == "empty":
            return 1
        for session in self.sessions:
            if session.hub_status.wants_params:
                return 1
        due, late = self._next_due()
        return 1 if late else due

    def steps_until_check(self, longest: int) -> tuple[int, bool]:
        """Return after how many more steps to look for arrivals, and whether an answer of the hub is overdue.

        For a caller that calls `step` only then: 1 or more, and no more than until something is due.

        Args:
            longest: steps between two checks while an answer is overdue.
        """
        due, late = self._next_due()
        if not self.in_population:
            late = late or any(replica.revision < 0 for replica in self.replicas)
        return min(due, longest) if late else due, late

    def _next_due(self) -> tuple[int, bool]:
        """Return the steps until something is due, and whether something was due already."""
        steps, every = self.counts.steps, self.schedule.every
        if not self._together:
            due = every - steps % every
        elif not self._staggered:
            return 1, False
        else:
            due = self._current_schedule().steps_until_due(self._cycle_step)
        if steps < self.warmup:
            due = min(due, self.warmup - steps)
        late = False
        for replica in self.replicas:
            if replica.state is FragmentState.IDLE:
                continue
            if replica.state is FragmentState.RECEIVED and replica.overwrite:
                return 1, False
            late = late or replica.due <= steps
            if replica.due > steps:
                due = min(due, replica.due - steps)
        return due, late

    @property
    def _together(self) -> bool:
        """Whether all workers share the global parameters."""
        return self.sessions[0].hub_status.phase == "together" or self.replicas[0].revision >= 0

    # ------------------------------------------------------------------ updates

    def _current_schedule(self) -> SyncSchedule:
        schedule = self.schedule
        if self.counts.steps >= self.warmup or schedule.every <= _WARMUP_EVERY:
            return schedule
        every = max(_WARMUP_EVERY, schedule.fragments)
        return SyncSchedule(every, schedule.fragments, min(1, every - 1))

    def _send_due(self, now: float, step_seconds: float, count: int, schedule: SyncSchedule) -> None:
        if not self._staggered:
            status = self.sessions[0].hub_status
            self._cycle_step = status.slot * self.schedule.every // max(1, status.slots)
            self._staggered = True
        self._cycle_step += count
        fragment = schedule.fragment_due_at(self._cycle_step)
        if fragment is None:
            return
        replica = self.replicas[fragment]
        if replica.state is not FragmentState.IDLE or replica.revision < 0:
            self.counts.skipped += 1
            return
        self._send(fragment, replica, schedule.delay, now + schedule.delay * step_seconds)

    def _send(self, fragment: int, replica: FragmentReplica, delay: int, by: float) -> None:
        """Take a snapshot, send it if its score allows, and fetch the global parameters for `delay` steps later."""
        score = self._score_model() if self.policy.scores else None
        replica.sent = self.policy.sends(score, self._score_before, self._best_score)
        meta = {"samples": replica.samples, "steps": max(1, replica.steps), "rate": self._throughput}
        if score is not None:
            meta["score"] = score
            if self._score_before is not None:
                meta["before"] = self._score_before
        replica.snapshot()
        replica.due = self.counts.steps + delay
        replica.state = FragmentState.EXCHANGING
        if replica.sent:
            self.counts.sent += 1
        else:
            self.counts.withheld += 1
        request = SessionRequest(fragment, "update" if replica.sent else "fetch", by, meta)
        self.sessions[fragment % len(self.sessions)].requests.append(request)

    def _apply(self, replica: FragmentReplica) -> None:
        """Apply what was received, unless its score forbids it."""
        self.counts.late += max(0, self.counts.steps - replica.due) if replica.due else 0
        if replica.overwrite or replica.revision < 0:
            if replica.overwrite:
                replica.samples, replica.steps = 0.0, 0  # what they taught is dropped
                if replica.reset_optimizer:
                    self._reset_optimizer()
            replica.apply_received()
            self.counts.taken += 1
            self._score_before = self._score_global(replica) if self.policy.scores else None
            return
        if self.policy.scores and self._score is not None:
            own = self._score_model()
            replica.swap_received()
            other = self._score_global(replica)
            replica.swap_received()
            if not self.policy.receives(own, other, self._best_score):
                replica.discard_received()
                self.counts.declined += 1
                return
            self._score_before = other
        replica.apply_received()
        self.counts.taken += 1

    # ------------------------------------------------------------------ the end

    @property
    def has_global_params(self) -> bool:
        """Whether it ever applied the global parameters."""
        return all(replica.revision >= 0 for replica in self.replicas)

    @property
    def in_population(self) -> bool:
        """Whether workers still train separately, so that there are no global parameters."""
        return self.sessions[0].hub_status.phase == "population" and not self._together

    def begin_finish(self) -> None:
        """Start sending the last updates."""
        self._finishing = dict.fromkeys(range(len(self.replicas)), False)

    def poll_finish(self, now: float) -> bool:
        """Send the last update of every idle fragment and apply its parameters; return whether all is done.

        No step is made meanwhile, so the delta rule leaves exactly the global parameters. If no hub has answered yet,
        this goes through the same stages as between steps once one does.
        """
        for session in self.sessions:
            if session.hub_status.wants_params:
                self._provide_params(session, now)
        for fragment, sent in list(self._finishing.items()):
            replica = self.replicas[fragment]
            if replica.state is FragmentState.RECEIVED:
                self._apply(replica)
                if sent or not replica.steps:  # nothing was learnt since
                    del self._finishing[fragment]
            elif replica.state is FragmentState.IDLE and replica.revision >= 0:
                self._finishing[fragment] = True
                self._send(fragment, replica, 0, now)
        return not self._finishing

    # ------------------------------------------------------------------ before all share parameters

    def _step_in_population(self, lr: float) -> None:
        session = self.sessions[0]
        adopted, session.adopted = session.adopted, None
        if adopted is not None:
            self._adopt(adopted, lr)
        if self.counts.steps % self.schedule.every == 0:
            score = self._score_model()
            if score is not None:
                meta = {"score": score, "steps": self.counts.steps, "lr": lr * self.lr_scale}
                session.requests.append(SessionRequest(0, "score", meta=meta))

    def _adopt(self, adopted: dict[int, HubMessage], lr: float) -> None:
        """Take another worker's parameters and learning rate."""
        for fragment, message in adopted.items():
            replica = self.replicas[fragment]
            replica.overwrite = True
            replica.receive(-1, message.dtype, message.payload)
            replica.apply_received()
        adopted_lr = meta_number(adopted[0].meta, "lr")
        if adopted_lr and lr > 0:
            self.lr_scale = float(adopted_lr) / lr
        self.counts.replaced += 1
        self._reset_optimizer()

    def _provide_params(self, session: HubSession, now: float) -> None:
        """Send a hub the parameters of its fragments, once all of them are idle."""
        if any(replica.state is not FragmentState.IDLE for replica in session.replicas.values()):
            return
        session.hub_status.take_ask(now)
        for fragment, replica in session.replicas.items():
            kept = replica.samples, replica.steps
            replica.snapshot()
            replica.samples, replica.steps = kept
            replica.state = FragmentState.EXCHANGING
            session.requests.append(SessionRequest(fragment, "parameters"))

    # ------------------------------------------------------------------ scores

    def _score_model(self, params: str = "own") -> float | None:
        if self._score is None:
            return None
        with torch.no_grad():
            score = float(self._score())
        self.scores.append((self.counts.steps, score, params))
        if score < self._best_score:
            self._best_score = score
        return score

    def _score_global(self, replica: FragmentReplica) -> float | None:
        """Return the score of the global parameters, which the model holds now, and report it to the hub."""
        score = self._score_model("global")
        if score is not None:
            meta = {"score": score, "revision": replica.received_revision}
            self.sessions[0].requests.append(SessionRequest(0, "score", meta=meta))
        return score
