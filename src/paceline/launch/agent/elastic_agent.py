"""Elastic agent of one host: torch's agent, with its own rank processes, failure reports and end of the job.

torch's agent provides the rendezvous, the assignment of ranks and the order of start, restart and stop. This one adds:

1. Ranks get a parent-death signal, so nothing outlives the agent; the end of a rank is noticed at once.
2. A failure is reported in the job store at once, and the other agents restart on that report.
3. Before a world begins, the host that the rendezvous numbered 0 decides for all why the last one ended.
4. A host whose ranks have ended well waits for the others, and restarts with them if one of them fails.
5. Watched ranks shut down gracefully, so that none takes another one's end for a failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import uuid
from typing import Any

from torch.distributed import DistError, DistNetworkError, DistStoreError, Store
from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from paceline._core import graceful_shutdown
from paceline._core.child_process import stop_processes
from paceline._core.json_codec import decode, encode
from paceline._core.process_exit import signal_name
from paceline.errors import WorldError
from paceline.launch.agent.elastic_rendezvous import (
    STORE_TIMEOUT_SECONDS,
    ElasticRendezvous,
    RendezvousEndpoint,
    StoreHeartbeat,
    join_rendezvous,
    open_endpoint,
    open_job_store,
)
from paceline.launch.agent.first_failure import RankFailure, is_secondary
from paceline.launch.agent.job_spec import JobSpec
from paceline.launch.agent.job_store import JobStore, too_few_hosts
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
    start_rank,
    wait_for_exit,
)

__all__ = ["ElasticAgent", "run_host"]

_POLL_SECONDS = 0.1
_PROGRESS_SECONDS = 60.0  # ranks that ran so long made progress, unless the job defines it
_LINGER_SECONDS = 5.0  # the server of the rendezvous lets the others read the outcome


class _RepeatRendezvous(Exception):
    """This world must not begin, because a host leaves it first."""


class ElasticAgent(SimpleElasticAgent):
    """Runs this host's ranks of a job; :meth:`run` returns when the job has ended well.

    Args:
        job: to run.
        rendezvous: of its hosts.
        job_store: its shared state.
        logs: of the ranks.
        serving: whether the job ends with this host, because it serves the rendezvous.
    """

    def __init__(
        self,
        job: JobSpec,
        rendezvous: ElasticRendezvous,
        job_store: JobStore,
        logs: RankLogs,
        *,
        serving: bool,
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=job.ranks,
            entrypoint=sys.executable,
            args=tuple(job.argv),
            rdzv_handler=rendezvous,
            max_restarts=job.max_restarts,
            monitor_interval=_POLL_SECONDS,
        )
        super().__init__(spec)
        self._job, self._rendezvous_handler, self._job_store = job, rendezvous, job_store
        self._logs, self._serving = logs, serving
        self._restart_log = RestartLog(job.log_dir)
        self._me = HostMember(socket.gethostname(), uuid.uuid4().hex, job.ranks)
        self._running: list[RankProcess] = []
        self._world, self._started = -1, time.monotonic()
        self._changes, self._finished, self._ending = -1, False, False
        self._stop_reason: graceful_shutdown.Reason = "failed"

    @property
    def hosts(self) -> int:
        """Number of hosts of the latest world."""
        return self._worker_group.group_world_size or 1

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Start ranks, and restart them after each failure, until the job has ended."""
        try:
            self._initialize_workers(self._worker_group)  # type: ignore[call-arg] — torch's decorator hides its arguments
            while not self._poll():
                pass
        except KeyboardInterrupt:
            outcome = JobOutcome(130, f"interrupted on {self._me.host}", remedy="start it again to continue")
            self._end_job(outcome)
            raise
        except SystemExit as error:
            self._leave(int(error.code or 0))
            raise
        self._worker_group.state = WorkerState.SUCCEEDED
        return RunResult(WorkerState.SUCCEEDED, {one.global_rank: None for one in self._worker_group.workers})

    def _rendezvous(self, worker_group: WorkerGroup) -> None:  # type: ignore[override]
        """Repeat the rendezvous until a world can begin."""
        while True:
            try:
                super()._rendezvous(worker_group)  # type: ignore[call-arg] — torch's decorator hides its arguments
                return
            except _RepeatRendezvous:
                continue
            except DistNetworkError:
                raise
            except DistStoreError:  # a host was lost between joining and publishing itself
                continue
            except RendezvousTimeoutError:
                self._end_job(JobOutcome(1, str(too_few_hosts(self._job))))
                raise
            except (RendezvousClosedError, RendezvousGracefulExitError):
                outcome = self._job_store.outcome()
                if outcome is None:
                    raise
                raise JobEnded(outcome) from None

    def _assign_worker_ranks(  # type: ignore[override]
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Agree on how the job continues, then let torch number the ranks."""
        store.set(f"member/{group_rank}", json.dumps(encode(self._me)))
        if group_rank == 0:
            texts = store.multi_get([f"member/{number}" for number in range(group_world_size)])
            members = [decode(json.loads(text), HostMember, "member") for text in texts]
            agreement = self._job_store.agree(members, self._job)
            store.set("verdict", json.dumps(encode(agreement)))
        self._apply(decode(json.loads(store.get("verdict")), WorldAgreement, "verdict"))
        spec.local_world_size = self._me.ranks
        return super()._assign_worker_ranks(store, group_rank, group_world_size, spec)  # type: ignore[call-arg]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks of this host."""
        workers = worker_group.workers
        shared = {
            "GROUP_RANK": worker_group.group_rank,
            "GROUP_WORLD_SIZE": worker_group.group_world_size,
            "LOCAL_WORLD_SIZE": len(workers),
            "MASTER_ADDR": worker_group.master_addr,
            "MASTER_PORT": worker_group.master_port,
            "ROLE_NAME": worker_group.spec.role,
            "TORCHELASTIC_RESTART_COUNT": self._world,
            "TORCHELASTIC_MAX_RESTARTS": self._job.max_restarts,
            "TORCHELASTIC_RUN_ID": self._job.name,
            "TORCHELASTIC_USE_AGENT_STORE": self._rendezvous_handler.use_agent_store,
        }
        base = default_environment(len(workers)) | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"} | os.environ
        base.pop("PACELINE_INIT_METHOD", None)  # of an outer launcher: it would override the store
        base |= self._job.env
        self._started, self._finished, self._ending = time.monotonic(), False, False
        self._running = []
        for worker in workers:
            shutdown_file = self._logs.shutdown_file(worker.local_rank)
            shutdown_file.unlink(missing_ok=True)
            own = {
                "RANK": worker.global_rank,
                "LOCAL_RANK": worker.local_rank,
                "WORLD_SIZE": worker.world_size,
                "ROLE_RANK": worker.global_rank,
                "ROLE_WORLD_SIZE": worker.world_size,
                graceful_shutdown.VARIABLE: shutdown_file,
            }
            env = base | {name: str(value) for name, value in (shared | own).items()}
            log = self._logs.path(worker.global_rank, self._world)
            self._running.append(
                start_rank(self._job.argv, env, worker.global_rank, worker.local_rank, log, follow=True)
            )
        return {one.local_rank: one.process.pid for one in self._running}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
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

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 0.0) -> None:
        stop_processes(self._running, self._job.timeouts.end)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        raise AssertionError("_poll monitors the ranks")

    def _poll(self) -> bool:
        """Wait briefly for an event, handle it, and return whether the job has ended well."""
        wait_for_exit(self._running, _POLL_SECONDS)
        codes = [one.exit_code() for one in self._running]
        if any(codes):
            self._report_failures()
            self._restart()
            return False
        if not self._finished and all(code == 0 for code in codes):
            self._finished = True
            if self._job_store.report_finished(self._world) == self._worker_group.group_world_size:
                self._end_job(JobOutcome(0))
        changes = self._job_store.change_count()
        if changes != self._changes:
            outcome = self._job_store.outcome()
            if outcome is not None:
                if outcome.code:
                    raise JobEnded(outcome)
                return True
            self._ending = self._job_store.finished_hosts(self._world) > 0
            if self._job_store.has_failed(self._world):
                self._restart()
            self._changes = changes
        elif self._job.hosts > 1 and (reason := self._membership_change()):
            self._restart(reason)
        return False

    def _membership_change(self) -> graceful_shutdown.Reason | None:
        """Return why the world must restart: a host was lost, or one waits to join while no ranks have ended."""
        waiting = self._rendezvous_handler.has_waiting_hosts()
        if self._rendezvous_handler.has_lost_hosts():
            return "failed"
        return "changed" if waiting and self._job.rejoin and not self._ending else None

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
            if left <= 0 or not all(is_secondary(one) for one in self._job_store.failures(self._world)):
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
        self._job_store.report_failure(self._world, failure)

    def _leave(self, code: int) -> None:
        """Report that this host was ended by a signal; the others continue, unless it serves the rendezvous."""
        how = f"ended by {signal_name(code - 128)}"
        if self._serving:
            self._end_job(JobOutcome(code, f"{self._me.host}, which serves the rendezvous, was {how}"))
            return
        with contextlib.suppress(DistError):
            self._report_failure((how,))

    def _restart(self, reason: graceful_shutdown.Reason = "failed") -> None:
        """Stop this host's ranks, repeat the rendezvous, and start ranks again."""
        self._stop_reason = reason
        if self._made_progress():
            self._job_store.report_progress(self._world)
        self._restart_workers(self._worker_group)  # type: ignore[call-arg] — torch's decorator hides its arguments

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
            outcome = failed_outcome(agreement)
            self._end_job(outcome)
            raise JobEnded(outcome)
        if not agreement.shrinks:
            return
        mine = agreement.shrinks == self._me.member
        if mine:
            self._me = HostMember(self._me.host, self._me.member, self._me.ranks - 1)
        if agreement.leaves:
            raise JobEnded(failed_outcome(agreement)) if mine else _RepeatRendezvous

    def _end_job(self, outcome: JobOutcome) -> None:
        """End the job on all hosts, including those that wait to join."""
        with contextlib.suppress(DistError):
            self._job_store.end(outcome)
            self._rendezvous_handler.shutdown()

    def kill(self) -> None:
        """Kill the ranks of this host at once."""
        for one in self._running:
            one.signal_group(signal.SIGKILL)


def run_host(job: JobSpec, logs: RankLogs) -> None:
    """Join or serve the rendezvous and run this host's agent; errors as for `elastic_run.run_job`."""
    endpoint = open_endpoint(job)
    serving = endpoint.served is not None
    try:
        job_store = open_job_store(job, endpoint)
        job_store.register(job)
        rendezvous = join_rendezvous(job, endpoint, endpoint.connect(), late=job_store.has_started())
        agent = ElasticAgent(job, rendezvous, job_store, logs, serving=serving)
        heartbeat = (
            None if serving else StoreHeartbeat(endpoint, lambda: _exit_after_loss(endpoint, agent, logs))
        )
        try:
            agent.run()
        finally:
            if heartbeat:
                heartbeat.stop()
            _leave_store(job_store, agent.hosts if serving else 0)
    except JobEnded as ended:
        if ended.outcome.code:
            raise ended.outcome.error() from None
        log_line("the job ended well while this host waited to join")
    except RendezvousTimeoutError:
        raise too_few_hosts(job) from None
    except (DistError, RendezvousConnectionError) as error:
        raise _store_lost(endpoint, str(error.__cause__ or error).splitlines()[0]) from None


def _leave_store(job_store: JobStore, hosts: int) -> None:
    """Leave the store; its server waits until `hosts` hosts have read the outcome and left."""
    with contextlib.suppress(DistError):
        job_store.report_left()
        deadline = time.monotonic() + _LINGER_SECONDS
        while time.monotonic() < deadline and job_store.left_hosts() < hosts:
            time.sleep(0.05)


def _store_lost(endpoint: RendezvousEndpoint, reason: str) -> WorldError:
    return WorldError(
        f"the rendezvous at {endpoint.address} was lost: {reason}",
        remedy="its host has ended or is unreachable, and the job with it; "
        "served by a host that does not train (paceline run --serve), it outlives every host that does",
    )


def _exit_after_loss(endpoint: RendezvousEndpoint, agent: ElasticAgent, logs: RankLogs) -> None:
    """End this process, whose main thread is blocked by the lost store."""
    agent.kill()
    log_line(f"Error: {_store_lost(endpoint, f'no answer for {STORE_TIMEOUT_SECONDS} s')}")
    logs.__exit__(None, None, None)
    os._exit(1)
