"""State of a job on its coordinator: which hosts are present, when a world begins, and how the job ends (pure).

A job is a series of worlds, numbered from 0. A host registers, joins, runs its ranks, and joins again after a failure
or when hosts have come or gone. It waits in one request, which is answered when something changes. While the latest
world is live (`running_world`), hosts come and go without a new one.

A world begins when all hosts have joined; or when enough have, none of the last world still stops its ranks, and no
further one has joined for a while (torch's "last call"). Whether a host is present is up to its connection: one that is
closed and not made again within a second is a lost host. Clocks of hosts are never compared.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from paceline.launch.agent.job_messages import (
    AnyJobRequest,
    DepartureResult,
    EndJob,
    FinishWorld,
    GetFailures,
    JobRecord,
    JobSettings,
    JobView,
    JoinResult,
    JoinWorld,
    LeaveJob,
    PlannedHost,
    RegisterHost,
    ReportDeparture,
    ReportFailure,
    ReportLive,
    ReportProgress,
    WatchJob,
    WorldPlan,
)
from paceline.launch.agent.restart_policy import JobOutcome, WorldRun, agree_on_world, failed_outcome
from paceline.launch.agent.running_world import RunningWorld

__all__ = ["RECONNECT_SECONDS", "JobReply", "JobState"]

RECONNECT_SECONDS = 1.0
"""How long a host may be without a connection until it counts as lost."""

_MAX_FAILURES = 100_000


class JobReply(NamedTuple):
    """Reply to a request: its result, or an error message."""

    client: bytes
    id: int
    result: object = None
    error: str = ""
    timeout: bool = False


@dataclass(eq=False)
class _Host:
    """A host that takes part in the job."""

    member: str
    client: bytes
    join: JoinWorld | None = None
    answered: JobReply | None = None  # its last join, which may come twice
    joined_at: float = 0.0
    order: int = 0
    watch: WatchJob | None = None
    watch_until: float = math.inf
    lost_at: float = math.inf


class JobState:
    """One job; `now` is in seconds, from any start.

    Example:
        >>> state = JobState()
        >>> settings = JobSettings(
        ...     hosts=1, min_hosts=1, min_ranks=2, max_restarts=3, first_call=30, last_call=3, join=300
        ... )
        >>> state.handle(b"", RegisterHost(1, "run", "a", settings), 0.0)[0].error
        ''
        >>> from paceline.launch.agent.restart_policy import HostMember
        >>> join = JoinWorld(2, "run", "a", HostMember("pc1", "a", 2), "127.0.0.1", 0)
        >>> state.handle(b"", join, 0.0)[0].result.plan.agreement.restart
        0
    """

    def __init__(self) -> None:
        self._settings: JobSettings | None = None
        self._hosts: dict[str, _Host] = {}
        self._member_of: dict[bytes, str] = {}
        self._world = RunningWorld()
        self._replaced = 0  # ranks, in earlier worlds
        self._past: tuple[WorldRun, ...] = ()
        self._outcome: JobOutcome | None = None
        self._busy: set[str] = (
            set()
        )  # present hosts of the latest world that have not joined the next one yet
        self._idle_since = 0.0  # when the last of them had stopped its ranks
        self._orders = itertools.count()
        self._news = 0
        self._replies: list[JobReply] = []

    @property
    def world(self) -> int:
        """Number of the latest world; −1 before the first one."""
        return self._world.number

    def handle(self, client: bytes, request: AnyJobRequest, now: float) -> list[JobReply]:
        """Handle a request that came over the connection of `client`."""
        host = self._hosts.get(request.member)
        if host is not None:
            self._connect(host, client)
        match request:
            case RegisterHost():
                self._register(client, request)
            case JoinWorld():
                self._join(client, request, now)
            case WatchJob():
                self._watch(client, request, now)
            case GetFailures(world=world):
                failures = self._world.failures if world == self._world.number else ()
                self._reply(client, request.id, tuple(failures))
            case _:
                self._report(client, request, now)
        return self._settle(now)

    def disconnected(self, client: bytes, now: float) -> list[JobReply]:
        """Note that the connection of a client is gone."""
        member = self._member_of.pop(client, None)
        host = self._hosts.get(member) if member else None
        if host is not None and host.client == client:
            host.lost_at, host.watch = now + RECONNECT_SECONDS, None
        return self._settle(now)

    def advance(self, now: float) -> list[JobReply]:
        """Handle what is due: lost hosts, worlds that begin, and requests whose time is up."""
        return self._settle(now)

    def next_due(self) -> float:
        """Return when `advance` has to be called; infinity: never."""
        due = min((min(one.lost_at, one.watch_until) for one in self._hosts.values()), default=math.inf)
        waits = (self._join_until(one) for one in self._hosts.values() if one.join is not None)
        return min(due, self._begins_at(), *waits)

    def view(self, member: str) -> JobView:
        """Return the state as seen by a host."""
        world, hosts = self._world, self._hosts.values()
        return JobView(
            news=self._news,
            outcome=self._outcome,
            world=world.number,
            failed=bool(world.failures),
            finished=len(world.finished),
            lost=world.lost,
            waiting=self._is_waited_for(),
            joined=sum(one.join is not None for one in hosts),
            present=sum(one.lost_at == math.inf for one in hosts),
            member=member in self._hosts,
            live=world.is_live(),
            changes=world.changes,
        )

    # ------------------------------------------------------------- requests

    def _register(self, client: bytes, request: RegisterHost) -> None:
        if self._settings is None:
            self._settings = request.settings
        if self._outcome is None and request.member not in self._hosts:
            self._connect(self._add(request.member, client), client)
        self._reply(client, request.id, JobRecord(settings=self._settings, outcome=self._outcome))

    def _join(self, client: bytes, request: JoinWorld, now: float) -> None:
        if self._outcome is not None:
            self._reply(client, request.id, JoinResult(outcome=self._outcome))
            return
        if self._settings is None:
            self._reply(client, request.id, error="no host has registered for this job")
            return
        host = self._hosts.get(request.member) or self._add(request.member, client)
        self._connect(host, client)
        if host.answered is not None and host.answered.id == request.id:
            self._reply(client, request.id, host.answered.result)
            return
        if host.join is None:
            host.joined_at, host.order = now, next(self._orders)
        if request.member in self._busy:
            self._busy.remove(request.member)
            self._idle_since = now
        waited = self._is_waited_for()
        host.join = request
        self._news += waited != self._is_waited_for()

    def _watch(self, client: bytes, request: WatchJob, now: float) -> None:
        host = self._hosts.get(request.member)
        if host is None or request.news != self._news:
            self._reply(client, request.id, self.view(request.member))
        else:
            host.watch, host.watch_until = request, now + request.seconds

    def _report(self, client: bytes, request: AnyJobRequest, now: float) -> None:
        """Handle what a host reports; each report may come twice, if the connection broke in between."""
        world, result = self._world, None
        current = getattr(request, "world", world.number) == world.number
        match request:
            case EndJob(outcome=outcome):
                self._end(outcome)
            case LeaveJob() if request.member in self._hosts:
                self._remove(self._hosts[request.member], now, left=True)
            case ReportFailure() | ReportProgress() | FinishWorld() | ReportLive() | ReportDeparture():
                if current and world.has(request.member):
                    result = self._report_on_world(world, request)
                elif isinstance(request, ReportDeparture):
                    result = DepartureResult(goes_on=False, replaces=False)
        self._reply(client, request.id, result)

    def _report_on_world(self, world: RunningWorld, request: AnyJobRequest) -> object:
        """Handle what a host of the latest world reports about it, and return the result."""
        was_live, result = world.is_live(), None
        match request:
            case ReportFailure(failure=failure):
                if failure not in world.failures and len(world.failures) < _MAX_FAILURES:
                    world.failures.append(failure)
                    self._news += 1
            case ReportProgress():
                world.progress = True
            case FinishWorld():
                self._news += not world.finished  # one news: hosts only need to know that the job may end
                world.finished.add(request.member)
                result = len(world.finished)
            case ReportLive():
                world.report_live(request)
            case ReportDeparture():
                assert self._settings is not None, "a world has begun"
                used = len(self._past) + self._replaced + world.replacements()
                result = world.report_departure(request, self._settings.max_restarts - used)
        self._news += was_live != world.is_live()
        return result

    # ---------------------------------------------------------------- state

    def _settle(self, now: float) -> list[JobReply]:
        """Carry out what is due, and return all replies."""
        for host in [one for one in self._hosts.values() if one.lost_at <= now]:
            self._remove(host, now, left=False)
        if self._world.is_complete():
            self._end(JobOutcome(0))
        self._admit_joiners(now)
        for host in self._hosts.values():
            if host.join is not None and self._join_until(host) <= now:
                self._reply(host.client, host.join.id, error="too few hosts joined in time", timeout=True)
                host.join = None
                self._news += 1
        if self._begins_at() <= now:
            self._begin(now)
        self._answer_watches(now)
        replies, self._replies = self._replies, []
        return replies

    def _answer_watches(self, now: float) -> None:
        view = None
        for host in self._hosts.values():
            watch = host.watch
            if watch is not None and (watch.news != self._news or host.watch_until <= now):
                view = view or self.view(host.member)
                self._reply(host.client, watch.id, view)
                host.watch, host.watch_until = None, math.inf

    def _begins_at(self) -> float:
        """Return when the next world begins, as far as known; infinity: it can't yet."""
        joined = [one for one in self._hosts.values() if one.join is not None]
        job = self._settings
        if job is None or self._outcome is not None or len(joined) < job.min_hosts or self._busy:
            return math.inf
        if len(joined) >= job.hosts:
            return -math.inf
        begins = max(one.joined_at for one in joined) + job.last_call
        if self._world.number < 0:
            begins = max(begins, min(one.joined_at for one in joined) + job.first_call)
        return begins

    def _begin(self, now: float) -> None:
        """Begin the next world, or end the job instead."""
        assert self._settings is not None
        job, last = self._settings, self._world
        joined = sorted(
            ((one, one.join) for one in self._hosts.values() if one.join is not None),
            key=lambda each: (not last.has(each[0].member), each[0].order),
        )[: job.hosts]
        joined.sort(key=lambda each: (each[1].address, each[0].member))
        self._replaced += last.replacements()
        agreement, self._past = agree_on_world(
            last.number + 1,
            last.previous(now) if last.number >= 0 else None,
            [request.host for _, request in joined],
            self._past,
            min_ranks=job.min_ranks,
            max_restarts=job.max_restarts,
            replaced=self._replaced,
        )
        planned = []
        for host, request in joined:
            ranks = request.host.ranks - (host.member == agreement.shrinks)
            planned.append(PlannedHost(request.host.host, host.member, ranks, request.address, request.port))
        master = planned[0].address, planned[0].port
        plan = WorldPlan(agreement=agreement, hosts=tuple(planned), master=master)
        self._world = RunningWorld(last.number + 1, plan, now)
        self._busy = set(self._world.members)
        for host, _ in joined:
            self._admit(host, plan)
        self._news += 1
        if agreement.decision.action == "end":
            self._end(failed_outcome(agreement))

    def _admit_joiners(self, now: float) -> None:
        """Let hosts that wait join the latest world while it runs, if it is live."""
        job, world = self._settings, self._world
        if job is None or not job.rejoin or self._outcome is not None:
            return
        waiting = [one for one in self._hosts.values() if one.join is not None]
        for host in sorted(waiting, key=lambda one: one.order):
            request = host.join
            if request is None or len(world.members) >= job.hosts or not world.admits(request):
                continue
            self._admit(host, world.admit(request, now))
            self._busy.add(host.member)
            self._news += 1

    def _admit(self, host: _Host, plan: WorldPlan) -> None:
        """Send a host that waits its plan."""
        assert host.join is not None, "it waits"
        host.answered = JobReply(host.client, host.join.id, JoinResult(plan=plan))
        self._replies.append(host.answered)
        host.join = None

    def _end(self, outcome: JobOutcome) -> None:
        if self._outcome is not None:
            return
        self._outcome = outcome
        self._news += 1
        for host in self._hosts.values():
            if host.join is not None:
                self._reply(host.client, host.join.id, JoinResult(outcome=outcome))
                host.join = None

    def _is_waited_for(self) -> bool:
        """Return whether a host has joined that the next world would admit and the latest one has not."""
        if self._settings is None or self._world.number < 0 or len(self._busy) >= self._settings.hosts:
            return False
        return any(one.join is not None and not self._world.has(one.member) for one in self._hosts.values())

    def _join_until(self, host: _Host) -> float:
        """Return when a host gives up joining: while others run the latest world, it waits for them."""
        assert self._settings is not None
        if not self._world.has(host.member):
            if self._busy:
                return math.inf
            return max(host.joined_at, self._idle_since) + self._settings.join
        return host.joined_at + self._settings.join

    def _add(self, member: str, client: bytes) -> _Host:
        host = self._hosts[member] = _Host(member, client)
        return host

    def _connect(self, host: _Host, client: bytes) -> None:
        if host.client != client:
            self._member_of.pop(host.client, None)
        self._member_of[client] = host.member
        host.client, host.lost_at = client, math.inf

    def _remove(self, host: _Host, now: float, *, left: bool) -> None:
        del self._hosts[host.member]
        self._member_of.pop(host.client, None)
        if self._world.has(host.member):
            self._world.drop(host.member, now, left=left)
            self._news += 1
        if host.member in self._busy:
            self._busy.remove(host.member)
            self._idle_since = now

    def _reply(
        self, client: bytes, id: int, result: object = None, *, error: str = "", timeout: bool = False
    ) -> None:
        self._replies.append(JobReply(client, id, result, error, timeout))
