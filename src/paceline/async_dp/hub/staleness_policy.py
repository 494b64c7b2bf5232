"""Policy for stale updates: their weight, and when they are refused or prevented (pure)."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from paceline.errors import require, unknown

__all__ = ["StalenessPolicy"]

_STALENESS_POLICIES = ("accept", "down-weight", "drop", "wait")


@dataclass(frozen=True)
class StalenessPolicy:
    """Policy for stale updates.

    Staleness is the number of updates merged between the parameters that a worker started from and its own update,
    divided by the number of workers: in rounds, so it means the same for 4 workers and for 400.

        accept        every update has full weight
        down-weight   the weight is (1 + staleness)^-power
        drop          updates beyond the bound are refused
        wait          no update gets staler than the bound: a worker that is ahead waits for its next parameters
                      (stale-synchronous parallel: Ho et al., NIPS 2013)

    Example:
        >>> StalenessPolicy("down-weight").weight(3.0)
        0.5
    """

    policy: str = "accept"
    bound: float = 16.0  # in rounds
    power: float = 0.5  # usual for polynomial weights

    def __post_init__(self) -> None:
        if self.policy not in _STALENESS_POLICIES:
            raise unknown("policy for stale updates", self.policy, _STALENESS_POLICIES)
        require(0 < self.bound < math.inf, f"bound={self.bound!r}", "give rounds above 0, such as 16")
        require(
            0 <= self.power < math.inf, f"power={self.power!r}", "give a number of 0 or more, such as 0.5"
        )

    def weight(self, staleness: float) -> float:
        """Return the weight of an update relative to a fresh one; 0: it is refused."""
        if self.policy == "down-weight":
            return (1 + max(0.0, staleness)) ** -self.power
        if self.policy == "drop" and staleness > self.bound:
            return 0.0
        return 1.0

    def holds_back(self, base: int, others: Collection[int], revision: int, workers: int) -> bool:
        """Return whether a worker must wait for new parameters, so that no other's next update gets too stale.

        Args:
            base: revision that the worker started from last.
            others: the same of the other live workers.
            revision: of the global parameters.
            workers: number of live workers.
        """
        if self.policy != "wait" or not others:
            return False
        oldest = min(others)
        return base > oldest and (revision + 1 - oldest) / max(1, workers) > self.bound
