"""The plans that ``sync="auto"`` tries, and the race between them on the real run.

When each gradient became ready in one backward, and the cost of a few calls, are enough to rank bucket sizes by
simulation, but not to trust the ranking to a few per cent. So candidates differ by a factor of two or more in their
number of buckets, and the run decides among them. Sharding is first tried at the default size: its gain, a shorter
update, does not depend on the buckets.

In the race, a turn is a few steps of one candidate. Candidate 0 is the default and runs in every round, so that a
candidate is judged by its time ÷ the default's *in the same round*: disturbances by the machine or the data affect
both. A candidate's score is the median of these ratios over its rounds.

    round 1   all
    round 2   the default and the best two
    round 3 … the default and the best one

A challenger wins if its score is below `GAIN`; otherwise the default stays, at no cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from paceline.cost_model.backward_simulation import CommChannel, ReadyGradient, simulate_backward
from paceline.cost_model.bucket_assignment import plan_buckets
from paceline.parallel.strategy import STRATEGIES, Shard, Sync

__all__ = ["GAIN", "CallCost", "CandidateRace", "candidate_plans"]

GAIN = 0.985
"""A challenger's score must be below this: two turns of one candidate differ by the rest."""

_SIZES_MIB = (0.0, 1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, math.inf)
_MIN_FACTOR = 2.0  # between the numbers of buckets of two candidates
_CHALLENGERS = (2, 1)  # in the second round, and in each later one


@dataclass(frozen=True)
class CallCost:
    """Duration of an all-reduce: `call_seconds` + `seconds_per_byte` · its bytes."""

    call_seconds: float
    seconds_per_byte: float

    def reduce_scatter(self, nbytes: float) -> float:
        """Return the seconds of a reduce-scatter, which is one of an all-reduce's two passes."""
        return self.call_seconds + self.seconds_per_byte * nbytes / 2

    def all_reduce(self, nbytes: float) -> float:
        """Return the seconds of an all-reduce."""
        return self.call_seconds + self.seconds_per_byte * nbytes


def candidate_plans(
    ready: Sequence[ReadyGradient], price: CallCost, *, may_shard: bool, most: int = 5
) -> tuple[Sync, ...]:
    """Return the plans to try, the default first.

    Args:
        ready: the gradients in the order in which they become ready.
        price: of a call.
        may_shard: whether the optimizer can update shards.
        most: largest number of plans, 2 or more.

    Example:
        >>> layers = [ReadyGradient(4 << 20, 0.01 * place) for place in range(1, 21)]
        >>> [plan.name for plan in candidate_plans(layers, CallCost(1e-3, 1e-9), may_shard=True)][:2]
        ['bucketed', 'sharded']
    """
    picked: list[tuple[Sync, int]] = [(Sync(), _bucket_count(ready, Sync()))]
    whole = _ranked(ready, CommChannel(price.all_reduce), "none")
    rankings = [whole]
    if may_shard:
        usual = Sync(shard="optimizer")
        sharded = _ranked(ready, CommChannel(price.reduce_scatter), "optimizer")
        rankings = [[(usual, _bucket_count(ready, usual)), *sharded], whole]
    while rankings and len(picked) < most - 1:
        for ranking in list(rankings):
            best = next((each for each in ranking if _differs(each, picked)), None)
            if best is None:
                rankings.remove(ranking)
            elif len(picked) < most - 1:
                picked.append(best)
    return (*(plan for plan, _ in picked), STRATEGIES["flat"])


def _ranked(ready: Sequence[ReadyGradient], channel: CommChannel, shard: Shard) -> list[tuple[Sync, int]]:
    """Return plans with their numbers of buckets, the one with the shortest backward first."""
    found, total = [], sum(each.nbytes for each in ready)
    for plan in (Sync(bucket_mib=mib, shard=shard) for mib in _SIZES_MIB):
        backward = simulate_backward(ready, plan.bucket_caps(total), channel)
        found.append((backward.end, len(backward.buckets), plan))
    return [(plan, count) for _, count, plan in sorted(found, key=lambda each: each[:2])]


def _bucket_count(ready: Sequence[ReadyGradient], plan: Sync) -> int:
    nbytes, kinds = [each.nbytes for each in ready], [each.kind for each in ready]
    return len(plan_buckets(range(len(ready)), nbytes, kinds, plan.bucket_caps(sum(nbytes))))


def _differs(candidate: tuple[Sync, int], picked: Sequence[tuple[Sync, int]]) -> bool:
    """Return whether a plan's number of buckets differs enough from that of every picked plan of its kind."""
    plan, count = candidate
    alike = [other for one, other in picked if one.shard == plan.shard]
    return all(max(count, other) >= _MIN_FACTOR * min(count, other) for other in alike)


@dataclass
class CandidateRace:
    """A race between candidates.

    Attributes:
        candidates: their number, the default included, 1 or more.
        rounds: in which the default runs, 1 or more.
        seconds: per candidate, seconds per step in each of its turns; None for rounds in which it did not run.

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
        """Record the seconds per step, above 0, of the turn that is over; the next turn begins."""
        self.seconds[self._queue.pop(0)][-1] = seconds
        done = len(self.seconds[0])
        if self._queue or done == self.rounds:
            return
        best = sorted(self._running(), key=self.score)[: _CHALLENGERS[min(done, len(_CHALLENGERS)) - 1]]
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
        """Return a candidate's seconds per step, the median over its turns; it must have had one."""
        return median(each for each in self.seconds[number] if each is not None)

    @property
    def winner(self) -> int:
        """After the race: the challenger that ran in every round if it is faster, else the default."""
        if self.candidates == 1:
            return 0
        best = min(self._running(), key=self.score)
        return best if self.score(best) < GAIN else 0
