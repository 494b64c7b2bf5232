"""Agreement of all hosts before a world begins: why the last one ended, and whether and how the job continues (pure).

The host that the rendezvous numbered 0 collects the reports of all, decides, and publishes the decision, so every host
names the same first failure and does the same.

[Note: repeated failures] A failure of a rank may be chance, such as memory taken by another program. When the same rank
of the same host fails twice in a row and the world made no progress in between, it is not: that host then runs one rank
fewer, as long as the minimum world size permits; else the job ends, since a restart would only fail again. It also
ends when a program reports that it was called wrongly, and when its ranks leave in order twice in a row without
progress in between, as they do while a notice says that their machine is about to go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline._core.format import plural
from paceline.errors import RankFailed
from paceline.launch.agent.first_failure import RankFailure, first_failure, is_secondary
from paceline.launch.process.rank_process import exit_remedy, exit_status

__all__ = [
    "MAX_REPEATED_FAILURES",
    "HostMember",
    "JobEnded",
    "JobOutcome",
    "PreviousWorld",
    "RestartDecision",
    "WorldAgreement",
    "WorldRun",
    "agree_on_world",
    "decide_restart",
    "failed_outcome",
]

MAX_REPEATED_FAILURES = 2
"""Consecutive failures of the same rank without progress until it is removed."""

_MAX_FOLLOWERS = 4


@dataclass(frozen=True)
class HostMember:
    """A participating host: its name, the unique id of its agent, and its number of ranks."""

    host: str
    member: str
    ranks: int


@dataclass(frozen=True)
class WorldRun:
    """One world of a job, from its start to the failure that ended it.

    Attributes:
        place: where the first failure was, see `RankFailure.place`.
        ranks: world size.
        progress: whether it got further than the world before it.
        of_rank: whether a rank failed whose host is still present, rather than a whole host.
        refused: whether the failed program reported that it was called wrongly.
        left: whether its ranks left in order.
    """

    place: str
    ranks: int
    progress: bool
    of_rank: bool = True
    refused: bool = False
    left: bool = False


@dataclass(frozen=True)
class PreviousWorld:
    """The world that ended: its members, the failures in order of their reports, and whether it made progress."""

    members: tuple[HostMember, ...]
    failures: tuple[RankFailure, ...]
    progress: bool
    seconds: float = 0.0


@dataclass(frozen=True)
class RestartDecision:
    """How the job continues, and the reason unless it is at the same size."""

    action: Literal["same", "fewer", "end"]
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class WorldAgreement:
    """Decision before a world begins.

    Attributes:
        restart: number of the world; 0 for the first one of a job.
        decision: how the job continues.
        first: failure that ended the last world; None: hosts joined it.
        after: failures that followed.
        lost: names of lost hosts.
        joined: names of hosts that joined.
        ranks_before: size of the last world.
        ranks_after: size of this world.
        hosts_before: hosts of the last world.
        hosts_after: hosts of this world.
        shrinks: id of the agent that runs one rank fewer; empty: none.
        leaves: whether that agent is left with no rank, and so leaves the job.
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

    def __str__(self) -> str:
        causes = [str(self.first)] if self.first else []
        causes += [f"{host} joined" for host in self.joined]
        if self.decision.action == "fewer":
            causes.append(self.decision.why)
        sizes = f"{self.ranks_before} → {plural(self.ranks_after, 'rank')}"
        several = max(self.hosts_before, self.hosts_after) > 1
        hosts = f" on {plural(self.hosts_after, 'host')}" if several else ""
        return f"restart {self.restart}: {'; '.join(causes) or 'a host left'}; {sizes}{hosts}"


def decide_restart(
    past: Sequence[WorldRun], ranks: int, *, min_ranks: int, max_restarts: int, replaced: int = 0
) -> RestartDecision:
    """Return how a job continues, see [Note: repeated failures].

    Args:
        past: worlds of the job that failures ended, the latest last; empty if a host joined.
        ranks: ranks that are available now, without those of lost hosts.
        min_ranks: minimum world size.
        max_restarts: number of failures after which the job is restarted.
        replaced: number of ranks that were replaced while their world ran; each counts as a restart.

    Example:
        >>> twice = [WorldRun("pc1/1", ranks=4, progress=False)] * 2
        >>> decide_restart(twice, 4, min_ranks=2, max_restarts=3).action
        'fewer'
    """
    if past and past[-1].refused:
        return RestartDecision("end", "it was called wrongly, and would be again")
    if len(past) > 1 and past[-2].left and past[-1].left and not past[-1].progress:
        return RestartDecision("end", "as in the world before")
    if len(past) + replaced > max_restarts:
        return RestartDecision("end", _used_up(max_restarts, replaced))
    if ranks < min_ranks:
        return RestartDecision("end", f"{plural(ranks, 'rank')} left, at least {min_ranks} required")
    if not _is_stuck(past):
        return RestartDecision("same")
    why = f"the same rank failed {MAX_REPEATED_FAILURES} times in a row without progress"
    if ranks - 1 < min_ranks:
        return RestartDecision("end", f"{why}, and at least {plural(min_ranks, 'rank')} required")
    return RestartDecision("fewer", why)


def _used_up(max_restarts: int, replaced: int) -> str:
    """Return why there are no more restarts."""
    if not max_restarts:
        return "restarts are disabled"
    if not replaced:
        return f"restarted {plural(max_restarts, 'time')} already"
    restarts = f"restarted {plural(max_restarts - replaced, 'time')} and " if max_restarts > replaced else ""
    return f"{restarts}replaced {plural(replaced, 'rank')} already"


def _is_stuck(past: Sequence[WorldRun]) -> bool:
    """Return whether the same rank failed repeatedly, without progress since its first failure."""
    last = past[-MAX_REPEATED_FAILURES:]
    same = len(last) == MAX_REPEATED_FAILURES and len({(run.place, run.ranks) for run in last}) == 1
    return (
        same
        and last[-1].of_rank
        and not any(run.left or run.progress for run in last[1:])
        and not last[0].left
    )


def agree_on_world(
    restart: int,
    before: PreviousWorld | None,
    now: Sequence[HostMember],
    past: Sequence[WorldRun],
    *,
    min_ranks: int,
    max_restarts: int,
    replaced: int = 0,
) -> tuple[WorldAgreement, tuple[WorldRun, ...]]:
    """Return the agreement on the world that is about to begin, and `past` including the last world.

    Args:
        restart: number of the world.
        before: the world that ended; None at the start of a job.
        now: the present hosts, in the order of the rendezvous.
        past: worlds that failures ended so far.
        min_ranks: as for `decide_restart`.
        max_restarts: as for `decide_restart`.
        replaced: as for `decide_restart`.
    """
    present = {one.member for one in now}
    members = before.members if before else ()
    known = {one.member for one in members}
    lost = [one for one in members if one.member not in present]
    failures = _with_lost_hosts(before, lost) if before else []
    first = first_failure(failures)
    ranks = sum(one.ranks for one in now)
    ranks_before = sum(one.ranks for one in members)
    runs = tuple(past)
    if first and before:
        of_rank = first.rank is not None and first.member in present
        runs += (WorldRun(first.place, ranks_before, before.progress, of_rank, first.refused, first.left),)
    decision = decide_restart(
        runs if first else (), ranks, min_ranks=min_ranks, max_restarts=max_restarts, replaced=replaced
    )
    ends = decision.action == "end"
    shrinks = first.member if first and decision.action == "fewer" else ""
    leaves = any(one.member == shrinks and one.ranks == 1 for one in now)
    agreement = WorldAgreement(
        restart=restart,
        decision=decision,
        first=first,
        after=tuple(one for one in failures if one is not first),
        lost=tuple(one.host for one in lost),
        joined=tuple(one.host for one in now if before and one.member not in known),
        ranks_before=ranks_before,
        ranks_after=0 if ends else ranks - bool(shrinks),
        hosts_before=len(members),
        hosts_after=0 if ends else len(now) - leaves,
        shrinks=shrinks,
        leaves=leaves,
    )
    return agreement, runs


def _with_lost_hosts(before: PreviousWorld, lost: Sequence[HostMember]) -> list[RankFailure]:
    """Return the reported failures, and the hosts that were lost without reporting a reason."""
    explained = {failure.member for failure in before.failures if not is_secondary(failure)}
    silent = [one for one in lost if one.member not in explained]
    return [*before.failures, *(RankFailure(one.host, one.member, seconds=before.seconds) for one in silent)]


@dataclass(frozen=True)
class JobOutcome:
    """End of a job.

    Attributes:
        code: its exit code.
        text: for any but 0, the error message.
        rank: that failed.
        remedy: of the error.
        warning: signal by which it was warned, and which its ranks are to get; 0: none.
    """

    code: int
    text: str = ""
    rank: int | None = None
    remedy: str = ""
    warning: int = 0

    def error(self) -> RankFailed:
        """Return the error to raise on every host."""
        return RankFailed(self.text, rank=self.rank, remedy=self.remedy, exit_code=self.code)


class JobEnded(Exception):
    """The job has ended on all hosts."""

    def __init__(self, outcome: JobOutcome) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome


def failed_outcome(agreement: WorldAgreement) -> JobOutcome:
    """Return the outcome of a job that does not continue."""
    first = agreement.first
    if first is None:
        return JobOutcome(1, agreement.decision.why, remedy="start it again with more hosts")
    after = [f"{_name(one)} ({one.how})" for one in agreement.after]
    more = f" and {len(after) - _MAX_FOLLOWERS} more" if len(after) > _MAX_FOLLOWERS else ""
    followed = f"; after it {', '.join(after[:_MAX_FOLLOWERS])}{more}" if after else ""
    end = f"after {first.seconds:.0f} s{followed}; {agreement.decision.why}"
    if first.rank is None:
        text = f"{first.host} {first.how} {end}"
        remedy = "check that host (power, network, its own terminal); then start the same command again"
    else:
        where = f" on {first.host}" if agreement.hosts_before > 1 else ""
        text = f"{first.how}{where} {end}" + "".join(
            f"\n  rank {first.rank} | {line}" for line in first.lines
        )
        remedy = exit_remedy(first.exit_code)
    return JobOutcome(exit_status(first.exit_code), text, first.rank, remedy)


def _name(one: RankFailure) -> str:
    return one.host if one.rank is None else f"rank {one.rank}"
