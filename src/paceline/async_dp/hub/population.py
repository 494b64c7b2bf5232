"""Initial parameters: which worker provides them, and how a population trains until then.

The hub has no model: the first worker provides the global parameters. In a population, workers first train from
different parameters, and each reports its score on the shared held-out slice from time to time; lower is better. There
is no barrier: a worker is judged when it reports, against the last reports of the others.

    replace     it is the worst, and behind the best by more than `margin` of the best score: it takes the best's
                parameters and learning rate, the latter times or divided by `perturb`
    join        most have made `steps` steps, or the best leads all others by more than `gap` of its score: all take
                the best's parameters, and share global parameters from then on

Different initial parameters can't be averaged; adopting the best early costs next to nothing and gains the lead of the
best start over an ordinary one. Source of replacing: population based training, Jaderberg et al., arXiv 1711.09846,
with truncation selection inside one data-parallel training.

Parameters are requested from the worker that has them; if it is gone before it sends them, nothing changes, and the
next worker's are requested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline._core.keyed_random import derive_key
from paceline.async_dp.hub.hub_settings import PopulationRules
from paceline.async_dp.hub.membership import HubMember
from paceline.async_dp.protocol.hub_messages import HubMessage, meta_count, meta_number
from paceline.transport.envelope import Bytes
from paceline.transport.transport_interface import HUB

__all__ = ["InitialParamsCoordinator", "JoinDecision", "Population", "ReplaceDecision"]


@dataclass(frozen=True)
class ReplaceDecision:
    """Worker `worker` takes the parameters of worker `by`, and learning rate `lr`."""

    worker: int
    by: int
    lr: float
    reason: str


@dataclass(frozen=True)
class JoinDecision:
    """All take the parameters of worker `best` and share global parameters from now on."""

    best: int
    reason: str


@dataclass
class _Report:
    score: float
    steps: int
    lr: float
    count: int  # reports since the worker started or was replaced


class Population:
    """Follows the scores of a population and decides."""

    def __init__(self, rules: PopulationRules) -> None:
        self.rules = rules
        self._reports: dict[int, _Report] = {}
        self._decisions = 0

    def report(
        self, worker: int, score: float, steps: int, lr: float, alive: Collection[int]
    ) -> ReplaceDecision | JoinDecision | None:
        """Record a worker's score, and return what follows from it.

        Args:
            worker: its number.
            score: of its parameters, lower is better, NaN is worst.
            steps: local steps that it has made.
            lr: its learning rate.
            alive: workers that count.
        """
        score = math.inf if math.isnan(score) else score
        before = self._reports.get(worker)
        self._reports[worker] = _Report(score, steps, lr, 1 if before is None else before.count + 1)
        for gone in self._reports.keys() - set(alive):
            del self._reports[gone]
        best = min(self._reports, key=lambda each: (self._reports[each].score, each), default=None)
        if best is None:
            return None
        return self._join(best) or self._replace(worker, best)

    def _join(self, best: int) -> JoinDecision | None:
        rules, reports = self.rules, self._reports
        score = reports[best].score
        if not math.isfinite(score):
            return None
        done = sum(each.steps >= rules.steps for each in reports.values())
        if 2 * done > len(reports):
            return JoinDecision(
                best, f"{done} of {len(reports)} workers made {rules.steps} steps; best score {score:.4f}"
            )
        others = [each.score for worker, each in reports.items() if worker != best]
        if rules.gap is not None and others and all(each.count > rules.grace for each in reports.values()):
            lead = (min(others) - score) / _scale(score)
            if lead > rules.gap:
                return JoinDecision(best, f"its score {score:.4f} is {lead:.0%} ahead of all others")
        return None

    def _replace(self, worker: int, best: int) -> ReplaceDecision | None:
        rules, reports = self.rules, self._reports
        own, score = reports[worker], reports[best].score
        if best == worker or own.count <= rules.grace:
            return None
        behind = (own.score - score) / _scale(score)
        if own.score < max(each.score for each in reports.values()) or not behind > rules.margin:
            return None
        self._decisions += 1
        up = derive_key(self._decisions, rules.seed) % 2
        lr = reports[best].lr * (rules.perturb if up else 1 / rules.perturb)
        own.count = 0
        reason = f"score {own.score:.4f} is {behind:.0%} behind the best, {score:.4f} of {best}"
        return ReplaceDecision(worker, best, lr, reason)


def _scale(score: float) -> float:
    return abs(score) if score else 1.0


@dataclass
class _ParamsRequest:
    """A request for a worker's parameters."""

    number: int  # of the request, from 1
    decisions: list[ReplaceDecision | JoinDecision | None]  # that need them; None: the start
    packets: dict[int, Bytes] = field(default_factory=dict)  # received, by fragment


class InitialParamsCoordinator:
    """Requests parameters from workers until all share the global ones.

    Args:
        rules: of a population; None: the first worker provides the parameters.
        send: sends a message.
        record: writes a decision to the journal.
        start: called with the packets of all fragments and their worker: they are the global parameters.
    """

    def __init__(
        self,
        rules: PopulationRules | None,
        send: Callable[[HubMessage], object],
        record: Callable[..., object],
        start: Callable[[Mapping[int, Bytes], HubMember], object],
    ) -> None:
        self._population = None if rules is None else Population(rules)
        self._send, self._record, self._start = send, record, start
        self._requests: dict[int, _ParamsRequest] = {}
        self._last_requested = self._request_count = 0

    def expects(self, worker: int) -> bool:
        """Return whether parameters are requested from a worker and have not all arrived."""
        return worker in self._requests

    def on_join(self, worker: int, alive: Collection[int]) -> None:
        """Request a new worker's parameters unless another's are, or repeat the request."""
        if self.expects(worker):
            self._send_request(worker)
        elif self._population is None and not self._has_request(alive):
            self._request(worker, None)

    def request_next(self, alive: Collection[int]) -> None:
        """Request the next worker's parameters: the last one is gone, or its parameters were not finite."""
        if alive and not self._has_request(alive):
            later = (each for each in alive if each > self._last_requested)
            self._request(min(later, default=min(alive)), None)

    def on_leave(self, worker: int) -> None:
        """Drop the request to a worker."""
        self._requests.pop(worker, None)

    def clear(self) -> None:
        """Drop all requests: all workers share the global parameters."""
        self._requests.clear()

    def on_score(self, message: HubMessage, member: HubMember, alive: Collection[int]) -> None:
        """Record the score of a worker's own parameters, and decide."""
        score, lr = (float(meta_number(message.meta, name) or 0.0) for name in ("score", "lr"))
        steps = meta_count(message.meta, "steps")
        self._record("score", worker=member.number, score=score, steps=steps, lr=lr)
        if self._population is None or self._is_joining():
            return
        decision = self._population.report(member.number, score, steps, lr, alive)
        if isinstance(decision, ReplaceDecision):
            self._record(
                "replace", worker=decision.worker, by=decision.by, lr=decision.lr, why=decision.reason
            )
            self._request(decision.by, decision)
        elif decision is not None:
            self._record("together", worker=decision.best, why=decision.reason)
            self._request(decision.best, decision)

    def on_params(self, message: HubMessage, member: HubMember, fragments: Iterable[int]) -> None:
        """Store a fragment of requested parameters; with the last one, carry out the decisions."""
        request = self._requests.get(member.number)
        if request is None:
            return
        request.packets[message.fragment] = message.payload
        if request.packets.keys() != set(fragments):
            return
        del self._requests[member.number]
        for decision in request.decisions:
            if isinstance(decision, ReplaceDecision):
                self._send_params(request.packets, decision)
        if any(not isinstance(decision, ReplaceDecision) for decision in request.decisions):
            self._start(request.packets, member)

    def _has_request(self, alive: Collection[int]) -> bool:
        return any(each in alive for each in self._requests)

    def _is_joining(self) -> bool:
        return any(
            isinstance(each, JoinDecision)
            for request in self._requests.values()
            for each in request.decisions
        )

    def _request(self, worker: int, decision: ReplaceDecision | JoinDecision | None) -> None:
        self._last_requested = worker
        if worker not in self._requests:
            self._request_count += 1
            self._requests[worker] = _ParamsRequest(self._request_count, [])
        self._requests[worker].decisions.append(decision)
        self._send_request(worker)

    def _send_request(self, worker: int) -> None:
        self._send(HubMessage("ask", HUB, worker, self._requests[worker].number))

    def _send_params(self, packets: Mapping[int, Bytes], decision: ReplaceDecision) -> None:
        meta: dict[str, Any] = {"lr": decision.lr, "by": decision.by, "why": decision.reason[:200]}
        for fragment, packet in packets.items():
            self._send(HubMessage("adopt", HUB, decision.worker, 0, fragment, meta, packet, "fp32"))
