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

Who gives the parameters that all share, and what becomes of workers that train apart until then.

The hub has no model of its own: the first worker gives its parameters, or after a population's phase the best one. A
worker whose parameters are wanted is asked, and answers when it can; if it is gone before, nothing has happened, and
the next one is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline._core.keyed_random import derive_key
from paceline.async_dp.hub.membership import HubMember
from paceline.async_dp.protocol.hub_messages import HubMessage, meta_number, meta_count
from paceline.errors import UsageError
from paceline.transport.envelope import Bytes
from paceline.transport.transport_interface import HUB

__all__ = ["InitialParamsCoordinator", "Population", "PopulationRules", "ReplaceDecision", "JoinDecision"]


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
class ReplaceDecision:
    """A worker takes another's parameters: who, whose, at which learning rate, why."""

    worker: int
    by: int
    lr: float
    reason: str


@dataclass(frozen=True)
class JoinDecision:
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
    ) -> ReplaceDecision | JoinDecision | None:
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

    def _join(self) -> JoinDecision | None:
        rules, told = self.rules, self._told
        best = self._best()
        if best is None or not math.isfinite(told[best].score):
            return None
        score = told[best].score
        done = sum(each.steps >= rules.steps for each in told.values())
        if 2 * done > len(told):
            return JoinDecision(
                best, f"{done} of {len(told)} workers made {rules.steps} steps; best score {score:.4f}"
            )
        others = [each.score for worker, each in told.items() if worker != best]
        if rules.gap is not None and others and all(each.times > rules.grace for each in told.values()):
            ahead = (min(others) - score) / _scale(score)
            if ahead > rules.gap:
                return JoinDecision(best, f"its score {score:.4f} is {ahead:.0%} ahead of all others")
        return None

    def _judge(self, worker: int) -> ReplaceDecision | None:
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
        up = derive_key(self._decisions, self.rules.seed) % 2
        lr = told[best].lr * (rules.perturb if up else 1 / rules.perturb)
        mine.times = 0
        return ReplaceDecision(
            worker, best, lr, f"score {mine.score:.4f} is {behind:.0%} behind the best, {score:.4f} of {best}"
        )

    def _best(self) -> int | None:
        return min(self._told, key=lambda worker: (self._told[worker].score, worker), default=None)


def _scale(score: float) -> float:
    return abs(score) if score else 1.0


@dataclass
class _Wanted:
    """Parameters that a worker was asked for.

    Attributes:
        decisions: what for; None: to begin with. packets: that came, by fragment.
    """

    decisions: list[ReplaceDecision | JoinDecision | None]
    packets: dict[int, Bytes] = field(default_factory=dict)


class InitialParamsCoordinator:
    """Leads workers to a common beginning.

    Args:
        rules: of a population; None: the first worker's parameters are the beginning.
        send: takes a message to its target. note: writes down what happened.
        begin: called with the packets of all fragments and whose they are: all share these from now on.
    """

    def __init__(
        self,
        rules: PopulationRules | None,
        send: Callable[[HubMessage], object],
        note: Callable[..., object],
        begin: Callable[[Mapping[int, Bytes], HubMember], object],
    ) -> None:
        self._population = None if rules is None else Population(rules)
        self._send, self._note, self._begin = send, note, begin
        self._wanted: dict[int, _Wanted] = {}
        self._last = 0  # who was asked last

    @property
    def leads_population(self) -> bool:
        """Whether workers train apart first."""
        return self._population is not None

    def wants(self, worker: int) -> bool:
        """Return whether a worker was asked for its parameters and has not given all of them."""
        return worker in self._wanted

    def welcome(self, member: HubMember, alive: Collection[int]) -> None:
        """Ask a worker that joins, if nobody else is asked yet, or ask it again."""
        if self.wants(member.number):
            self._ask(member.number)
        elif not self.leads_population and not self._asks(alive):
            self._want(member.number, None)

    def seek(self, alive: Collection[int]) -> None:
        """Ask the next worker for a beginning if nobody is asked: who was is gone, or what it gave is none."""
        if alive and not self._asks(alive):
            self._want(min((each for each in alive if each > self._last), default=min(alive)), None)

    def lose(self, worker: int) -> None:
        """Expect nothing of a worker any more."""
        self._wanted.pop(worker, None)

    def over(self) -> None:
        """Note that all share a centre."""
        self._wanted.clear()

    def score(self, message: HubMessage, member: HubMember, alive: Collection[int]) -> None:
        """Take in the score of a worker's own parameters, and decide."""
        score, steps = float(meta_number(message.meta, "score") or 0.0), meta_count(message.meta, "steps")
        lr = float(meta_number(message.meta, "lr") or 0.0)
        self._note("score", worker=member.number, score=score, steps=steps, lr=lr)
        if self._population is None or self._joining():
            return
        decision = self._population.tell(member.number, score, steps, lr, alive)
        if isinstance(decision, ReplaceDecision):
            told = {"worker": decision.worker, "by": decision.by, "lr": decision.lr}
            self._note("replace", **told, why=decision.reason)
            self._want(decision.by, decision)
        elif decision is not None:
            self._note("together", worker=decision.best, why=decision.reason)
            self._want(decision.best, decision)

    def parameters(self, message: HubMessage, member: HubMember, fragments: Iterable[int]) -> None:
        """Take in a fragment of what was asked for; with the last one, do what it was asked for."""
        wanted = self._wanted.get(member.number)
        if wanted is None:
            return
        wanted.packets[message.fragment] = message.payload
        if wanted.packets.keys() != set(fragments):
            return
        del self._wanted[member.number]
        for each in wanted.decisions:
            if isinstance(each, ReplaceDecision):
                self._hand_on(wanted.packets, each)
        if any(not isinstance(each, ReplaceDecision) for each in wanted.decisions):
            self._begin(wanted.packets, member)

    def _asks(self, alive: Collection[int]) -> bool:
        return any(each in alive for each in self._wanted)

    def _joining(self) -> bool:
        return any(
            isinstance(each, JoinDecision) for wanted in self._wanted.values() for each in wanted.decisions
        )

    def _want(self, worker: int, decision: ReplaceDecision | JoinDecision | None) -> None:
        self._last = worker
        self._wanted.setdefault(worker, _Wanted([])).decisions.append(decision)
        self._ask(worker)

    def _ask(self, worker: int) -> None:
        self._send(HubMessage("ask", HUB, worker))

    def _hand_on(self, packets: Mapping[int, Bytes], decision: ReplaceDecision) -> None:
        """Give a worker another's parameters."""
        meta: dict[str, Any] = {"lr": decision.lr, "by": decision.by, "why": decision.reason[:200]}
        for fragment, packet in packets.items():
            self._send(HubMessage("adopt", HUB, decision.worker, 0, fragment, meta, packet, "fp32"))
