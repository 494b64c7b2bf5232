"""The latest world of a job: its hosts and failures, and whether its ranks can go on in place without one (pure).

A world is *live* when every host has reported that all its ranks can recover in place. Then a rank may end, and a host
may leave, be lost or join, while the others train on: the world keeps its number. As soon as a failure is reported, the
world is over, and the next one begins with new processes.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.launch.agent.first_failure import RankFailure
from paceline.launch.agent.job_messages import (
    DepartureResult,
    JoinWorld,
    PlannedHost,
    ReportDeparture,
    ReportLive,
    WorldChange,
    WorldPlan,
)
from paceline.launch.agent.restart_policy import HostMember, PreviousWorld
from paceline.world.live_file import is_of_agent

__all__ = ["RunningWorld"]

_MAX_CHANGES = 50  # that a view shows


class RunningWorld:
    """One world of a job, from its start to the failure that ends it; before the first one, an empty one.

    Args:
        number: of the world.
        plan: with which it begins.
        began: when.

    Attributes:
        members: hosts that are part of it now, by the id of their agent.
        failures: that were reported.
        progress: whether it made progress.
        finished: hosts whose ranks have ended well.
        lost: whether a host has left or was lost without which it can't go on.
        changes: of its hosts while it runs, the latest ones.
    """

    def __init__(self, number: int = -1, plan: WorldPlan | None = None, began: float = 0.0) -> None:
        self.number, self.began, self._plan = number, began, plan
        self._places = [one for one in plan.hosts if one.ranks] if plan else []
        self.members = {one.member: HostMember(one.host, one.member, one.ranks) for one in self._places}
        self.failures: list[RankFailure] = []
        self.progress, self.lost = False, False
        self.finished: set[str] = set()
        self.changes: tuple[WorldChange, ...] = ()
        self._reports: dict[str, ReportLive] = {}
        self._dropped: list[tuple[HostMember, int]] = []  # lost while it ran, and the epoch before
        self._departures: dict[str, DepartureResult] = {}

    def has(self, member: str) -> bool:
        """Return whether a host is part of it."""
        return member in self.members

    def is_live(self, besides: str = "") -> bool:
        """Return whether the ranks of all hosts, `besides` one, can go on when others end.

        Hosts whose ranks have ended well don't count.
        """
        if self.failures or self.lost:
            return False
        return all(report is not None and report.live for report in self._unfinished(besides))

    def survivors(self, besides: str = "") -> int:
        """Return the number of ranks that can recover in place, on all hosts `besides` one."""
        return sum(report.survivors for report in self._unfinished(besides) if report is not None)

    def is_complete(self) -> bool:
        """Return whether ranks have ended well, and no other ones run but some that have not joined yet."""
        return bool(self.finished) and self.is_live() and not self.survivors()

    def report_live(self, report: ReportLive) -> None:
        """Take the report of a host."""
        if self.has(report.member):
            self._reports[report.member] = report
            if report.survivors:  # one that it replaced has joined since it finished
                self.finished.discard(report.member)

    def report_departure(self, report: ReportDeparture, replacements_left: int) -> DepartureResult:
        """Take the report that a rank has ended, and return how the world goes on; it may come twice.

        Args:
            report: of a host.
            replacements_left: number of processes that may still be started in place of ended ones.
        """
        known = self._departures.get(report.rank)
        if known is not None:
            return known
        goes_on = self._goes_on(report)
        result = DepartureResult(goes_on, goes_on and report.replace and replacements_left > 0)
        if goes_on:
            self._departures[report.rank] = result
            before = self._reports.get(report.member)
            epoch = before.epoch if before else 0
            self.report_live(
                ReportLive(0, report.job, report.member, self.number, True, report.survivors, epoch)
            )
        return result

    def replacements(self) -> int:
        """Return the number of processes that were started in place of ended ones."""
        return sum(one.replaces for one in self._departures.values())

    def drop(self, member: str, now: float, *, left: bool) -> None:
        """Continue without a host if the others can, else note that it is lost.

        Args:
            member: id of its agent.
            now: the time.
            left: whether it left by itself.
        """
        if not self.is_live(besides=member) or not self.survivors(besides=member):
            self.lost = True
            return
        host = self.members.pop(member)
        self.finished.discard(member)
        self._reports.pop(member, None)
        if not left:
            self._dropped.append((host, self._epoch()))
        self._note(host, "left" if left else "lost", now)

    def admits(self, request: JoinWorld) -> bool:
        """Return whether a host may join while it runs."""
        live = request.live and self.is_live() and self.survivors() > 0
        return live and not self.finished and not self.has(request.member)

    def admit(self, request: JoinWorld, now: float) -> WorldPlan:
        """Add a host, in the place of one that is gone if there is one, and return its plan."""
        assert self._plan is not None, "it has begun"
        host = request.host
        new = PlannedHost(host.host, request.member, host.ranks, request.address, request.port)
        free = [
            index
            for index, one in enumerate(self._places)
            if one.member not in self.members and one.ranks == host.ranks
        ]
        if free:
            self._places[min(free, key=lambda index: self._places[index].address != request.address)] = new
        else:
            self._places.append(new)
        self.members[request.member] = host
        self._reports[request.member] = ReportLive(0, request.job, request.member, self.number, True, 0, 0)
        self._note(host, "joined", now)
        return replace(self._plan, hosts=tuple(self._places), joiner=True)

    def previous(self, now: float) -> PreviousWorld:
        """Return what the agreement on the next world needs to know.

        Hosts that were lost count, unless the others have recovered since.
        """
        recent = [host for host, epoch in self._dropped if epoch >= self._epoch()]
        members = (*self.members.values(), *recent)
        return PreviousWorld(members, tuple(self.failures), self.progress, now - self.began)

    def _goes_on(self, report: ReportDeparture) -> bool:
        if self.failures or self.lost:
            return False
        match report.cause:
            case "joiner":
                return True
            case "left":  # the others have formed a world without it, and may have ended since
                others = self._unfinished(besides=report.member)
                unknown = any(each is None for each in others)
                return self._survive(report) or unknown or bool(self.finished)
            case "failed":
                return self.is_live(besides=report.member) and self._survive(report)

    def _survive(self, report: ReportDeparture) -> bool:
        """Return whether ranks are left, on the host that reports or on others."""
        known = self.survivors(besides=report.member) + report.survivors > 0
        return known or any(self._may_run(each) for each in report.others)

    def _may_run(self, process: str) -> bool:
        """Return whether no host has reported that a process has ended, and its host is there."""
        agents = (one for one in self.members if one not in self.finished)
        return process not in self._departures and any(is_of_agent(process, agent) for agent in agents)

    def _unfinished(self, besides: str) -> list[ReportLive | None]:
        """Return the latest reports of the hosts whose ranks have not ended well."""
        counted = (one for one in self.members if one not in self.finished and one != besides)
        return [self._reports.get(one) for one in counted]

    def _epoch(self) -> int:
        return max((one.epoch for one in self._reports.values()), default=0)

    def _note(self, host: HostMember, kind: str, now: float) -> None:
        number = self.changes[-1].number + 1 if self.changes else 0
        change = WorldChange(number, host.host, host.member, kind, now - self.began)
        self.changes = (*self.changes, change)[-_MAX_CHANGES:]
