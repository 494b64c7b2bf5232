"""Processes of one host's ranks: their environment and files, how they are started, replaced and ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from paceline._core.job_key import JobKey
from paceline._core.processes import graceful_shutdown
from paceline._core.processes.child_process import stop_processes
from paceline.launch.agent.first_failure import RankFailure
from paceline.launch.agent.job_messages import WorldPlan
from paceline.launch.agent.job_server import world_space
from paceline.launch.agent.job_spec import JobSpec
from paceline.launch.agent.rendezvous_address import RendezvousAddress
from paceline.launch.agent.restart_policy import HostMember
from paceline.launch.process.rank_output import LogFollower, RankLogs
from paceline.launch.process.rank_process import (
    RankProcess,
    default_environment,
    loopback_environment,
    start_rank,
    wait_for_exit,
)
from paceline.world import live_file
from paceline.world.live_file import LiveFile
from paceline.world.store.launched_store import file_store_variable, server_store_variable

__all__ = ["HostRank", "HostRanks"]

_POLL_SECONDS = 0.1


@dataclass(eq=False)
class HostRank:
    """One process of a rank.

    Attributes:
        process: the process.
        env: its environment.
        member: its id (`paceline.world.live_file`).
        file: exists while it can recover in place.
        joiner: whether it was started to join the running world.
        started: when it was started.
        was_live: whether it could recover in place at some time.
        marked: whether the others know for certain that it has ended.
        follower: of its log; None: it writes to this terminal.
    """

    process: RankProcess
    env: Mapping[str, str]
    member: str
    file: LiveFile
    joiner: bool
    started: float
    was_live: bool = False
    marked: bool = False
    follower: LogFollower | None = None

    @property
    def local_rank(self) -> int:
        """Its number on this host."""
        return self.process.local_rank

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.process.exit_code() is None

    @property
    def is_live(self) -> bool:
        """Whether its file says that it can recover in place."""
        exists = self.file.exists()
        self.was_live |= exists
        return exists

    @property
    def is_starting(self) -> bool:
        """Whether it was started to join the running world, and has not done so yet."""
        return self.joiner and not (self.was_live or self.is_live)

    def leads(self) -> bool:
        """Return whether it is rank 0 of a live world."""
        world = self.file.read()
        return world is not None and world.members[:1] == (self.member,)

    def failure(self, me: HostMember) -> RankFailure:
        """Return how it ended, on this host."""
        return RankFailure(
            me.host,
            me.member,
            rank=self.process.rank,
            local_rank=self.local_rank,
            exit_code=self.process.exit_code(),
            seconds=time.monotonic() - self.started,
            lines=self.process.tail(),
        )


class HostRanks:
    """Processes of one host's ranks in the present world.

    Args:
        job: to run.
        agent: id of the agent of this host.
        logs: of the ranks.
        key: of the job; None: several hosts do without.

    Attributes:
        present: those that take part in the world, ended ones included until they are removed.
        world: number of the world; −1 before the first one.
    """

    def __init__(self, job: JobSpec, agent: str, logs: RankLogs, key: JobKey | None) -> None:
        self._job, self._agent, self._logs, self._key = job, agent, logs, key
        self.present: list[HostRank] = []
        self.world = -1
        self._removed: list[HostRank] = []
        self._incarnations: dict[int, int] = {}

    @property
    def processes(self) -> list[RankProcess]:
        """The processes that take part in the world."""
        return [one.process for one in self.present]

    def failed(self) -> list[HostRank]:
        """Return those that ended with an error, first those that a signal ended."""
        ended = [(one.process.exit_code() or 0, one) for one in self.present]
        return [one for code, one in sorted(ended, key=lambda each: (each[0], each[1].local_rank)) if code]

    def have_ended_well(self) -> bool:
        """Return whether some have ended well, and no other one runs but those that have not joined the world yet."""
        codes = [one.process.exit_code() for one in self.present]
        others = [one for code, one in zip(codes, self.present, strict=True) if code != 0]
        return 0 in codes and not any(one.process.exit_code() or not one.is_starting for one in others)

    def start(self, plan: WorldPlan) -> None:
        """Start this host's ranks of a world; the earlier ones have been stopped."""
        world = plan.agreement.restart
        if world != self.world:
            self._logs.clear_marks()
            self._incarnations.clear()
        self.world, self.present = world, []
        group = next(index for index, one in enumerate(plan.hosts) if one.member == self._agent)
        first, ranks = sum(one.ranks for one in plan.hosts[:group]), plan.hosts[group].ranks
        size = sum(one.ranks for one in plan.hosts)
        shared = {
            "GROUP_RANK": group,
            "GROUP_WORLD_SIZE": len(plan.hosts),
            "LOCAL_WORLD_SIZE": ranks,
            "WORLD_SIZE": size,
            "ROLE_WORLD_SIZE": size,
            "MASTER_ADDR": plan.master[0],
            "MASTER_PORT": plan.master[1],
            "ROLE_NAME": "rank",
            "TORCHELASTIC_RESTART_COUNT": world,
            "TORCHELASTIC_MAX_RESTARTS": self._job.max_restarts,
            "TORCHELASTIC_RUN_ID": self._job.name,
            # Of a program that switches Paceline's store off, rank 0 serves torch's.
            "TORCHELASTIC_USE_AGENT_STORE": False,
        }
        base = self._base_environment(ranks) | self._store_variables(plan) | _as_text(shared)
        for local_rank in range(ranks):
            own = {
                "RANK": first + local_rank,
                "ROLE_RANK": first + local_rank,
                "LOCAL_RANK": local_rank,
                graceful_shutdown.VARIABLE: self._logs.shutdown_file(local_rank),
            }
            self._start(base | _as_text(own), first + local_rank, local_rank, joiner=plan.joiner)

    def replace(self, ended: HostRank) -> None:
        """Start a process that joins the running world in place of one that was removed."""
        self._start(ended.env, ended.process.rank, ended.local_rank, joiner=True)

    def remove(self, ended: HostRank) -> None:
        """Let a process that has ended take part no more; what its children are is killed.

        It is not reaped yet, so that the other ranks can read how it ended.
        """
        ended.process.signal_group(signal.SIGKILL)
        self.copy_output()
        self.present.remove(ended)
        self._removed.append(ended)

    def copy_output(self) -> None:
        """Copy to this terminal what a rank that has become rank 0 has written to its log."""
        for one in self.present:
            if one.follower is not None:
                one.follower.copy()

    def warn(self, number: int) -> None:
        """Pass a signal on to the ranks, without the processes that they have started."""
        for one in self.present:
            one.process.signal(number)
            one.process.signal(signal.SIGCONT)

    def exit_code_after(self, number: int) -> int:
        """Return the exit code of a launcher whose ranks have ended after a signal: 75 if they have left in order."""
        codes = [one.process.exit_code() for one in self.present]
        failed = [code for code in codes if code not in (None, 0, live_file.LEFT_EXIT_CODE) and code > 0]
        if failed:
            return failed[0]
        if live_file.LEFT_EXIT_CODE in codes:
            return live_file.LEFT_EXIT_CODE
        return 0 if codes and all(code == 0 for code in codes) else 128 + number

    def stop(self, reason: graceful_shutdown.Reason) -> None:
        """End all processes: by a request to those that listen, by SIGTERM, and by SIGKILL."""
        files = {one.local_rank: self._logs.shutdown_file(one.local_rank) for one in self.present}
        for file in files.values():
            graceful_shutdown.request_shutdown(file, reason)
        deadline = time.monotonic() + self._job.timeouts.graceful
        while (left := deadline - time.monotonic()) > 0:
            alive = [one for one in self.processes if one.exit_code() is None]
            if not any(graceful_shutdown.is_listening(files[one.local_rank]) for one in alive):
                break
            wait_for_exit(alive, min(left, _POLL_SECONDS))
        for one in self.present if reason == "failed" else ():
            if graceful_shutdown.saves_file(files[one.local_rank]).exists():
                one.process.signal_group(signal.SIGKILL)
        self.terminate()

    def terminate(self, *, at_once: bool = False) -> None:
        """End all processes by SIGTERM, and after the grace period, or `at_once`, by SIGKILL."""
        seconds = 0.0 if at_once else self._job.timeouts.end
        stop_processes([one.process for one in (*self.present, *self._removed)], seconds)
        self.copy_output()
        self._removed.clear()

    def _base_environment(self, ranks: int) -> dict[str, str]:
        base = default_environment(ranks) | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        if self._job.hosts == 1:
            base |= loopback_environment()
        base |= os.environ
        # Of an outer launcher; the first would override the store.
        for name in ("PACELINE_INIT_METHOD", *live_file.VARIABLES):
            base.pop(name, None)
        return base | dict(self._job.env)

    def _store_variables(self, plan: WorldPlan) -> dict[str, str]:
        """Return the variables with which ranks find their store, and the key that admits them."""
        master = RendezvousAddress(*plan.master)
        if self._job.address is None:
            variables = file_store_variable(self._logs.store_file(self.world), str(master))
        else:
            space = world_space(self._job.name, self.world)
            variables = server_store_variable(
                self._job.address.host, self._job.address.port, space, str(master)
            )
        return variables | dict(self._key.environment() if self._key else {})

    def _start(self, env: Mapping[str, str], rank: int, local_rank: int, *, joiner: bool) -> None:
        incarnation = self._incarnations.get(local_rank, -1) + 1
        self._incarnations[local_rank] = incarnation
        member = live_file.member_id(self._agent, local_rank, incarnation)
        file = self._logs.live_file(member)
        shutdown_file = self._logs.shutdown_file(local_rank)
        for each in (shutdown_file, graceful_shutdown.saves_file(shutdown_file)):
            each.unlink(missing_ok=True)
        own = dict(env)
        if self._job.recovery == "live":
            own |= {live_file.MEMBER_VARIABLE: member, live_file.LIVE_FILE_VARIABLE: str(file)}
            own |= {live_file.JOINER_VARIABLE: "1"} if joiner else {}
        log = self._logs.path(rank, self.world, joiner=joiner)
        process = start_rank(self._job.argv, own, rank, local_rank, log, follow=True)
        started = HostRank(process, env, member, LiveFile(file), joiner, time.monotonic())
        started.follower = None if log is None else LogFollower(log, started.leads)
        self.present.append(started)


def _as_text(variables: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in variables.items()}
