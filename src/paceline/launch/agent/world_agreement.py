"""What the hosts of a run agree on when a world is about to begin: why the last one ended, who is there now (pure).

The host that the rendezvous gave the number 0 collects what all have told, judges, and tells the others; so every
host names the same first failure and does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.launch.agent.rank_failure import RankFailure, first_failure, is_secondary
from paceline.launch.agent.restart_policy import RestartDecision, WorldRun, decide_restart

__all__ = ["HostMember", "PreviousWorld", "WorldAgreement", "agree_on_world"]


@dataclass(frozen=True)
class HostMember:
    """A host that takes part: its name, its agent (unlike any other), how many ranks it runs."""

    host: str
    member: str
    ranks: int


@dataclass(frozen=True)
class PreviousWorld:
    """The world that ended: who took part, which failures were told, in order, and whether it made progress."""

    members: tuple[HostMember, ...]
    told: tuple[RankFailure, ...]
    progress: bool
    seconds: float = 0.0


@dataclass(frozen=True)
class WorldAgreement:
    """What is known and decided before a world begins.

    Attributes:
        restart: its number; 0 for the first world of a run.
        decision: how to go on.
        first: the failure that ended the last world; None: hosts joined it.
        after: those that followed.
        lost, joined: names of hosts.
        ranks_before, ranks_after, hosts_before, hosts_after: sizes of the last world and of this one.
        shrinks: the agent that is to run one rank fewer; empty: none.
        leaves: whether that leaves it with none, so that it leaves the run.
    """

    restart: int
    decision: RestartDecision
    first: RankFailure | None
    after: tuple[RankFailure, ...]
    lost: tuple[str, ...]
    joined: tuple[str, ...]
    ranks_before: int
    ranks_after: int
    hosts_before: int
    hosts_after: int
    shrinks: str
    leaves: bool

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> WorldAgreement:
        """Return the verdict that :meth:`to_json` made `record` of."""
        first = record["first"]
        return cls(
            **{
                **record,
                "decision": RestartDecision(**record["decision"]),
                "first": first and RankFailure.from_json(first),
                "after": tuple(RankFailure.from_json(one) for one in record["after"]),
                "lost": tuple(record["lost"]),
                "joined": tuple(record["joined"]),
            }
        )

    def __str__(self) -> str:
        causes = [str(self.first)] if self.first else []
        causes += [f"{host} joined" for host in self.joined]
        if self.decision.action == "fewer":
            causes.append(self.decision.why)
        sizes = f"{self.ranks_before} → {self.ranks_after} rank{'s' * (self.ranks_after != 1)}"
        several = max(self.hosts_before, self.hosts_after) > 1
        hosts = f" on {self.hosts_after} host{'s' * (self.hosts_after != 1)}" if several else ""
        return f"restart {self.restart}: {'; '.join(causes) or 'a host left'}; {sizes}{hosts}"


def agree_on_world(
    restart: int,
    before: PreviousWorld | None,
    now: Sequence[HostMember],
    past: Sequence[WorldRun],
    *,
    min_ranks: int,
    max_restarts: int,
) -> tuple[WorldAgreement, tuple[WorldRun, ...]]:
    """Return the verdict on the world that is about to begin, and the lives that failures ended, with the last one.

    Args:
        restart: its number.
        before: the world that ended, None at the start of a run.
        now: the hosts that are there, in the order of the rendezvous.
        past: the lives that failures ended so far.
        min_ranks, max_restarts: as for :func:`paceline.launch.agent.restart_policy.decide_restart`.
    """
    there = {one.member for one in now}
    members = before.members if before else ()
    known = {one.member for one in members}
    lost = [one for one in members if one.member not in there]
    told = _with_hosts(before, lost) if before else []
    first = first_failure(told)
    ranks = sum(one.ranks for one in now)
    ranks_before = sum(one.ranks for one in members)
    lives = tuple(past)
    here = first is not None and first.rank is not None and first.member in there
    if first and before:
        lives += (WorldRun(first.place, ranks_before, before.progress, here, first.refused),)
    decision = decide_restart(lives if first else (), ranks, min_ranks=min_ranks, max_restarts=max_restarts)
    shrinks = first.member if first and decision.action == "fewer" else ""
    leaves = any(one.member == shrinks and one.ranks == 1 for one in now)
    verdict = WorldAgreement(
        restart,
        decision,
        first,
        tuple(one for one in told if one is not first),
        tuple(one.host for one in lost),
        tuple(one.host for one in now if before and one.member not in known),
        ranks_before,
        0 if decision.action == "end" else ranks - bool(shrinks),
        len(members),
        0 if decision.action == "end" else len(now) - leaves,
        shrinks,
        leaves,
    )
    return verdict, lives


def _with_hosts(before: PreviousWorld, lost: Sequence[HostMember]) -> list[RankFailure]:
    """Return what was told, and the hosts that were lost without having told a reason."""
    reasons = {failure.member for failure in before.told if not is_secondary(failure)}
    silent = [one for one in lost if one.member not in reasons]
    return [*before.told, *(RankFailure(one.host, one.member, seconds=before.seconds) for one in silent)]
