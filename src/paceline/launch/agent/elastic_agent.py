"""The agent of one host: torch's elastic agent, with its ranks, its looks at the others and its end in our hands.

torch's agent brings the rendezvous, the assignment of ranks and the order of start, restart and stop. Ours are:

1. Ranks are processes on a leash, so nothing outlives the agent; a rank's end is noticed as it happens.
2. Whoever sees a failure tells it on the board, at once; the others restart at that word, not when they fail too.
3. Before a world begins, the host that the rendezvous numbered 0 judges why the last one ended, for all of them.
4. A host whose ranks have ended well waits for the others, and restarts with them if one of them fails.
5. Ranks that are watched leave by themselves, so that none takes another one's end for a failure.
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
from dataclasses import asdict
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
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from paceline._core import graceful_shutdown
from paceline._core.child_process import end
from paceline._core.cpu_cores import usable_cores
from paceline._core.process_exit import signal_name
from paceline.launch.agent.elastic_rendezvous import ElasticRendezvous
from paceline.launch.agent.job_outcome import JobOutcome, failed_outcome
from paceline.launch.agent.job_spec import JobSpec
from paceline.launch.agent.job_store import JobStore, too_few_hosts
from paceline.launch.agent.rank_failure import RankFailure, is_secondary
from paceline.launch.agent.restart_log import RestartLog
from paceline.launch.agent.world_agreement import HostMember, WorldAgreement
from paceline.launch.process.rank_process import RankLogs, RankProcess, start_rank, wait_for_exit

__all__ = ["ElasticAgent", "JobEnded"]

_LOOK_SECONDS = 0.1
_STEADY_SECONDS = 60.0  # ranks that ran so long count as having got on, where nobody knows better


class JobEnded(Exception):
    """The run has ended on all hosts."""

    def __init__(self, over: JobOutcome) -> None:
        super().__init__(over.text)
        self.over = over


class _Again(Exception):
    """This world is not to begin: a host leaves it first."""


class ElasticAgent(SimpleElasticAgent):
    """Runs the ranks of this host as part of a run; :meth:`run` returns when the run has ended well.

    Args:
        job: what is to be run.
        meeting: the rendezvous.
        board: what the hosts of the run tell each other.
        logs: where ranks write.
        serving: whether the run ends with this host, since it serves the rendezvous.
    """

    def __init__(
        self, job: JobSpec, meeting: ElasticRendezvous, board: JobStore, logs: RankLogs, *, serving: bool
    ) -> None:
        spec = WorkerSpec(
            role="rank",
            local_world_size=job.ranks,
            entrypoint=sys.executable,
            args=tuple(job.argv),
            rdzv_handler=meeting,
            max_restarts=job.max_restarts,
            monitor_interval=_LOOK_SECONDS,
        )
        super().__init__(spec)
        self._job, self._meeting, self._board, self._logs = job, meeting, board, logs
        self._serving = serving
        self._journal = RestartLog(job.log_dir)
        self._me = HostMember(socket.gethostname(), uuid.uuid4().hex, job.ranks)
        self._running: list[RankProcess] = []
        self._number, self._started = -1, time.monotonic()
        self._news, self._finished, self._ending = -1, False, False
        self._reason: graceful_shutdown.Reason = "failed"

    @property
    def hosts(self) -> int:
        """How many hosts there are in the latest world."""
        return self._worker_group.group_world_size or 1

    # What torch's agent does by itself: run, the rendezvous, restarts. What it asks of us follows.

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Start ranks, and again after each failure, until the run is over."""
        try:
            self._initialize_workers(self._worker_group)  # type: ignore[call-arg] — torch's decorator hides its arguments
            while not self._look():
                pass
        except KeyboardInterrupt:
            self._end_run(JobOutcome(130, f"interrupted on {self._me.host}", remedy="start it anew to go on"))
            raise
        except SystemExit as error:
            self._leave(int(error.code or 0))
            raise
        self._worker_group.state = WorkerState.SUCCEEDED
        return RunResult(WorkerState.SUCCEEDED, {one.global_rank: None for one in self._worker_group.workers})

    def _rendezvous(self, worker_group: WorkerGroup) -> None:  # type: ignore[override]
        """Meet the others, as often as it takes until a world can begin."""
        while True:
            try:
                super()._rendezvous(worker_group)  # type: ignore[call-arg] — torch's decorator hides its arguments
                return
            except _Again:
                continue
            except DistNetworkError:
                raise
            except DistStoreError:  # a host was lost between joining and telling so
                continue
            except RendezvousTimeoutError:
                self._end_run(JobOutcome(1, str(too_few_hosts(self._job))))
                raise
            except (RendezvousClosedError, RendezvousGracefulExitError):
                over = self._board.over()
                if over is None:
                    raise
                raise JobEnded(over) from None

    def _assign_worker_ranks(  # type: ignore[override]
        self, store: Store, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Agree on how the run goes on, then have torch number the ranks."""
        store.set(f"member/{group_rank}", json.dumps(asdict(self._me)))
        if group_rank == 0:
            told = store.multi_get([f"member/{number}" for number in range(group_world_size)])
            members = [HostMember(**json.loads(text)) for text in told]
            verdict = self._board.judge(members, self._job)
            store.set("verdict", json.dumps(verdict.to_json()))
        verdict = WorldAgreement.from_json(json.loads(store.get("verdict")))
        self._obey(verdict)
        spec.local_world_size = self._me.ranks
        return super()._assign_worker_ranks(store, group_rank, group_world_size, spec)  # type: ignore[call-arg]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks of this host."""
        workers = worker_group.workers
        names = {
            "GROUP_RANK": worker_group.group_rank,
            "GROUP_WORLD_SIZE": worker_group.group_world_size,
            "LOCAL_WORLD_SIZE": len(workers),
            "MASTER_ADDR": worker_group.master_addr,
            "MASTER_PORT": worker_group.master_port,
            "ROLE_NAME": worker_group.spec.role,
            "TORCHELASTIC_RESTART_COUNT": self._number,
            "TORCHELASTIC_MAX_RESTARTS": self._job.max_restarts,
            "TORCHELASTIC_RUN_ID": self._job.name,
            "TORCHELASTIC_USE_AGENT_STORE": self._meeting.use_agent_store,
        }
        self._started, self._finished, self._ending = time.monotonic(), False, False
        self._running = []
        for worker in workers:
            own = {
                "RANK": worker.global_rank,
                "LOCAL_RANK": worker.local_rank,
                "WORLD_SIZE": worker.world_size,
                "ROLE_RANK": worker.global_rank,
                "ROLE_WORLD_SIZE": worker.world_size,
            }
            leave_file = self._logs.leave_file(worker.local_rank)
            leave_file.unlink(missing_ok=True)
            env = self._environment(len(workers)) | {
                name: str(value)
                for name, value in (names | own | {graceful_shutdown.VARIABLE: leave_file}).items()
            }
            log = self._logs.of(worker.global_rank, self._number)
            self._running.append(
                start_rank(self._job.argv, env, worker.global_rank, worker.local_rank, log, follow=True)
            )
        return {one.local_rank: one.process.pid for one in self._running}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        files = {one.rank: self._logs.leave_file(one.local_rank) for one in self._running}
        for file in files.values():
            graceful_shutdown.request_shutdown(file, self._reason)
        deadline = time.monotonic() + self._job.timeouts.leave
        while (left := deadline - time.monotonic()) > 0:
            there = [one for one in self._running if one.exit_code() is None]
            if not any(graceful_shutdown.is_listening(files[one.rank]) for one in there):
                break
            wait_for_exit(there, min(left, _LOOK_SECONDS))
        end(self._running, self._job.timeouts.end)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 0.0) -> None:
        end(self._running, self._job.timeouts.end)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        raise AssertionError("our own loop looks at the ranks")

    # Looking at this host's ranks and at the others.

    def _look(self) -> bool:
        """Wait a moment for something to happen, do what it asks for, and return whether the run has ended well."""
        wait_for_exit(self._running, _LOOK_SECONDS)
        codes = [one.exit_code() for one in self._running]
        if any(codes):
            self._tell_failures()
            self._restart()
            return False
        if not self._finished and all(code == 0 for code in codes):
            self._finished = True
            if self._board.finish(self._number) == self._worker_group.group_world_size:
                self._end_run(JobOutcome(0))
        news = self._board.news()
        if news != self._news:
            over = self._board.over()
            if over is not None:
                return self._end(over)
            self._ending = self._board.finished(self._number) > 0
            if self._board.failed(self._number):
                self._restart()
            self._news = news
        elif self._job.hosts > 1 and (reason := self._world_changed()):
            self._restart(reason)
        return False

    def _end(self, over: JobOutcome) -> bool:
        if over.code:
            raise JobEnded(over)
        return True

    def _world_changed(self) -> graceful_shutdown.Reason | None:
        """Return whether a host was lost, or one is to be let in: not while ranks end well already."""
        newcomers = self._meeting.newcomers()
        if self._meeting.broken():
            return "failed"
        return "changed" if newcomers and self._job.rejoin and not self._ending else None

    def _tell_failures(self) -> None:
        """Tell which ranks of this host failed; if all of them lost a peer, wait a little for that one's end."""
        told: set[int] = set()
        deadline = time.monotonic() + self._job.timeouts.follow
        while True:
            failed = [one for one in self._running if one.exit_code() and one.rank not in told]
            failed.sort(key=lambda one: (one.exit_code() or 0, one.rank))  # those that signals ended first
            failures = [self._failure(one) for one in failed]
            for failure in failures:
                told.add(failure.rank or 0)
                self._board.fail(self._number, failure)
            left = deadline - time.monotonic()
            if left <= 0 or not all(is_secondary(one) for one in self._board.failures(self._number)):
                return
            if all(one.exit_code() is not None for one in self._running):
                return
            wait_for_exit(self._running, min(left, _LOOK_SECONDS))

    def _failure(self, one: RankProcess) -> RankFailure:
        return RankFailure(
            self._me.host,
            self._me.member,
            one.rank,
            one.local_rank,
            one.exit_code(),
            time.monotonic() - self._started,
            one.tail(),
        )

    def _leave(self, code: int) -> None:
        """Tell that this host was asked to end; the others go on without it, unless it serves the rendezvous."""
        how = f"asked to end ({signal_name(code - 128)})"
        if self._serving:
            self._end_run(JobOutcome(code, f"{self._me.host}, which serves the rendezvous, was {how}"))
            return
        seconds = time.monotonic() - self._started
        with contextlib.suppress(DistError):
            self._board.fail(
                self._number, RankFailure(self._me.host, self._me.member, seconds=seconds, lines=(how,))
            )

    # Agreeing with the others.

    def _restart(self, reason: graceful_shutdown.Reason = "failed") -> None:
        """Stop this host's ranks, meet the others, and start ranks again."""
        self._reason = reason
        if self._got_on():
            self._board.advance(self._number)
        self._restart_workers(self._worker_group)  # type: ignore[call-arg] — torch's decorator hides its arguments

    def _got_on(self) -> bool:
        if self._job.progress is not None:
            return self._job.progress()
        return time.monotonic() - self._started > _STEADY_SECONDS

    def _obey(self, verdict: WorldAgreement) -> None:
        """Note the verdict on the world that is about to begin, and do what it says."""
        self._number = verdict.restart
        if verdict.restart:
            self._journal.restarted(verdict)
        if verdict.decision.action == "end":
            over = failed_outcome(verdict)
            self._end_run(over)
            raise JobEnded(over)
        if verdict.shrinks:
            self._shrink(verdict)

    def _shrink(self, verdict: WorldAgreement) -> None:
        """Run one rank fewer where a rank failed again and again; a host that is left with none leaves the run."""
        mine = verdict.shrinks == self._me.member
        if mine:
            self._me = HostMember(self._me.host, self._me.member, self._me.ranks - 1)
        if verdict.leaves:
            raise JobEnded(failed_outcome(verdict)) if mine else _Again

    def _end_run(self, over: JobOutcome) -> None:
        """End the run on all hosts, also on those that wait to be let in."""
        with contextlib.suppress(DistError):
            self._board.end(over)
            self._meeting.shutdown()

    def _environment(self, ranks: int) -> dict[str, str]:
        threads = str(max(1, int(usable_cores() / ranks)))
        env = {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
        env |= os.environ
        env.pop("PACELINE_INIT_METHOD", None)  # of an outer launcher: it would beat the place to meet
        return env | dict(self._job.env)

    def kill(self) -> None:
        """Kill the ranks of this host at once."""
        for one in self._running:
            one.signal_group(signal.SIGKILL)
