"""Access of a host's agent to the state of its job, which one host alone keeps in its own process."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from paceline._core.format import plural
from paceline._core.processes.child_process import ChildProcess
from paceline.errors import MissingRanks, UsageError, WorldError
from paceline.launch.agent.first_failure import RankFailure
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
    RegisterHost,
    ReportDeparture,
    ReportFailure,
    ReportLive,
    ReportProgress,
    WorldPlan,
)
from paceline.launch.agent.job_spec import JobSpec
from paceline.launch.agent.job_state import JobReply, JobState
from paceline.launch.agent.restart_policy import HostMember, JobEnded, JobOutcome
from paceline.launch.process.rank_process import wait_for_exit

__all__ = ["Coordinator", "JoinTimeout", "LocalCoordinator", "too_few_hosts"]


class JoinTimeout(Exception):
    """Too few hosts joined in time."""


def too_few_hosts(job: JobSpec) -> MissingRanks:
    """Return the error for a job without the hosts it needs."""
    return MissingRanks(
        f"fewer than {job.min_hosts} of {plural(job.hosts, 'host')} joined within {job.timeouts.join:g} s",
        remedy="start the command on every host, or allow a smaller world (--min-ranks)",
    )


class Coordinator(ABC):
    """Requests of one host about its job.

    Args:
        job: whose state it is.
        member: id of this host's agent.
    """

    def __init__(self, job: JobSpec, member: str) -> None:
        self._job, self._member = job, member
        self._last_id = 0

    def register(self) -> None:
        """Take part in the job.

        Raises:
            UsageError: another host was started with other settings.
            WorldError: the job has ended.
        """
        job, limits = self._job, self._job.timeouts
        settings = JobSettings(
            hosts=job.hosts,
            min_hosts=job.min_hosts,
            min_ranks=job.min_ranks,
            max_restarts=job.max_restarts,
            first_call=limits.first_call,
            last_call=limits.last_call,
            join=limits.join,
            rejoin=job.rejoin,
        )
        record: JobRecord = self._ask(RegisterHost(*self._head(), settings), JobRecord)
        differing = [
            f"{name}={value} (there {getattr(record.settings, name)})"
            for name, value in job.shared().items()
            if getattr(record.settings, name) != value
        ]
        if differing:
            raise UsageError(
                f"this host was started with {', '.join(differing)}, unlike the first host",
                remedy="start the same command on every host",
            )
        if record.outcome is not None:
            raise WorldError(
                f"the job {job.name!r} at {job.address} has ended",
                remedy="give the next job another name (--name), or serve it elsewhere",
            )

    def join(self, me: HostMember, address: str, port: int) -> WorldPlan:
        """Wait for the next world, or for admission to the one that runs.

        Args:
            me: this host and the ranks that it offers.
            address: where the other hosts reach this one.
            port: one that is free here.

        Raises:
            JobEnded: the job has ended.
            JoinTimeout: too few hosts joined in time.
        """
        live = self._job.recovery == "live"
        result: JoinResult = self._ask(JoinWorld(*self._head(), me, address, port, live), JoinResult)
        if result.outcome is not None:
            raise JobEnded(result.outcome)
        assert result.plan is not None, "a result is a plan or an outcome"
        return result.plan

    def report_failure(self, world: int, failure: RankFailure) -> None:
        """Add a failure of a world."""
        self._ask(ReportFailure(*self._head(), world, failure))

    def failures(self, world: int) -> tuple[RankFailure, ...]:
        """Return the failures of a world, in the order in which they were reported."""
        return self._ask(GetFailures(*self._head(), world), tuple[RankFailure, ...])

    def report_progress(self, world: int) -> None:
        """Record that a world made progress."""
        self._ask(ReportProgress(*self._head(), world))

    def report_finished(self, world: int) -> int:
        """Record that all ranks of this host ended well, and return the number of such hosts."""
        return self._ask(FinishWorld(*self._head(), world), int | None) or 0

    def report_live(self, world: int, *, live: bool, survivors: int, epoch: int) -> None:
        """Report the state of this host's ranks, see `ReportLive`."""
        self._ask(ReportLive(*self._head(), world, live, survivors, epoch))

    def report_departure(
        self,
        world: int,
        rank: str,
        cause: Literal["failed", "left", "joiner"],
        *,
        survivors: int,
        replace: bool,
        others: tuple[str, ...] = (),
    ) -> DepartureResult:
        """Report that a rank has ended while the others can recover, see `ReportDeparture`."""
        request = ReportDeparture(*self._head(), world, rank, cause, survivors, replace, others)
        return self._ask(request, DepartureResult)

    def end(self, outcome: JobOutcome) -> None:
        """End the job on all hosts, unless it has ended."""
        self._ask(EndJob(*self._head(), outcome))

    def leave(self) -> None:
        """Leave the job."""
        self._ask(LeaveJob(*self._head()))

    @abstractmethod
    def view(self) -> JobView:
        """Return the latest known state of the job; never waits."""

    @abstractmethod
    def wait(self, running: Sequence[ChildProcess], seconds: float) -> None:
        """Return as soon as one of the running processes ends or the job's state changes, at most after `seconds`."""

    @abstractmethod
    def close(self) -> None:
        """End the connection, if there is one."""

    @abstractmethod
    def _ask(self, request: AnyJobRequest, kind: Any = Any) -> Any:
        """Return the result of a request, of type `kind`."""

    def _head(self) -> tuple[int, str, str]:
        self._last_id += 1
        return self._last_id, self._job.name, self._member


class LocalCoordinator(Coordinator):
    """State of a job of a single host, in this process."""

    def __init__(self, job: JobSpec, member: str) -> None:
        super().__init__(job, member)
        self._state = JobState()

    def view(self) -> JobView:
        return self._state.view(self._member)

    def wait(self, running: Sequence[ChildProcess], seconds: float) -> None:
        if any(one.exit_code() is None for one in running):
            wait_for_exit(running, seconds)

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _ask(self, request: AnyJobRequest, kind: Any = Any) -> Any:
        replies = self._state.handle(b"", request, time.monotonic())
        reply: JobReply = next(one for one in replies if one.id == request.id)
        if reply.timeout:
            raise JoinTimeout(reply.error)
        return reply.result
