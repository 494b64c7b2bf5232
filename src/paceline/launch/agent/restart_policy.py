"""How a run goes on after a failure: at the same size, with one rank fewer, or not at all (pure).

A failure of a rank may be chance, such as memory that somebody else took. When the same rank of the same host fails
twice in a row and the world made no progress in between, it is not: one rank fewer is left to that host, as long as
as many stay as the user wants; else the run ends, since more restarts would only repeat it. So would one after a
program has said that it was called wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["MAX_REPEATED_FAILURES", "RestartDecision", "WorldRun", "decide_restart"]

MAX_REPEATED_FAILURES = 2
"""How often in a row, without progress, the same rank fails until it is given up."""


@dataclass(frozen=True)
class WorldRun:
    """One world of a run, from its start to the failure that ended it.

    Attributes:
        place: what failed first, as :attr:`paceline.launch.agent.rank_failure.RankFailure.place` says.
        ranks: its size.
        progress: whether it got further than the one before it.
        of_rank: whether a rank failed whose host is still there, rather than a whole host.
        refused: whether what failed first said that it was called wrongly.
    """

    place: str
    ranks: int
    progress: bool
    of_rank: bool = True
    refused: bool = False


@dataclass(frozen=True)
class RestartDecision:
    """How to go on, and why if not at the same size."""

    action: Literal["same", "fewer", "end"]
    why: str = ""


def decide_restart(
    past: Sequence[WorldRun], ranks: int, *, min_ranks: int, max_restarts: int
) -> RestartDecision:
    """Return how a run goes on.

    Args:
        past: the worlds of the run that a failure ended, the latest last; none if a host joined.
        ranks: those there are now: hosts that were lost are not among them.
        min_ranks: the least size.
        max_restarts: failures to go on after.

    Example:
        >>> twice = [WorldRun("pc1/1", ranks=4, progress=False)] * 2
        >>> decide_restart(twice, 4, min_ranks=2, max_restarts=3).action
        'fewer'
    """
    if past and past[-1].refused:
        return RestartDecision("end", "it was called wrongly, and would be again")
    if len(past) > max_restarts:
        times = f"restarted {max_restarts} time{'s' * (max_restarts != 1)} already"
        return RestartDecision("end", times if max_restarts else "no restarts were asked for")
    if ranks < min_ranks:
        return RestartDecision("end", f"{ranks} rank{'s' * (ranks != 1)} left, at least {min_ranks} wanted")
    if not _stuck(past):
        return RestartDecision("same")
    why = f"the same rank failed {MAX_REPEATED_FAILURES} times in a row without progress"
    if ranks - 1 < min_ranks:
        return RestartDecision(
            "end", f"{why}, and {min_ranks} rank{'s' * (min_ranks != 1)} are wanted at least"
        )
    return RestartDecision("fewer", why)


def _stuck(past: Sequence[WorldRun]) -> bool:
    """Return whether the same rank failed time and again, with no progress since it first did."""
    last = past[-MAX_REPEATED_FAILURES:]
    same = len(last) == MAX_REPEATED_FAILURES and len({(life.place, life.ranks) for life in last}) == 1
    return same and last[-1].of_rank and not any(life.progress for life in last[1:])
