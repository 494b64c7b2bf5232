"""Which plans are worth a turn on the real run: the default, and what the bucket simulation ranks first (pure).

What a rank saw in one backward (when each gradient was ready) and in a few calls (what one costs) is enough to rank
bucket sizes. It is not enough to trust the ranking to a few per cent, so candidates differ by a factor of two or more
in the number of their buckets, and the run decides among them. Sharding is first tried at the usual size: what it
gains, a shorter update, does not depend on the buckets.

A race between candidates on the real run: few turns each, in alternating order, the slow ones leave early (pure).

A turn is a few steps of one candidate. Candidate 0 is the default and runs in every round, so that a candidate is
judged by its time ÷ the default's *in the same round*: what the machine or the data do meanwhile meets both. A
candidate's score is the median of these ratios over its rounds.

    round 1   all
    round 2   the default and the best two
    round 3 … the default and the best one

A challenger wins if its score is below `GAIN`; otherwise the default stays, which costs nothing to keep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from paceline._core.units import MIB
from paceline.cost_model.bucket_layout import CommChannel, ReadyGradient, plan_buckets, simulate_backward
from paceline.parallel.strategy import STRATEGIES, Shard, Sync

__all__ = ["GAIN", "CallCost", "CandidateRace", "candidate_plans"]

_CAPS_MIB = (0.0, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, math.inf)


_APART = 2.0


@dataclass(frozen=True)
class CallCost:
    """Seconds of an all-reduce: `call_seconds` + `seconds_per_byte` · its bytes."""

    call_seconds: float
    seconds_per_byte: float

    def reduce_scatter(self, nbytes: float) -> float:
        """Return the seconds of a reduce-scatter of so many bytes: one of an all-reduce's two passes."""
        return self.call_seconds + self.seconds_per_byte * nbytes / 2

    def all_reduce(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce of so many bytes."""
        return self.call_seconds + self.seconds_per_byte * nbytes


def candidate_plans(
    ready: Sequence[ReadyGradient], price: CallCost, *, may_shard: bool, most: int = 5
) -> tuple[Sync, ...]:
    """Return the plans to try, the default first.

    Args:
        ready: the gradients in the order in which they become ready.
        price: of a call.
        may_shard: whether the optimizer can update shards.
        most: plans, 2 or more.

    Example:
        >>> layers = [ReadyGradient(4 << 20, 0.01 * place) for place in range(1, 21)]
        >>> [plan.name for plan in candidates(layers, CallCost(1e-3, 1e-9), may_shard=True)][:2]
        ['bucketed', 'sharded']
    """
    picked: list[tuple[Sync, int]] = [(Sync(), _buckets(ready, Sync()))]
    whole = _ranked(ready, CommChannel(price.all_reduce), "none")
    rows = [whole]
    if may_shard:
        usual = Sync(shard="optimizer")
        ranked = _ranked(ready, CommChannel(price.reduce_scatter), "optimizer")
        rows = [[(usual, _buckets(ready, usual)), *ranked], whole]
    flat = STRATEGIES["flat"]
    while rows and len(picked) < most - 1:
        for row in list(rows):
            best = next((each for each in row if _differs(each, picked)), None)
            if best is None:
                rows.remove(row)
            elif len(picked) < most - 1:
                picked.append(best)
    return (*(plan for plan, _ in picked), flat)


def _ranked(ready: Sequence[ReadyGradient], channel: CommChannel, shard: Shard) -> list[tuple[Sync, int]]:
    """Return plans with their numbers of buckets, the one with the shortest backward first."""
    found = []
    for plan in (Sync(bucket_mib=mib, shard=shard) for mib in _CAPS_MIB):
        backward = simulate_backward(ready, plan.bucket_nbytes, channel)
        found.append((backward.end, len(backward.buckets), plan))
    return [(plan, count) for _, count, plan in sorted(found, key=lambda each: each[:2])]


def _buckets(ready: Sequence[ReadyGradient], plan: Sync) -> int:
    nbytes, kinds = [each.nbytes for each in ready], [each.kind for each in ready]
    return len(plan_buckets(range(len(ready)), nbytes, kinds, plan.bucket_mib * MIB))


def _differs(candidate: tuple[Sync, int], picked: Sequence[tuple[Sync, int]]) -> bool:
    """Tell whether a plan has at least twice as many or half as many buckets as any that was picked of its kind."""
    plan, count = candidate
    alike = [other for one, other in picked if one.shard == plan.shard]
    return all(max(count, other) >= _APART * min(count, other) for other in alike)


GAIN = 0.985
"""Score that a challenger must be below: less than that is what two turns of one candidate differ by."""


_BEST = (2, 1)
"""Challengers in the second round, and in each later one."""


@dataclass
class CandidateRace:
    """A race under way.

    Attributes:
        candidates: how many, the default among them, 1 or more.
        rounds: in which the default runs, 1 or more.
        seconds: per candidate, what a step took in each of its turns; None for rounds in which it did not run.

    Example:
        >>> race = CandidateRace(candidates=3, rounds=3)
        >>> while (turn := race.turn) is not None:
        ...     race.record([1.0, 0.8, 0.9][turn])
        >>> race.winner, race.score(1)
        (1, 0.8)
    """

    candidates: int
    rounds: int = 4
    seconds: list[list[float | None]] = field(init=False)
    _queue: list[int] = field(init=False)

    def __post_init__(self) -> None:
        assert self.candidates >= 1, "the default at least"
        assert self.rounds >= 1, "each runs once at least"
        self.seconds = [[] for _ in range(self.candidates)]
        self._queue = list(range(self.candidates)) if self.candidates > 1 else []
        for row in self.seconds if self._queue else []:
            row.append(None)

    @property
    def turn(self) -> int | None:
        """The candidate whose turn it is; None when the race is over."""
        return self._queue[0] if self._queue else None

    def record(self, seconds: float) -> None:
        """Note what a step took in the turn that is over, above 0; the next turn begins."""
        self.seconds[self._queue.pop(0)][-1] = seconds
        done = len(self.seconds[0])
        if self._queue or done == self.rounds:
            return
        best = sorted(self._running(), key=self.score)[: _BEST[min(done, len(_BEST)) - 1]]
        order = [0, *sorted(best)]
        self._queue = order if done % 2 == 0 else order[::-1]
        for row in self.seconds:
            row.append(None)

    def _running(self) -> list[int]:
        """Return the challengers that ran in the latest round."""
        return [number for number in range(1, self.candidates) if self.seconds[number][-1] is not None]

    def score(self, number: int) -> float:
        """Return a candidate's time ÷ the default's, the median over its rounds; it must have had a turn."""
        pairs = zip(self.seconds[number], self.seconds[0], strict=True)
        return median(mine / default for mine, default in pairs if mine is not None and default is not None)

    def step_seconds(self, number: int) -> float:
        """Return what a step of a candidate took, the median over its turns; it must have had one."""
        return median(each for each in self.seconds[number] if each is not None)

    @property
    def winner(self) -> int:
        """The challenger that ran in every round, if it is faster; else the default. Call it when the race is over."""
        if self.candidates == 1:
            return 0
        best = min(self._running(), key=self.score)
        return best if self.score(best) < GAIN else 0
