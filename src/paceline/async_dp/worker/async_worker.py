"""The training side of a worker: which local step sends, which takes in, and what of it counts (no thread, no clock).

    after every local step      count it; take in what has come and is due; snapshot and offer what is due
    in the warm-up              exchange at every other step, see [Note: warm-up]
    before the first centre     nothing is sent: the worker trains alone until it is in touch with a hub
    in a population             every k-th step tells a score; a worker that is replaced takes another's parameters

`Star` hooks this onto a real optimizer and has a thread carry out its orders; virtual time drives the same object.

[Note: warm-up] In the first steps parameters change most, and workers that train apart for k steps are far from one
another when they are averaged. Exchanging often at first (post-local SGD: Lin et al., arXiv 1808.07217) costs few bytes
and lets an outer momentum begin where the way is clear; averaging alone gains little by it (benchmarks/star/README.md).
Where the network does not manage every other step, sendings are skipped until it does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.async_dp.protocol.hub_messages import HubMessage, meta_number
from paceline.async_dp.worker.session_state import SessionRequest
from paceline.async_dp.worker.fragment_replica import FragmentReplica, FragmentState
from paceline.async_dp.worker.hub_session import HubSession
from paceline.async_dp.worker.selection_policy import SelectionPolicy
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule

__all__ = ["AsyncWorker", "WorkerCounts"]

log = logging.getLogger("paceline.async_dp")

_SMOOTH_STEPS = 20
_WARM_EVERY = 2


@dataclass
class WorkerCounts:
    """What a worker did.

    Attributes:
        steps: local ones. samples: of them. sent: snapshots that were offered. withheld: that were not good enough.
        taken: centres taken in, declined: not good enough. replaced: how often by another's parameters.
        late: steps by which what was due came later, in all.
        skipped: snapshots that were due while the one before was out.
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
    """Decides after every local step.

    Args:
        sides: all fragments. spokes: the conversations with hubs; fragment f is that of hub f mod their number.
        cadence: k, d and fragments. policy: what is sent and taken in.
        score: returns how good the model's parameters are, lower is better; None: no scores.
        forget: called when the optimizer's state belongs to other parameters than the model has now.
        warmup: local steps at the beginning in which it exchanges as often as can be, see [Note: warm-up].
        stagger: begin the cycle of k steps at another place than other workers, so that they send in turns.

    Attributes:
        counts: what it did. scores: (step, score, whose: "own" or "centre").
    """

    def __init__(
        self,
        sides: Sequence[FragmentReplica],
        spokes: Sequence[HubSession],
        cadence: SyncSchedule,
        policy: SelectionPolicy,
        *,
        score: Callable[[], float] | None = None,
        forget: Callable[[], None] = lambda: None,
        warmup: int = 0,
        stagger: bool = True,
    ) -> None:
        self.sides, self.spokes, self.cadence, self.policy = sides, spokes, cadence, policy
        self.warmup = warmup
        self.counts = WorkerCounts()
        self.lr_scale = 1.0
        self._score, self._forget = score, forget
        self._lap, self.staggered = 0, not stagger
        self._before: float | None = None  # score of the centre that it began from
        self._best: float = math.inf  # of all scores that it knows
        self.scores: list[tuple[int, float, str]] = []
        # Of fragments whose last centre is not here: was their last update offered?
        self._finishing: dict[int, bool] = {}
        self._mean_samples = self._pace = 0.0  # of a step; of a second

    def step(self, samples: float, lr: float, now: float, step_seconds: float, count: int = 1) -> None:
        """Count local steps and do what is due after the last of them.

        Args:
            samples: of all. lr: learning rate. now: seconds. step_seconds: what a step takes.
            count: how many; several at once only where nothing is due before the last: at most `steps_until_due`.
        """
        counts, cadence = self.counts, self._cadence_now()
        counts.steps += count
        counts.samples += samples
        part = min(1.0, count / min(counts.steps, _SMOOTH_STEPS))
        self._mean_samples += (samples / count - self._mean_samples) * part
        self._pace = self._mean_samples / step_seconds if step_seconds > 0 else 0.0
        for side in self.sides:
            side.samples += samples
            side.steps += count
            if side.state is FragmentState.READY and (counts.steps >= side.due or side.whole):
                self._take(side)
        phase = self.spokes[0].terms.phase
        if phase == "population":
            self._live_in_population(lr)
        elif phase == "together" or self.sides[0].revision >= 0:
            self._live_together(now, step_seconds, count, cadence)
        for spoke in self.spokes:
            if spoke.terms.wanted:
                self._hand_over(spoke)

    def steps_until_due(self) -> int:
        """Return after how many more steps something is due, 1 or more, unless something comes in between."""
        counts, every, spoke = self.counts, self.cadence.every, self.spokes[0]
        steps = counts.steps
        if spoke.adopted is not None or any(each.terms.wanted for each in self.spokes):
            return 1
        together = spoke.terms.phase == "together" or self.sides[0].revision >= 0
        if spoke.terms.phase == "empty" or (together and not self.staggered):
            return 1
        due = self._cadence_now().steps_to_sending(self._lap) if together else every - steps % every
        if steps < self.warmup:
            due = min(due, self.warmup - steps)
        for side in self.sides:
            if side.state is FragmentState.HERE:
                continue
            if side.state is FragmentState.READY and side.whole:
                return 1
            due = min(due, side.due - steps)
        return max(1, due)

    # ------------------------------------------------------------------ together

    def _cadence_now(self) -> SyncSchedule:
        """Return the cadence of the next step."""
        cadence = self.cadence
        if self.counts.steps >= self.warmup or cadence.every <= _WARM_EVERY:
            return cadence
        every = max(_WARM_EVERY, cadence.fragments)
        return SyncSchedule(every, cadence.fragments, min(1, every - 1))

    def _live_together(self, now: float, step_seconds: float, count: int, cadence: SyncSchedule) -> None:
        if not self.staggered:
            terms = self.spokes[0].terms
            self._lap = terms.slot * self.cadence.every // max(1, terms.slots)
            self.staggered = True
        self._lap += count
        due = cadence.sent_at(self._lap)
        if due is None:
            return
        side = self.sides[due]
        if side.state is not FragmentState.HERE or side.revision < 0:
            self.counts.skipped += 1
            return
        self._offer(due, side, cadence.delay, now + cadence.delay * step_seconds)

    def _offer(self, fragment: int, side: FragmentReplica, delay: int, by: float) -> None:
        """Take a snapshot, and have it sent if it is good enough, and the centre fetched for `delay` steps later."""
        score = self._own_score() if self.policy.scores else None
        side.offered = self.policy.sends(score, self._before, self._best)
        meta = {"samples": side.samples, "steps": max(1, side.steps), "rate": self._pace}
        if score is not None:
            meta["score"] = score
            if self._before is not None:
                meta["before"] = self._before
        side.snapshot()
        side.due = self.counts.steps + delay
        side.state = FragmentState.OUT
        if side.offered:
            self.counts.sent += 1
        else:
            self.counts.withheld += 1
        kind = "update" if side.offered else "fetch"
        self._spoke_of(fragment).orders.append(SessionRequest(fragment, kind, by, meta))

    def _take(self, side: FragmentReplica) -> None:
        """Take in what has come, unless it is not good enough."""
        self.counts.late += max(0, self.counts.steps - side.due) if side.due else 0
        if side.whole or side.revision < 0:
            if side.whole:
                side.samples, side.steps = 0.0, 0  # what they were learnt for is dropped
                if side.anew:
                    self._forget()
            side.take()
            self.counts.taken += 1
            self._before = self._score_centre(side) if self.policy.scores else None
            return
        if self.policy.scores and self._score is not None:
            mine = self._own_score()
            side.swap()
            theirs = self._score_centre(side)
            side.swap()
            if not self.policy.receives(mine, theirs, self._best):
                side.decline()
                self.counts.declined += 1
                return
            self._before = theirs
        side.take()
        self.counts.taken += 1

    # ------------------------------------------------------------------ the end

    def finish_begin(self, now: float) -> bool:
        """Begin to end; return False if there never was a centre."""
        self._finishing = dict.fromkeys(range(len(self.sides)), False)
        return any(side.revision >= 0 or side.state is not FragmentState.HERE for side in self.sides)

    def finish_end(self, now: float) -> bool:
        """Send the last of every fragment once it is free, and take in its centre; return whether all is done.

        No step is made meanwhile, so the delta rule leaves exactly the centre.
        """
        for fragment, offered in list(self._finishing.items()):
            side = self.sides[fragment]
            if side.state is FragmentState.READY:
                self._take(side)
                if offered:
                    del self._finishing[fragment]
            elif side.state is FragmentState.HERE and side.revision >= 0:
                self._finishing[fragment] = True
                self._offer(fragment, side, 0, now)
        return not self._finishing

    # ------------------------------------------------------------------ apart

    def _live_in_population(self, lr: float) -> None:
        spoke = self.spokes[0]
        adopted, spoke.adopted = spoke.adopted, None
        if adopted is not None:
            self._replace(adopted, lr)
        if self.counts.steps % self.cadence.every == 0:
            score = self._own_score()
            if score is not None:
                meta = {"score": score, "steps": self.counts.steps, "lr": lr * self.lr_scale}
                spoke.orders.append(SessionRequest(0, "score", meta=meta))

    def _replace(self, adopted: dict[int, HubMessage], lr: float) -> None:
        """Take another's parameters and learning rate."""
        for fragment, message in adopted.items():
            side = self.sides[fragment]
            side.whole = True
            side.arrive(-1, message.dtype, message.payload)
            side.take()
        told = meta_number(adopted[0].meta, "lr")
        if told and lr > 0:
            self.lr_scale = float(told) / lr
        self.counts.replaced += 1
        self._forget()

    def _hand_over(self, spoke: HubSession) -> None:
        """Give a hub the whole of its fragments, when nothing of them is under way."""
        if any(side.state is not FragmentState.HERE for side in spoke.sides.values()):
            return
        spoke.terms.wanted = False
        for fragment, side in spoke.sides.items():
            kept = side.samples, side.steps
            side.snapshot()
            side.samples, side.steps = kept
            side.state = FragmentState.OUT
            spoke.orders.append(SessionRequest(fragment, "parameters"))

    # ------------------------------------------------------------------ scores

    def _own_score(self, whose: str = "own") -> float | None:
        """Return the score of the parameters as the model has them now."""
        if self._score is None:
            return None
        with torch.no_grad():
            score = float(self._score())
        self.scores.append((self.counts.steps, score, whose))
        if score < self._best:
            self._best = score
        return score

    def _score_centre(self, side: FragmentReplica) -> float | None:
        """Return the score of the centre, which the model holds now, and tell it to the hub."""
        score = self._own_score("centre")
        if score is not None:
            meta = {"score": score, "revision": side.came_revision}
            self.spokes[0].orders.append(SessionRequest(0, "score", meta=meta))
        return score

    def _spoke_of(self, fragment: int) -> HubSession:
        return self.spokes[fragment % len(self.spokes)]
