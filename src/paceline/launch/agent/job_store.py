"""State of a job in the key-value store of its rendezvous: registrations, failures, progress and outcome.

A job is a series of worlds, numbered from 0. Of each world the store holds the members, the failures in the order of
their reports, whether it made progress, and the number of hosts that have finished; of the job, its outcome. Every
write increments ``news``, so that one request shows whether anything changed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline._core.json_codec import decode, encode
from paceline.errors import MissingRanks, UsageError, WorldError
from paceline.launch.agent.first_failure import RankFailure
from paceline.launch.agent.job_spec import JobSpec
from paceline.launch.agent.restart_log import log_line
from paceline.launch.agent.restart_policy import (
    HostMember,
    JobOutcome,
    PreviousWorld,
    WorldAgreement,
    WorldRun,
    agree_on_world,
)

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["JobStore", "too_few_hosts"]

_POLL_SECONDS = 0.1
_QUIET_SECONDS = 3.0  # before it is logged that hosts are missing


def too_few_hosts(job: JobSpec) -> MissingRanks:
    """Return the error for a job without the hosts it needs."""
    return MissingRanks(
        f"fewer than {job.min_hosts} of {job.hosts} hosts joined within {job.timeouts.join:g} s",
        remedy="start the command on every host, or allow a smaller world (--min-ranks)",
    )


class JobStore:
    """Typed access to the store of one job.

    Args:
        store: of the rendezvous, prefixed for this job; nothing blocks on it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def register(self, job: JobSpec) -> None:
        """Join a job; at its start, wait for the other hosts.

        Raises:
            UsageError: another host was started with other settings.
            WorldError: the job has ended.
            MissingRanks: too few hosts joined in time.
        """
        mine = json.dumps(job.shared(), sort_keys=True)
        found = self._store.compare_set("settings", "", mine).decode()
        if found != mine:
            theirs = json.loads(found)
            differing = [
                f"{name}={value} (there {theirs[name]})"
                for name, value in job.shared().items()
                if theirs[name] != value
            ]
            raise UsageError(
                f"this host was started with {', '.join(differing)}, unlike the first host",
                remedy="start the same command on every host",
            )
        if self.outcome() is not None:
            raise WorldError(
                f"the job {job.name!r} at {job.address} has ended",
                remedy="give the next job another name (--name), or serve it elsewhere",
            )
        self._store.add("came", 1)
        if job.hosts > 1:
            self._wait_for_hosts(job)

    def _wait_for_hosts(self, job: JobSpec) -> None:
        """At the start of a job, wait for all hosts, or after a while for the required ones."""
        start, logged = time.monotonic(), False
        while not self.has_started() and (joined := self._store.add("came", 0)) < job.hosts:
            waited = time.monotonic() - start
            if joined >= job.min_hosts and waited > job.timeouts.first_call:
                return
            if waited > job.timeouts.join:
                raise too_few_hosts(job)
            if not logged and waited > _QUIET_SECONDS:
                logged = True
                log_line(f"waiting for hosts: {joined} of {job.hosts} joined")
            time.sleep(_POLL_SECONDS)

    def has_started(self) -> bool:
        """Return whether the job has begun its first world."""
        return self._store.add("worlds", 0) > 0

    def change_count(self) -> int:
        """Return a counter that every change increments."""
        return self._store.add("news", 0)

    def report_failure(self, world: int, failure: RankFailure) -> None:
        """Add a failure of a world."""
        order = self._store.add(f"{world}/failures", 1)
        self._set(f"{world}/failure/{order}", failure)
        self._store.add("news", 1)

    def failures(self, world: int) -> tuple[RankFailure, ...]:
        """Return the failures of a world, in the order in which they were reported."""
        count = self._store.add(f"{world}/failures", 0)
        keys = [f"{world}/failure/{order}" for order in range(1, count + 1)]
        return tuple(self._get(key, RankFailure) for key in keys if self._store.check([key]))

    def has_failed(self, world: int) -> bool:
        """Return whether a failure of a world was reported."""
        return self._store.add(f"{world}/failures", 0) > 0

    def report_progress(self, world: int) -> None:
        """Record that a world made progress."""
        self._store.add(f"{world}/progress", 1)

    def report_finished(self, world: int) -> int:
        """Record that all ranks of a host ended well, and return the number of such hosts."""
        hosts = self._store.add(f"{world}/finished", 1)
        self._store.add("news", 1)
        return hosts

    def finished_hosts(self, world: int) -> int:
        """Return the number of hosts whose ranks have all ended well."""
        return self._store.add(f"{world}/finished", 0)

    def end(self, outcome: JobOutcome) -> None:
        """End the job, unless it has ended."""
        self._store.compare_set("over", "", json.dumps(encode(outcome)))
        self._store.add("news", 1)

    def outcome(self) -> JobOutcome | None:
        """Return the outcome of the job, None while it is running."""
        return self._get("over", JobOutcome) if self._store.check(["over"]) else None

    def report_left(self) -> None:
        """Record that this host no longer needs the store."""
        self._store.add("left", 1)

    def left_hosts(self) -> int:
        """Return the number of hosts that no longer need the store."""
        return self._store.add("left", 0)

    def agree(self, now: Sequence[HostMember], job: JobSpec) -> WorldAgreement:
        """Decide how the job continues with the present hosts; called by one host for all."""
        world = self._store.add("worlds", 1) - 1
        before, past = None, ()
        if self._store.check(["latest"]):
            latest = json.loads(self._store.get("latest"))
            before = PreviousWorld(
                members=decode(latest["members"], tuple[HostMember, ...], "latest world"),
                failures=self.failures(latest["number"]),
                progress=self._store.add(f"{latest['number']}/progress", 0) > 0,
                seconds=time.time() - latest["began"],
            )
            past = decode(latest["past"], tuple[WorldRun, ...], "latest world")
        agreement, past = agree_on_world(
            world, before, now, past, min_ranks=job.min_ranks, max_restarts=job.max_restarts
        )
        members = [
            HostMember(one.host, one.member, one.ranks - (one.member == agreement.shrinks)) for one in now
        ]
        self._set(
            "latest",
            {
                "number": world,
                "began": time.time(),
                "members": [one for one in members if one.ranks],
                "past": past,
            },
        )
        return agreement

    def _set(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(encode(value)))

    def _get(self, key: str, kind: type[Any]) -> Any:
        return decode(json.loads(self._store.get(key)), kind, key)
