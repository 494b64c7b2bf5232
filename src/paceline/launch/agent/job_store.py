"""What the hosts of a run tell each other, on the key-value store of their rendezvous.

A run is a series of worlds, numbered from 0. Of each the board holds who took part, which failures were told, in the
order in which they were, whether there was progress, and how many hosts have ended well; and of the run, whether it
is over. Whoever writes something counts `news` up by one, so that a look costs one question.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from paceline.errors import MissingRanks, UsageError, WorldError
from paceline.launch.agent.job_outcome import JobOutcome
from paceline.launch.agent.job_spec import JobSpec
from paceline.launch.agent.rank_failure import RankFailure
from paceline.launch.agent.restart_log import log_line
from paceline.launch.agent.restart_policy import WorldRun
from paceline.launch.agent.world_agreement import HostMember, PreviousWorld, WorldAgreement, agree_on_world

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["JobStore", "too_few_hosts"]

_LOOK_SECONDS = 0.1
_TELL_SECONDS = 3.0


def too_few_hosts(job: JobSpec) -> MissingRanks:
    """Return the error for a run that has not the hosts that it needs."""
    return MissingRanks(
        f"fewer than {job.min_hosts} of {job.hosts} hosts were there within {job.patience.join:g} s",
        remedy="start the command on every host, or let the world be smaller (--min-ranks)",
    )


class JobStore:
    """The board of one run.

    Args:
        store: of the rendezvous, for this run alone; nobody waits on it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def arrive(self, job: JobSpec) -> None:
        """Take part in a run; at its start, wait a while for all hosts to come.

        Raises:
            UsageError: the run was started otherwise on another host.
            WorldError: it is over.
            MissingRanks: too few hosts came within the time that `job` allows.
        """
        mine = json.dumps(job.shared(), sort_keys=True)
        theirs = self._store.compare_set("settings", "", mine).decode()
        if theirs != mine:
            differing = [
                f"{name}={value} (there {json.loads(theirs)[name]})"
                for name, value in job.shared().items()
                if json.loads(theirs)[name] != value
            ]
            raise UsageError(
                f"this host was started with {', '.join(differing)}, unlike the host that came first",
                remedy="start the same command on every host",
            )
        over = self.over()
        if over is not None:
            raise WorldError(
                f"the run {job.name!r} at {job.address} is over",
                remedy="give the next run another name (--name), or serve it elsewhere",
            )
        self._store.add("came", 1)
        if job.hosts > 1:
            self._await_hosts(job)

    def _await_hosts(self, job: JobSpec) -> None:
        """At the start of a run, wait for all hosts to come, and after a while for as many as it needs."""
        start, told = time.monotonic(), False
        while not self.begun() and (came := self._store.add("came", 0)) < job.hosts:
            waited = time.monotonic() - start
            if came >= job.min_hosts and waited > job.timeouts.first_call:
                return
            if waited > job.timeouts.join:
                raise too_few_hosts(job)
            if not told and waited > _TELL_SECONDS:
                told = True
                log_line(f"waiting for hosts: {came} of {job.hosts} came")
            time.sleep(_LOOK_SECONDS)

    def begun(self) -> bool:
        """Return whether the run has begun its first world."""
        return self._store.add("worlds", 0) > 0

    def news(self) -> int:
        """Return a number that grows with whatever is told."""
        return self._store.add("news", 0)

    def fail(self, number: int, failure: RankFailure) -> None:
        """Tell that something failed in world `number`."""
        order = self._store.add(f"{number}/failures", 1)
        self._store.set(f"{number}/failure/{order}", json.dumps(asdict(failure)))
        self._store.add("news", 1)

    def failures(self, number: int) -> tuple[RankFailure, ...]:
        """Return what failed in world `number`, in the order in which it was told."""
        keys = [
            f"{number}/failure/{order}" for order in range(1, self._store.add(f"{number}/failures", 0) + 1)
        ]
        told = [self._store.get(key) for key in keys if self._store.check([key])]
        return tuple(RankFailure.from_json(json.loads(text)) for text in told)

    def failed(self, number: int) -> bool:
        """Return whether something failed in world `number`."""
        return self._store.add(f"{number}/failures", 0) > 0

    def advance(self, number: int) -> None:
        """Tell that world `number` made progress."""
        self._store.add(f"{number}/progress", 1)

    def finish(self, number: int) -> int:
        """Tell that all ranks of a host ended well in world `number`, and return how many hosts have told so."""
        hosts = self._store.add(f"{number}/finished", 1)
        self._store.add("news", 1)
        return hosts

    def finished(self, number: int) -> int:
        """Return how many hosts have told that their ranks ended well."""
        return self._store.add(f"{number}/finished", 0)

    def end(self, over: JobOutcome) -> None:
        """End the run, unless it has ended."""
        self._store.compare_set("over", "", json.dumps(asdict(over)))
        self._store.add("news", 1)

    def over(self) -> JobOutcome | None:
        """Return how the run ended, None while it goes on."""
        return JobOutcome(**json.loads(self._store.get("over"))) if self._store.check(["over"]) else None

    def leave(self) -> None:
        """Tell that this host needs the store no more."""
        self._store.add("left", 1)

    def left(self) -> int:
        """Return how many hosts need the store no more."""
        return self._store.add("left", 0)

    def judge(self, now: Sequence[HostMember], job: JobSpec) -> WorldAgreement:
        """Decide how the run goes on with the hosts that are there `now`; one host does this for all."""
        number = self._store.add("worlds", 1) - 1
        before, past = None, ()
        if self._store.check(["latest"]):
            latest = json.loads(self._store.get("latest"))
            last = latest["number"]
            before = PreviousWorld(
                members=tuple(HostMember(**one) for one in latest["members"]),
                told=self.failures(last),
                progress=self._store.add(f"{last}/progress", 0) > 0,
                seconds=time.time() - latest["began"],
            )
            past = tuple(WorldRun(**one) for one in latest["past"])
        verdict, past = agree_on_world(
            number, before, now, past, min_ranks=job.min_ranks, max_restarts=job.max_restarts
        )
        members = [
            HostMember(one.host, one.member, one.ranks - (one.member == verdict.shrinks)) for one in now
        ]
        latest = {
            "number": number,
            "began": time.time(),
            "members": [asdict(one) for one in members if one.ranks],
            "past": [asdict(one) for one in past],
        }
        self._store.set("latest", json.dumps(latest))
        return verdict
