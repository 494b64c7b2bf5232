"""Requests of a job's hosts to its coordinator, and their results.

A host is named by the id of its agent (``member``). Times are relative: seconds from when the coordinator gets them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from paceline._core.json_codec import NonNegative, Whole
from paceline.launch.agent.first_failure import RankFailure
from paceline.launch.agent.restart_policy import HostMember, JobOutcome, WorldAgreement

__all__ = [
    "JOB_SERVICE",
    "AnyJobRequest",
    "DepartureResult",
    "EndJob",
    "FinishWorld",
    "GetFailures",
    "JobRecord",
    "JobRequest",
    "JobSettings",
    "JobView",
    "JoinResult",
    "JoinWorld",
    "LeaveJob",
    "PlannedHost",
    "RegisterHost",
    "ReportDeparture",
    "ReportFailure",
    "ReportLive",
    "ReportProgress",
    "WatchJob",
    "WorldChange",
    "WorldPlan",
]

JOB_SERVICE = b"job"
"""Name of the service that coordinates jobs."""

_Name = Annotated[str, Meta(max_length=255)]
_Host = Annotated[str, Meta(max_length=255)]
_Member = Annotated[str, Meta(min_length=1, max_length=64)]
_Port = Annotated[int, Meta(ge=0, le=65535)]
_Count = Annotated[int, Meta(ge=1, le=1_000_000)]


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """Settings of a job that must be equal on every host, and its time limits in seconds (`JobTimeouts`).

    Attributes:
        rejoin: whether a host may join a live world.
    """

    hosts: _Count
    min_hosts: _Count
    min_ranks: _Count
    max_restarts: Whole
    first_call: NonNegative
    last_call: NonNegative
    join: NonNegative
    rejoin: bool = True


@dataclass(frozen=True)
class PlannedHost:
    """A host of a world, its number of ranks, and where its lowest rank may listen."""

    host: _Host
    member: _Member
    ranks: Whole
    address: _Host
    port: _Port


@dataclass(frozen=True, kw_only=True)
class WorldPlan:
    """A world that is about to begin, or runs and is joined.

    Attributes:
        agreement: of all hosts on how the job continues; for a joiner, the one with which the world began.
        hosts: of the world, in the order of their ranks; the one that shrinks has its new number of ranks. Hosts that
            have left a running world keep their places, until others take them.
        master: address and port of the host of rank 0 when the world began.
        joiner: whether the host joins a running world.
    """

    agreement: WorldAgreement
    hosts: tuple[PlannedHost, ...]
    master: tuple[_Host, _Port]
    joiner: bool = False


@dataclass(frozen=True)
class WorldChange:
    """A host that left, was lost or joined while the ranks of the others went on.

    Attributes:
        number: of the change in its world, from 0.
        host: name of the host.
        member: id of its agent.
        kind: ``"left"``, ``"lost"`` or ``"joined"``.
        seconds: how long the world had been running.
    """

    number: Whole
    host: _Host
    member: _Member
    kind: str
    seconds: float


@dataclass(frozen=True)
class DepartureResult:
    """Whether the others go on after the end of a rank, and whether it may be replaced."""

    goes_on: bool
    replaces: bool


@dataclass(frozen=True, kw_only=True)
class JobView:
    """State of a job.

    Attributes:
        news: number of changes so far.
        outcome: None while the job runs.
        world: number of the latest world; −1 before the first one.
        failed: whether a failure of it was reported.
        finished: number of its hosts whose ranks have all ended well.
        lost: whether a host of it has left or was lost.
        waiting: whether a host waits to join that the next world would admit.
        joined: number of hosts that wait for the next world.
        present: number of connected hosts.
        member: whether the host that asks is still counted as present.
        live: whether the ranks of all hosts of the latest world can recover in place.
        changes: of the hosts of the latest world, while it ran; the latest ones.
    """

    news: int
    outcome: JobOutcome | None
    world: int
    failed: bool
    finished: int
    lost: bool
    waiting: bool
    joined: int
    present: int
    member: bool
    live: bool
    changes: tuple[WorldChange, ...]


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """Settings of a job, given by its first host, and its outcome if it has ended."""

    settings: JobSettings
    outcome: JobOutcome | None


@dataclass(frozen=True, kw_only=True)
class JoinResult:
    """The plan of a world, or the outcome of the job."""

    plan: WorldPlan | None = None
    outcome: JobOutcome | None = None


class JobRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A request of a host about a job."""

    id: Whole
    job: _Name
    member: _Member


class RegisterHost(JobRequest, tag="register"):
    """Take part in a job; returns a `JobRecord`."""

    settings: JobSettings


class JoinWorld(JobRequest, tag="join"):
    """Wait for the next world with this host; returns a `JoinResult`."""

    host: HostMember
    address: _Host
    port: _Port
    live: bool = False
    """Whether its ranks can join a world that runs."""


class WatchJob(JobRequest, tag="watch"):
    """Return the view once its ``news`` differ from these, and after `seconds` at the latest."""

    news: int
    """−1: at once."""
    seconds: NonNegative


class ReportFailure(JobRequest, tag="failure"):
    """Report a failure of a world."""

    world: Whole
    failure: RankFailure


class GetFailures(JobRequest, tag="failures"):
    """Return the failures of a world in the order of their reports."""

    world: Whole


class ReportProgress(JobRequest, tag="progress"):
    """Report that a world made progress."""

    world: Whole


class FinishWorld(JobRequest, tag="finished"):
    """Report that all ranks of this host have ended well."""

    world: Whole


class ReportLive(JobRequest, tag="live"):
    """Report the state of this host's ranks."""

    world: Whole
    live: bool
    """Whether all that run can recover in place; those that have yet to join don't count."""
    survivors: Whole
    """How many can."""
    epoch: Whole
    """The latest of their worlds, as they number them."""


class ReportDeparture(JobRequest, tag="departure"):
    """Report that a rank has ended, and that all others of this host can recover; returns a `DepartureResult`."""

    world: Whole
    rank: Annotated[str, Meta(max_length=255)]
    """Id of its process (`paceline.world.live_file`)."""
    cause: Literal["failed", "left", "joiner"]
    """It failed, left in order, or ended before it joined the world."""
    survivors: Whole
    """Ranks of this host that can recover; if it left, those that have ended well too."""
    replace: bool
    """Whether the host wants to start another process in its place."""
    others: tuple[Annotated[str, Meta(max_length=255)], ...] = ()
    """Processes of other hosts that were in its latest world: it may be newer than what their hosts have reported."""


class EndJob(JobRequest, tag="end"):
    """End the job, unless it has ended."""

    outcome: JobOutcome


class LeaveJob(JobRequest, tag="leave"):
    """Leave the job."""


AnyJobRequest = (
    RegisterHost
    | JoinWorld
    | WatchJob
    | ReportFailure
    | GetFailures
    | ReportProgress
    | FinishWorld
    | ReportLive
    | ReportDeparture
    | EndJob
    | LeaveJob
)
"""Every request of the service."""
