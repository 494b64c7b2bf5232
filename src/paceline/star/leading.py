"""Who gives the parameters that all share, and what becomes of workers that train apart until then.

The hub has no model of its own: the first worker gives its parameters, or after a population's phase the best one. A
worker whose parameters are wanted is asked, and answers when it can; if it is gone before, nothing has happened, and
the next one is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.exchange.envelope import Bytes
from paceline.exchange.seam import HUB
from paceline.star.members import Member
from paceline.star.population import Population, PopulationRules, Replace, Together
from paceline.star.words import Message, number, whole

__all__ = ["Leader"]


@dataclass
class _Wanted:
    """Parameters that a worker was asked for.

    Attributes:
        decisions: what for; None: to begin with. packets: that came, by fragment.
    """

    decisions: list[Replace | Together | None]
    packets: dict[int, Bytes] = field(default_factory=dict)


class Leader:
    """Leads workers to a common beginning.

    Args:
        rules: of a population; None: the first worker's parameters are the beginning.
        send: takes a message to its target. note: writes down what happened.
        begin: called with the packets of all fragments and whose they are: all share these from now on.
    """

    def __init__(
        self,
        rules: PopulationRules | None,
        send: Callable[[Message], object],
        note: Callable[..., object],
        begin: Callable[[Mapping[int, Bytes], Member], object],
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

    def welcome(self, member: Member, alive: Collection[int]) -> None:
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

    def score(self, message: Message, member: Member, alive: Collection[int]) -> None:
        """Take in the score of a worker's own parameters, and decide."""
        score, steps = float(number(message.meta, "score") or 0.0), whole(message.meta, "steps")
        lr = float(number(message.meta, "lr") or 0.0)
        self._note("score", worker=member.number, score=score, steps=steps, lr=lr)
        if self._population is None or self._joining():
            return
        decision = self._population.tell(member.number, score, steps, lr, alive)
        if isinstance(decision, Replace):
            told = {"worker": decision.worker, "by": decision.by, "lr": decision.lr}
            self._note("replace", **told, why=decision.reason)
            self._want(decision.by, decision)
        elif decision is not None:
            self._note("together", worker=decision.best, why=decision.reason)
            self._want(decision.best, decision)

    def parameters(self, message: Message, member: Member, fragments: Iterable[int]) -> None:
        """Take in a fragment of what was asked for; with the last one, do what it was asked for."""
        wanted = self._wanted.get(member.number)
        if wanted is None:
            return
        wanted.packets[message.fragment] = message.payload
        if wanted.packets.keys() != set(fragments):
            return
        del self._wanted[member.number]
        for each in wanted.decisions:
            if isinstance(each, Replace):
                self._hand_on(wanted.packets, each)
        if any(not isinstance(each, Replace) for each in wanted.decisions):
            self._begin(wanted.packets, member)

    def _asks(self, alive: Collection[int]) -> bool:
        return any(each in alive for each in self._wanted)

    def _joining(self) -> bool:
        return any(
            isinstance(each, Together) for wanted in self._wanted.values() for each in wanted.decisions
        )

    def _want(self, worker: int, decision: Replace | Together | None) -> None:
        self._last = worker
        self._wanted.setdefault(worker, _Wanted([])).decisions.append(decision)
        self._ask(worker)

    def _ask(self, worker: int) -> None:
        self._send(Message("ask", HUB, worker))

    def _hand_on(self, packets: Mapping[int, Bytes], decision: Replace) -> None:
        """Give a worker another's parameters."""
        meta: dict[str, Any] = {"lr": decision.lr, "by": decision.by, "why": decision.reason[:200]}
        for fragment, packet in packets.items():
            self._send(Message("adopt", HUB, decision.worker, 0, fragment, meta, packet, "fp32"))
