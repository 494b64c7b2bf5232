"""How old an update may be, and what becomes of one that is older (pure).

Staleness is the number of updates that the centre took in between the one that a worker began from and its own, divided
by the workers: in rounds, so that it means the same for 4 workers and for 400.

    accept        every update counts fully
    down-weight   it counts (1 + staleness)^-power
    drop          beyond the bound it is refused
    wait          beyond the bound nobody gets: a worker that is ahead waits for its next parameters (stale-synchronous
                  parallel: Ho et al., NIPS 2013)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass

from paceline.errors import UsageError, unknown

__all__ = ["POLICIES", "Histogram", "Staleness"]

POLICIES = ("accept", "down-weight", "drop", "wait")


@dataclass(frozen=True)
class Staleness:
    """A policy.

    Attributes:
        policy: one of `POLICIES`. bound: in rounds. power: of the weight, 0.5 as polynomial weights usually have.

    Example:
        >>> Staleness("down-weight").weight(3.0)
        0.5
    """

    policy: str = "accept"
    bound: float = 16.0
    power: float = 0.5

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise unknown("policy for stale updates", self.policy, POLICIES)
        if not 0 < self.bound < math.inf:
            raise UsageError(f"bound={self.bound!r}", remedy="give rounds above 0, such as 16")
        if not 0 <= self.power < math.inf:
            raise UsageError(f"power={self.power!r}", remedy="give a number from 0 on, such as 0.5")

    def weight(self, staleness: float) -> float:
        """Return how much an update counts beside a fresh one; 0: it is refused."""
        if self.policy == "down-weight":
            return (1 + max(0.0, staleness)) ** -self.power
        if self.policy == "drop" and staleness > self.bound:
            return 0.0
        return 1.0

    def holds(self, mine: int, others: Collection[int], revision: int, workers: int) -> bool:
        """Tell whether a worker has to wait for new parameters, so that nobody's next update gets too old.

        Args:
            mine: revision that it began from last. others: those of the other workers that are alive.
            revision: of the centre now. workers: how many there are.
        """
        if self.policy != "wait" or not others:
            return False
        oldest = min(others)
        return mine > oldest and (revision + 1 - oldest) / max(1, workers) > self.bound


class Histogram:
    """Counts of staleness, in rounds: of the same width up to 4, then doubling.

    Example:
        >>> counts = Histogram()
        >>> counts.add(0.3); counts.add(5.0)
        >>> counts.rows()
        [(0.0, 0.5, 1), (4.0, 8.0, 1)]
    """

    EDGES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0, 32.0, 64.0, math.inf)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.EDGES) - 1)

    def add(self, staleness: float) -> None:
        """Count one."""
        self.counts[bisect_right(self.EDGES, staleness, 1, len(self.counts)) - 1] += 1

    def rows(self) -> list[tuple[float, float, int]]:
        """Return (from, below, count) of all that are not empty."""
        return [
            (self.EDGES[index], self.EDGES[index + 1], count)
            for index, count in enumerate(self.counts)
            if count
        ]
