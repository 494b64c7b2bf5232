"""Workers that begin apart, from different parameters: who is replaced by whom, when all go on together (pure).

Every worker tells its score on the shared held-out slice from time to time; lower is better. There is no barrier: a
worker is judged when it tells, against what the others told last.

    replace     it is the worst, worse than the best by more than `margin` of that: it takes the best's parameters and
                learning rate, the latter times or divided by `perturb`
    together    most have made `steps` steps, or the best is ahead of all others by more than `gap` of its score:
                all take the best's parameters, and from then on share a centre

Different initial parameters can't be averaged; adopting the best early costs next to nothing and gains what the best
beginning is better than an ordinary one. Source of replacing: population based training, Jaderberg et al., arXiv
1711.09846, with truncation selection inside one data-parallel training.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from paceline.errors import UsageError
from paceline.mixing import key_of

__all__ = ["Population", "PopulationRules", "Replace", "Together"]


@dataclass(frozen=True)
class PopulationRules:
    """How a population is led.

    Attributes:
        steps: that most workers make before all go on together.
        margin: share of the best score by which a worker is too bad; infinity: nobody is replaced.
        grace: scores that a worker tells, after it began or was replaced, before it is judged.
        perturb: factor by which the learning rate of a worker that is replaced differs from the best's; 1: none.
        gap: share of the best score by which the best is ahead of all others when all join it early; None: never.
        seed: of what is drawn.
    """

    steps: int = 100
    margin: float = 0.05
    grace: int = 1
    perturb: float = 1.0
    gap: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 1:
            raise UsageError(f"population of {self.steps!r} steps", remedy="give a whole number of 1 or more")
        if not self.margin > 0:
            raise UsageError(f"margin={self.margin!r}", remedy="give a share above 0, such as 0.05")
        if type(self.grace) is not int or self.grace < 0:
            raise UsageError(f"grace={self.grace!r}", remedy="give a whole number of scores, 0 or more")
        if not 1 <= self.perturb < math.inf:
            raise UsageError(f"perturb={self.perturb!r}", remedy="give a factor of 1 or more, such as 1.2")
        if self.gap is not None and not self.gap > 0:
            raise UsageError(f"gap={self.gap!r}", remedy="give a share above 0, such as 0.2, or None")


@dataclass(frozen=True)
class Replace:
    """A worker takes another's parameters: who, whose, at which learning rate, why."""

    worker: int
    by: int
    lr: float
    reason: str


@dataclass(frozen=True)
class Together:
    """All take the best's parameters and share a centre from now on."""

    best: int
    reason: str


@dataclass
class _Told:
    score: float
    steps: int
    lr: float
    times: int


@dataclass
class Population:
    """Follows the scores and decides.

    Attributes:
        rules: how.
    """

    rules: PopulationRules
    _told: dict[int, _Told] = field(default_factory=dict)
    _decisions: int = 0

    def tell(
        self, worker: int, score: float, steps: int, lr: float, alive: Collection[int]
    ) -> Replace | Together | None:
        """Note a worker's score, and return what is to be done about it.

        Args:
            worker: who. score: of its parameters, lower is better, NaN is worst. steps: that it has made.
            lr: its learning rate. alive: workers that count.
        """
        score = math.inf if math.isnan(score) else score
        before = self._told.get(worker)
        self._told[worker] = _Told(score, steps, lr, 1 if before is None else before.times + 1)
        for gone in self._told.keys() - set(alive):
            del self._told[gone]
        return self._join() or self._judge(worker)

    def _join(self) -> Together | None:
        rules, told = self.rules, self._told
        best = self._best()
        if best is None or not math.isfinite(told[best].score):
            return None
        score = told[best].score
        done = sum(each.steps >= rules.steps for each in told.values())
        if 2 * done > len(told):
            return Together(
                best, f"{done} of {len(told)} workers made {rules.steps} steps; best score {score:.4f}"
            )
        others = [each.score for worker, each in told.items() if worker != best]
        if rules.gap is not None and others and all(each.times > rules.grace for each in told.values()):
            ahead = (min(others) - score) / _scale(score)
            if ahead > rules.gap:
                return Together(best, f"its score {score:.4f} is {ahead:.0%} ahead of all others")
        return None

    def _judge(self, worker: int) -> Replace | None:
        rules, told = self.rules, self._told
        best, mine = self._best(), told[worker]
        if best is None or best == worker or mine.times <= rules.grace:
            return None
        worst = max(each.score for each in told.values())
        score = told[best].score
        behind = (mine.score - score) / _scale(score)
        if mine.score < worst or not behind > rules.margin:
            return None
        self._decisions += 1
        up = key_of(self._decisions, self.rules.seed) % 2
        lr = told[best].lr * (rules.perturb if up else 1 / rules.perturb)
        mine.times = 0
        return Replace(
            worker, best, lr, f"score {mine.score:.4f} is {behind:.0%} behind the best, {score:.4f} of {best}"
        )

    def _best(self) -> int | None:
        return min(self._told, key=lambda worker: (self._told[worker].score, worker), default=None)


def _scale(score: float) -> float:
    return abs(score) if score else 1.0
