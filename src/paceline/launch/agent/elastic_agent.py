"""Elastic agent of one host: runs its ranks, and takes part in the agreements of all hosts of the job.

1. Ranks get a parent-death signal, so nothing outlives the agent; the end of a rank is noticed at once.
2. A failure is reported to the coordinator at once, and the other agents restart on that report.
3. Before a world begins, the coordinator decides for all hosts why the last one ended (`restart_policy`).
4. A host whose ranks have ended well waits for the others, and restarts with them if one of them fails.
5. Watched ranks shut down gracefully, so that none takes another one's end for a failure.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Mapping

from paceline._core import graceful_shutdown
from paceline._core.child_process import stop_processes
from paceline._core.job_key import JobKey
from paceline._core.process_exit import signal_name
from paceline.errors import UsageError, WorldError
from paceline.launch.agent.coordinator import Coordinator, JoinTimeout, LocalCoordinator, too_few_hosts
from paceline.launch.agent.first_failure import RankFailure, is_secondary
from paceline.launch.agent.job_messages import WorldPlan
from paceline.launch.agent.job_server import serve_jobs, world_space
from paceline.launch.agent.job_spec import JobSpec
from paceline.launch.agent.remote_coordinator import RemoteCoordinator
from paceline.launch.agent.rendezvous_address import (
    RendezvousAddress,
    check_port_free,
    free_port,
    is_local,
    is_port_taken,
    reachable_address,
    wait_for_server,
)
from paceline.launch.agent.restart_log import RestartLog, log_line
from paceline.launch.agent.restart_policy import (
    HostMember,
    JobEnded,
    JobOutcome,
    WorldAgreement,
    failed_outcome,
)
from paceline.launch.process.rank_output import RankLogs
from paceline.launch.process.rank_process import (
    RankProcess,
    default_environment,
    loopback_environment,
    start_rank,
    wait_for_exit,
)
from paceline.world.store.launched_store import file_store_variable, server_store_variable
from paceline.world.store.request_client import ConnectionLost
from paceline.world.store.request_server import RequestServer

__all__ = ["ElasticAgent", "run_host"]

_POLL_SECONDS = 0.1
_LEAVE_POLL_SECONDS = 0.05
_IDLE_SECONDS = 5.0  # without any event
_PROGRESS_SECONDS = 60.0  # ranks that ran so long made progress, unless the job defines it
_LINGER_SECONDS = 5.0  # the server of the rendezvous lets the others read the outcome


class _RepeatRendezvous(Exception):
    """This world must not begin, because a host leaves it first."""


class ElasticAgent:
    """Runs this host's ranks of a job; :meth:`run` returns when the job has ended well.

    Args:
        job: to run.
        member: id of this agent.
        coordinator: of the job's hosts.
        logs: of the ranks.
        key: of the job; None: several hosts do without.
        address: where other hosts reach this one.
        serving: whether the job ends with this host, because it serves the rendezvous.
    """

    def __init__(
        self,
        job: JobSpec,
        member: str,
        coordinator: Coordinator,
        logs: RankLogs,
        *,
        key: JobKey | None,
        address: str,
        serving: bool,
    ) -> None:
        self._job, self._coordinator, self._logs = job, coordinator, logs
        self._key, self._address, self._serving = key, address, serving
        self._restart_log = RestartLog(job.log_dir)
        self._me = HostMember(socket.gethostname(), member, job.ranks)
        self._running: list[RankProcess] = []
        self._world, self._started = -1, time.monotonic()
        self._hosts, self._finished = 1, False
        self._stop_reason: graceful_shutdown.Reason = "failed"

    def run(self) -> None:
        """Start ranks, and restart them after each failure, until the job has ended."""
        try:
            self._start_world()
            while not self._poll():
                pass
        except KeyboardInterrupt:
            outcome = JobOutcome(130, f"interrupted on {self._me.host}", remedy="start it again to continue")
            self._end_job(outcome)
            raise
        except SystemExit as error:
            self._leave(int(error.code or 0))
            raise
        finally:
            stop_processes(self._running, self._job.timeouts.end)

    def _start_world(self) -> None:
        """Repeat the rendezvous until a world can begin, and start this host's ranks of it."""
        while True:
            try:
                plan = self._coordinator.join(self._me, self._address, free_port())
                self._apply(plan.agreement)
            except _RepeatRendezvous:
                continue
            except JoinTimeout:
                if self._world >= 0:
                    self._end_job(JobOutcome(1, str(too_few_hosts(self._job))))
                raise
            break
        self._hosts = len(plan.hosts)
        self._start_ranks(plan)

    def _start_ranks(self, plan: WorldPlan) -> None:
        group = next(index for index, one in enumerate(plan.hosts) if one.member == self._me.member)
        first = sum(one.ranks for one in plan.hosts[:group])
        size, ranks = sum(one.ranks for one in plan.hosts), plan.hosts[group].ranks
        shared = {
            "GROUP_RANK": group,
            "GROUP_WORLD_SIZE": len(plan.hosts),
            "LOCAL_WORLD_SIZE": ranks,
            "WORLD_SIZE": size,
            "ROLE_WORLD_SIZE": size,
            "MASTER_ADDR": plan.hosts[0].address,
            "MASTER_PORT": plan.hosts[0].port,
            "ROLE_NAME": "rank",
            "TORCHELASTIC_RESTART_COUNT": self._world,
            "TORCHELASTIC_MAX_RESTARTS": self._job.max_restarts,
            "TORCHELASTIC_RUN_ID": self._job.name,
            # Of a program that switches Paceline's store off, rank 0 serves torch's.
            "TORCHELASTIC_USE_AGENT_STORE": False,
        }
        base = default_environment(ranks) | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        if self._job.hosts == 1:
            base |= loopback_environment()
        base |= os.environ
        base.pop("PACELINE_INIT_METHOD", None)  # of an outer launcher: it would override the store
        base |= self._job.env
        base |= self._store_variables(plan)
        self._started, self._finished = time.monotonic(), False
        self._running = []
        for local_rank in range(ranks):
            rank = first + local_rank
            shutdown_file = self._logs.shutdown_file(local_rank)
            shutdown_file.unlink(missing_ok=True)
            own = {
                "RANK": rank,
                "ROLE_RANK": rank,
                "LOCAL_RANK": local_rank,
                graceful_shutdown.VARIABLE: shutdown_file,
            }
            env = base | {name: str(value) for name, value in (shared | own).items()}
            log = self._logs.path(rank, self._world)
            self._running.append(start_rank(self._job.argv, env, rank, local_rank, log, follow=True))

    def _store_variables(self, plan: WorldPlan) -> Mapping[str, str]:
        """Return the variables with which ranks find their store, and the key that admits them."""
        master = RendezvousAddress(plan.hosts[0].address, plan.hosts[0].port)
        if self._job.address is None:
            variables = file_store_variable(self._logs.store_file(self._world), str(master))
        else:
            space = world_space(self._job.name, self._world)
            variables = server_store_variable(
                self._job.address.host, self._job.address.port, space, str(master)
            )
        return variables | (self._key.environment() if self._key else {})

    def _stop_ranks(self) -> None:
        files = {one.rank: self._logs.shutdown_file(one.local_rank) for one in self._running}
        for file in files.values():
            graceful_shutdown.request_shutdown(file, self._stop_reason)
        deadline = time.monotonic() + self._job.timeouts.graceful
        while (left := deadline - time.monotonic()) > 0:
            alive = [one for one in self._running if one.exit_code() is None]
            if not any(graceful_shutdown.is_listening(files[one.rank]) for one in alive):
                break
            wait_for_exit(alive, min(left, _POLL_SECONDS))
        stop_processes(self._running, self._job.timeouts.end)

    def _poll(self) -> bool:
        """Wait for an event, handle it, and return whether the job has ended well."""
        self._coordinator.wait(self._running, _IDLE_SECONDS)
        codes = [one.exit_code() for one in self._running]
        if any(codes):
            self._report_failures()
            self._restart("failed")
            return False
        if not self._finished and all(code == 0 for code in codes):
            self._finished = True
            if self._coordinator.report_finished(self._world) == self._hosts:
                self._end_job(JobOutcome(0))
        view = self._coordinator.view()
        if view.outcome is not None:
            if view.outcome.code:
                raise JobEnded(view.outcome)
            return True
        if view.world < self._world:
            return False  # it is older than this world
        gone = not view.member or view.world > self._world  # the others continued without this host
        if gone or view.failed or view.lost:
            self._restart("failed")
        elif view.waiting and self._job.rejoin and not view.finished:
            self._restart("changed")
        return False

    def _report_failures(self) -> None:
        """Report the failed ranks of this host; if all of them lost a peer, wait briefly for that peer's end."""
        reported: set[int] = set()
        deadline = time.monotonic() + self._job.timeouts.follow
        while True:
            failed = [one for one in self._running if one.exit_code() and one.rank not in reported]
            failed.sort(key=lambda one: (one.exit_code() or 0, one.rank))  # those ended by signals first
            for one in failed:
                reported.add(one.rank)
                self._report_failure(one.tail(), one)
            left = deadline - time.monotonic()
            if left <= 0 or not all(is_secondary(one) for one in self._coordinator.failures(self._world)):
                return
            if all(one.exit_code() is not None for one in self._running):
                return
            wait_for_exit(self._running, min(left, _POLL_SECONDS))

    def _report_failure(self, lines: tuple[str, ...], failed: RankProcess | None = None) -> None:
        failure = RankFailure(
            self._me.host,
            self._me.member,
            rank=failed and failed.rank,
            local_rank=failed and failed.local_rank,
            exit_code=failed and failed.exit_code(),
            seconds=time.monotonic() - self._started,
            lines=lines,
        )
        self._coordinator.report_failure(self._world, failure)

    def _leave(self, code: int) -> None:
        """Report that this host was ended by a signal; the others continue, unless it serves the rendezvous."""
        how = f"ended by {signal_name(code - 128)}"
        if self._serving:
            self._end_job(JobOutcome(code, f"{self._me.host}, which serves the rendezvous, was {how}"))
            return
        if self._world >= 0:
            with contextlib.suppress(ConnectionLost):
                self._report_failure((how,))

    def _restart(self, reason: graceful_shutdown.Reason) -> None:
        """Stop this host's ranks, repeat the rendezvous, and start ranks again."""
        self._stop_reason = reason
        if self._made_progress():
            self._coordinator.report_progress(self._world)
        self._stop_ranks()
        self._start_world()

    def _made_progress(self) -> bool:
        if self._job.progress is not None:
            return self._job.progress()
        return time.monotonic() - self._started > _PROGRESS_SECONDS

    def _apply(self, agreement: WorldAgreement) -> None:
        """Log and carry out the agreement on the world that is about to begin."""
        self._world = agreement.restart
        if agreement.restart:
            self._restart_log.write(agreement)
        if agreement.decision.action == "end":
            raise JobEnded(failed_outcome(agreement))
        if not agreement.shrinks:
            return
        mine = agreement.shrinks == self._me.member
        if mine:
            self._me = HostMember(self._me.host, self._me.member, self._me.ranks - 1)
        if agreement.leaves:
            raise JobEnded(failed_outcome(agreement)) if mine else _RepeatRendezvous

    def _end_job(self, outcome: JobOutcome) -> None:
        """End the job on all hosts, including those that wait to join."""
        with contextlib.suppress(ConnectionLost):
            self._coordinator.end(outcome)


def run_host(job: JobSpec, logs: RankLogs, key: JobKey | None) -> None:
    """Join or serve the rendezvous and run this host's agent; errors as for `elastic_run.run_job`."""
    member = uuid.uuid4().hex
    if job.address is None:
        _run_agent(job, member, LocalCoordinator(job, member), logs, key=key, address="127.0.0.1")
        return
    server = _serve_if_local(job.address, key)
    try:
        if server is None:
            wait_for_server(job.address, job.timeouts.join, log_line)
        coordinator = RemoteCoordinator(job, member, job.address, key)
        address = reachable_address(job.address, serving=server is not None)
        _run_agent(job, member, coordinator, logs, key=key, address=address, serving=server is not None)
    except ConnectionLost as error:
        raise _store_lost(job.address, str(error)) from None
    finally:
        if server is not None:
            server.close()


def _run_agent(
    job: JobSpec,
    member: str,
    coordinator: Coordinator,
    logs: RankLogs,
    *,
    key: JobKey | None,
    address: str,
    serving: bool = False,
) -> None:
    try:
        coordinator.register()
        agent = ElasticAgent(job, member, coordinator, logs, key=key, address=address, serving=serving)
        try:
            agent.run()
        finally:
            _leave_job(coordinator, linger=serving)
    except JobEnded as ended:
        if ended.outcome.code:
            raise ended.outcome.error() from None
        log_line("the job ended well while this host waited to join")
    except JoinTimeout:
        raise too_few_hosts(job) from None
    finally:
        coordinator.close()


def _serve_if_local(address: RendezvousAddress, key: JobKey | None) -> RequestServer | None:
    """Serve the rendezvous if the address is local and not served yet; None: another process does."""
    if not is_local(address) or is_port_taken(address.port):
        return None
    check_port_free(address)
    try:
        return serve_jobs(address, key)
    except UsageError:  # another process on this host was faster
        return None


def _leave_job(coordinator: Coordinator, *, linger: bool) -> None:
    """Leave the job; the server of the rendezvous waits until the other hosts have read the outcome and left."""
    with contextlib.suppress(ConnectionLost):
        coordinator.leave()
        deadline = time.monotonic() + _LINGER_SECONDS
        while linger and coordinator.view().present and time.monotonic() < deadline:
            time.sleep(_LEAVE_POLL_SECONDS)


def _store_lost(address: RendezvousAddress, reason: str) -> WorldError:
    return WorldError(
        f"the rendezvous at {address} was lost: {reason}",
        remedy="its host has ended or is unreachable, and the job with it; "
        "served by a host that does not train (paceline run --serve), it outlives every host that does",
    )
