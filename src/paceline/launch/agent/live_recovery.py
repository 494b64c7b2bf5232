"""Live recovery on one host: when a rank ends and the others can recover in place, none is stopped.

The rank that ended is marked as dead for the others, and replaced as long as restarts are left, unless it left in order
or its place failed twice in a row before the rank had joined. A rank whose program reports that it was called wrongly
ends the job, as it would with restarts.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Literal

from paceline._core.job_key import JobKey
from paceline.launch.agent.coordinator import Coordinator
from paceline.launch.agent.first_failure import RankFailure
from paceline.launch.agent.host_ranks import HostRank, HostRanks
from paceline.launch.agent.job_messages import JobView
from paceline.launch.agent.job_server import world_space
from paceline.launch.agent.job_spec import JobSpec
from paceline.launch.agent.restart_log import RestartLog
from paceline.launch.agent.restart_policy import MAX_REPEATED_FAILURES, HostMember
from paceline.launch.process.rank_output import RankLogs
from paceline.world.live_file import LEFT_EXIT_CODE, LiveWorld, dead_key, is_of_agent, lost_key
from paceline.world.store.key_value_state import KEY_VALUE_SERVICE, SetKeys
from paceline.world.store.request_client import ConnectionLost, RequestClient

__all__ = ["LiveRecovery"]

_STORE_SECONDS = 5.0  # for the store to take a key


class LiveRecovery:
    """Handles the end of single ranks of this host.

    Args:
        job: to run.
        coordinator: of the job's hosts.
        ranks: of this host.
        logs: of the ranks.
        log: of restarts.
        key: of the job; None: several hosts do without.
    """

    def __init__(
        self,
        job: JobSpec,
        coordinator: Coordinator,
        ranks: HostRanks,
        logs: RankLogs,
        log: RestartLog,
        key: JobKey | None,
    ) -> None:
        self._job, self._coordinator, self._ranks = job, coordinator, ranks
        self._logs, self._log = logs, log
        self._store = RequestClient(job.address.host, job.address.port, key) if job.address else None
        self.enabled = job.recovery == "live"
        self.begin(joiner=False)

    def begin(self, *, joiner: bool) -> None:
        """Take note that the ranks of a world have been started.

        Args:
            joiner: whether they join one that runs.
        """
        self._reported, self._recorded_epoch = (False, 0, 0), -1
        self._seen_changes: int | None = None if joiner else -1
        self._failed_starts: Counter[int] = Counter()
        self._departed: list[tuple[HostRank, RankFailure]] = []

    def handle_ended(self, me: HostMember) -> bool:
        """Handle the ranks that have ended with an error; return False if the world can't go on without them."""
        return self.enabled and all(self._let_go(one, me) for one in self._ranks.failed())

    def report(self) -> None:
        """Report the state of this host's ranks if it has changed, and mark those that have ended well."""
        if not self.enabled:
            return
        self._ranks.copy_output()
        running = [one for one in self._ranks.present if one.runs]
        survivors = [one for one in running if one.is_live]
        if survivors:
            for one in self._ranks.present:
                if not one.runs and not one.marked:
                    self._mark_dead(one)
        worlds = [world for one in survivors if (world := one.file.read()) is not None]
        newest = max(worlds, key=lambda world: (world.epoch, world.repeats), default=None)
        if newest is not None and newest.epoch > self._recorded_epoch:
            if newest.epoch > 0:
                self._log.write_recovery(self._ranks.world, newest)
            self._recorded_epoch = newest.epoch
        self._departed = [each for each in self._departed if not _are_without(worlds, each[0])]
        live = all(one in survivors or one.is_starting for one in running)
        state = live, len(survivors), max((world.epoch for world in worlds), default=self._reported[2])
        if state != self._reported:
            self._reported = state
            self._coordinator.report_live(
                self._ranks.world, live=live, survivors=len(survivors), epoch=state[2]
            )

    def log_changes(self, view: JobView, me: HostMember) -> None:
        """Log the other hosts that left, were lost or joined while the world ran."""
        if view.world != self._ranks.world:
            return
        if self._seen_changes is None:
            self._seen_changes = view.changes[-1].number if view.changes else -1
        for change in view.changes:
            if change.number > self._seen_changes:
                self._seen_changes = change.number
                if change.member != me.member:
                    self._log.write_change(view.world, change)
                if change.kind == "lost":
                    self._mark_lost(change.member)

    def unrecovered(self) -> list[RankFailure]:
        """Return how the ranks ended without which the others have not formed a new world yet."""
        return [failure for _, failure in self._departed]

    def mark_ended(self) -> None:
        """Mark the ranks that have ended while this host leaves."""
        for one in self._ranks.present if self.enabled else ():
            if not one.runs and not one.marked:
                self._mark_dead(one)

    def leave(self) -> None:
        """End all ranks of this host in order, and mark them; the other hosts go on."""
        self._ranks.terminate()
        for one in self._ranks.present:
            self._mark_dead(one)

    def _let_go(self, ended: HostRank, me: HostMember) -> bool:
        """Report that a rank has ended, and let the others go on without it, or with another one; False: they can't."""
        failure, cause = ended.failure(me), _cause(ended)
        others = [one for one in self._ranks.present if one is not ended]
        running = [one for one in others if one.runs and not one.is_starting]
        if cause == "failed" and (failure.refused or not all(one.is_live for one in running)):
            return False  # those that one leaves, in order, may be about to end themselves
        took_part = ended.is_live or ended.was_live
        self._failed_starts[ended.local_rank] = 0 if took_part else self._failed_starts[ended.local_rank] + 1
        survivors = len(running)
        if cause == "left":
            survivors += sum(one.process.exit_code() == 0 for one in others)
        result = self._coordinator.report_departure(
            self._ranks.world,
            ended.member,
            cause,
            survivors=survivors,
            replace=self._may_replace(ended, failure),
            others=self._known_others(ended, me),
        )
        if not result.goes_on:
            return False
        self._reported = (True, survivors, self._reported[2])
        self._ranks.remove(ended)
        self._mark_dead(ended)
        if cause == "failed":
            self._departed.append((ended, failure))
        left = sum(one.runs for one in self._ranks.present)
        self._log.write_departure(
            self._ranks.world, failure, ended.member, left=left, replaced=result.replaces
        )
        if result.replaces:
            self._ranks.replace(ended)
        return True

    def _known_others(self, ended: HostRank, me: HostMember) -> tuple[str, ...]:
        """Return the processes of other hosts in the newest world that is known here."""
        worlds = [world for one in (ended, *self._ranks.present) if (world := one.file.read()) is not None]
        newest = max(worlds, key=lambda world: world.epoch, default=LiveWorld(0, (), 0))
        return tuple(each for each in newest.members if not is_of_agent(each, me.member))

    def _may_replace(self, ended: HostRank, failure: RankFailure) -> bool:
        if ended.process.exit_code() == LEFT_EXIT_CODE or failure.refused:
            return False
        return self._failed_starts[ended.local_rank] < MAX_REPEATED_FAILURES

    def _mark_dead(self, ended: HostRank) -> None:
        ended.marked = True
        self._logs.mark_dead(ended.member)
        self._set([dead_key(ended.member)])

    def _mark_lost(self, agent: str) -> None:
        """Mark the processes of a host that is lost."""
        worlds = [world for one in self._ranks.present if (world := one.file.read()) is not None]
        known = {member for world in worlds for member in world.members}
        self._set([lost_key(member) for member in known if is_of_agent(member, agent)])

    def _set(self, keys: list[str]) -> None:
        """Set keys in the world's store."""
        if self._store is None or not keys:
            return
        request = SetKeys(0, world_space(self._job.name, self._ranks.world), dict.fromkeys(keys, b""))
        with contextlib.suppress(ConnectionLost, TimeoutError):  # the others notice it by the silence
            self._store.call(KEY_VALUE_SERVICE, request, _STORE_SECONDS)


def _cause(ended: HostRank) -> Literal["failed", "left", "joiner"]:
    if ended.is_starting:
        return "joiner"
    return "left" if ended.process.exit_code() == LEFT_EXIT_CODE else "failed"


def _are_without(worlds: list[LiveWorld], ended: HostRank) -> bool:
    """Return whether some rank has formed a world without one that ended."""
    return any(ended.member not in world.members for world in worlds)
