"""Elastic agent of one host: runs its ranks, and takes part in the agreements of all hosts of the job.

1. Ranks get a parent-death signal, so nothing outlives the agent; the end of a rank is noticed at once.
2. A failure is reported to the coordinator at once, and the other agents restart on that report.
3. Before a world begins, the coordinator decides for all hosts why the last one ended (`restart_policy`).
4. A host whose ranks have ended well waits for the others, and restarts with them if one of them fails.
5. Watched ranks shut down gracefully, so that none takes another one's end for a failure.
6. Ranks that can recover in place go on when others end, leave or join (`live_recovery`); no world begins for that.
7. A warning to the agent (SIGTERM, SIGUSR1) is passed on to its ranks, which have time to save and leave.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
import uuid
from functools import partial

from paceline._core.format import plural
from paceline._core.job_key import JobKey
from paceline._core.processes import graceful_shutdown
from paceline._core.processes.process_exit import signal_name
from paceline._core.processes.warning_signals import WarnedExit, WarningSignals
from paceline.errors import UsageError, WorldError
from paceline.launch.agent.coordinator import Coordinator, JoinTimeout, LocalCoordinator, too_few_hosts
from paceline.launch.agent.first_failure import RankFailure, is_secondary
from paceline.launch.agent.host_ranks import HostRank, HostRanks
from paceline.launch.agent.job_server import serve_jobs
from paceline.launch.agent.job_spec import JobSpec
from paceline.launch.agent.live_recovery import LiveRecovery
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
from paceline.launch.process.rank_process import wait_for_exit
from paceline.world.live_file import LEFT_EXIT_CODE
from paceline.world.store.request_client import ConnectionLost
from paceline.world.store.request_server import RequestServer

__all__ = ["ElasticAgent", "run_host"]

_POLL_SECONDS = 0.1
_LEAVE_POLL_SECONDS = 0.05
_IDLE_SECONDS = 5.0  # without any event
_LIVE_POLL_SECONDS = 1.0  # the same, if the files of live ranks are to be seen
_PROGRESS_SECONDS = 60.0  # ranks that ran so long made progress, unless the job defines it
_LINGER_SECONDS = 5.0  # the server of the rendezvous lets the others read the outcome


class _RepeatRendezvous(Exception):
    """This world must not begin, because a host leaves it first."""


class _JobWarned(JobEnded):
    """The job ends on all hosts, whose ranks may save first."""


class ElasticAgent:
    """Runs this host's ranks of a job; :meth:`run` returns when the job has ended well.

    Args:
        job: to run.
        member: id of this agent.
        coordinator: of the job's hosts.
        logs: of the ranks.
        key: of the job; None: several hosts do without.
        warnings: of this process; they raise `WarnedExit`.
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
        warnings: WarningSignals,
        address: str,
        serving: bool,
    ) -> None:
        self._job, self._coordinator, self._warnings = job, coordinator, warnings
        self._address, self._serving = address, serving
        self._restart_log = RestartLog(job.log_dir)
        self._me = HostMember(socket.gethostname(), member, job.ranks)
        self._ranks = HostRanks(job, member, logs, key)
        self._live = LiveRecovery(job, coordinator, self._ranks, logs, self._restart_log, key)
        self._world, self._started = -1, time.monotonic()
        self._finished = self._leaving = False

    def run(self) -> None:
        """Start ranks, and restart them after each failure, until the job has ended."""
        try:
            self._start_world()
            while not self._poll():
                pass
        except KeyboardInterrupt:
            self._warnings.note_warning()
            text, remedy = f"interrupted on {self._me.host}", "start it again to continue"
            self._end_job(JobOutcome(130, text, remedy=remedy, warning=signal.SIGTERM))
            self._leave_after(signal.SIGTERM, "interrupted")
            raise
        except WarnedExit as warned:
            if code := self._leave_after(warned.number, f"warned by {signal_name(warned.number)}"):
                raise SystemExit(code) from None
        except _JobWarned as warned:
            code = self._leave_after(warned.outcome.warning, warned.outcome.text)
            if code:
                raise JobEnded(warned.outcome) if warned.outcome.code == 130 else SystemExit(code) from None
        except SystemExit as error:
            self._leave(int(error.code or 0))
            raise
        finally:
            self._ranks.terminate(at_once=self._leaving)

    def _start_world(self) -> None:
        """Repeat the rendezvous until a world can begin, and start this host's ranks of it."""
        while True:
            try:
                plan = self._coordinator.join(self._me, self._address, free_port())
                self._world = plan.agreement.restart
                if plan.joiner:
                    log_line(f"this host joins the running world with {plural(self._me.ranks, 'rank')}")
                else:
                    self._apply(plan.agreement)
            except _RepeatRendezvous:
                continue
            except JoinTimeout:
                if self._world >= 0:
                    self._end_job(JobOutcome(1, str(too_few_hosts(self._job))))
                raise
            break
        self._started, self._finished = time.monotonic(), False
        self._ranks.start(plan)
        self._live.begin(joiner=plan.joiner)

    def _poll(self) -> bool:
        """Wait for an event, handle it, and return whether the job has ended well."""
        if not self._ranks.failed():
            seconds = _LIVE_POLL_SECONDS if self._live.enabled else _IDLE_SECONDS
            self._coordinator.wait(self._ranks.processes, seconds)
        if self._ranks.failed() and not self._live.handle_ended(self._me):
            self._report_failures()
            if self._coordinator.view().outcome is None:
                self._restart("failed")
                return False
        self._live.report()
        ended_well = self._ranks.have_ended_well()
        if ended_well and not self._finished:
            self._coordinator.report_finished(self._world)
        self._finished = ended_well
        view = self._coordinator.view()
        if view.outcome is not None:
            if view.outcome.warning:
                self._warnings.note_warning()  # a signal that this host gets too must not end its ranks
                raise _JobWarned(view.outcome)
            if view.outcome.code:
                raise JobEnded(view.outcome)
            return True
        if view.world < self._world:
            return False  # it is older than this world
        self._live.log_changes(view, self._me)
        gone = not view.member or view.world > self._world  # the others continued without this host
        if gone or view.failed or view.lost:
            self._restart("failed")
        elif view.waiting and self._job.rejoin and not view.finished:
            self._restart("changed")
        return False

    def _report_failures(self) -> None:
        """Report the failed ranks of this host; if all of them lost a peer, wait briefly for that peer's end."""
        self._report_unrecovered()
        reported: set[HostRank] = set()
        deadline = time.monotonic() + self._job.timeouts.follow
        while True:
            for one in self._ranks.failed():
                if one not in reported:
                    reported.add(one)
                    self._coordinator.report_failure(self._world, one.failure(self._me))
            left = deadline - time.monotonic()
            if left <= 0 or not all(is_secondary(one) for one in self._coordinator.failures(self._world)):
                return
            processes = self._ranks.processes
            if all(one.exit_code() is not None for one in processes):
                return
            wait_for_exit(processes, min(left, _POLL_SECONDS))

    def _report_unrecovered(self) -> None:
        """Report the ranks without which the others have tried to go on, in vain."""
        for failure in self._live.unrecovered():
            self._coordinator.report_failure(self._world, failure)

    def _leave_after(self, number: int, how: str) -> int:
        """Pass a warning on to this host's ranks, wait until they have left, and return the exit code."""
        self._leaving = True
        if self._serving:
            text = f"{self._me.host}, which serves the rendezvous, was {how}"
            self._end_job(JobOutcome(128 + number, text, warning=number))
        running, seconds = sum(one.runs for one in self._ranks.present), self._job.timeouts.leave
        if self._world < 0:
            return 128 + number
        if not running and not self._ranks.have_ended_well():
            code = self._ranks.exit_code_after(number)
            return code if code == LEFT_EXIT_CODE else 128 + number
        ranks = plural(running, "rank")
        log_line(f"{how}; {ranks} may save and leave within {seconds:g} s, a second signal ends all at once")
        self._ranks.warn(number)
        deadline = time.monotonic() + seconds
        while not self._have_left() and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(ConnectionLost):
                self._coordinator.wait(self._ranks.processes, min(left, _LIVE_POLL_SECONDS))
                self._coordinator.view()
                self._live.mark_ended()
        for one in self._ranks.present:
            if one.process.exit_code() not in (0, LEFT_EXIT_CODE):
                log_line(f"{one.failure(self._me)}" if not one.runs else f"rank {one.process.rank} is ended")
        code = self._ranks.exit_code_after(number)
        with contextlib.suppress(ConnectionLost):
            if not self._serving and not (self._live.enabled and self._coordinator.view().live):
                self._report_loss(how)
        return code

    def _have_left(self) -> bool:
        """Return whether all ranks of this host have ended; if all did well, whether the job is over."""
        if any(one.runs for one in self._ranks.present):
            return False
        if not self._ranks.have_ended_well():
            return True
        if not self._finished:
            self._coordinator.report_finished(self._world)
            self._finished = True
        view = self._coordinator.view()
        return view.outcome is not None or view.failed or view.lost

    def _leave(self, code: int) -> None:
        """End this host's ranks after a signal; the others continue, unless this host serves the rendezvous."""
        how = f"ended by {signal_name(code - 128)}"
        if self._serving:
            self._end_job(JobOutcome(code, f"{self._me.host}, which serves the rendezvous, was {how}"))
            return
        if self._world < 0:
            return
        with contextlib.suppress(ConnectionLost):
            if self._live.enabled and self._coordinator.view().live:
                self._live.leave()
                return
            self._report_loss(how)

    def _report_loss(self, how: str) -> None:
        """Report that the others have to continue without this host."""
        seconds = time.monotonic() - self._started
        failure = RankFailure(self._me.host, self._me.member, seconds=seconds, lines=(how,))
        self._coordinator.report_failure(self._world, failure)

    def _restart(self, reason: graceful_shutdown.Reason) -> None:
        """Stop this host's ranks, repeat the rendezvous, and start ranks again."""
        if reason == "failed":
            self._report_unrecovered()
        if self._made_progress():
            self._coordinator.report_progress(self._world)
        self._ranks.stop(reason)
        self._start_world()

    def _made_progress(self) -> bool:
        if self._job.progress is not None:
            return self._job.progress()
        return time.monotonic() - self._started > _PROGRESS_SECONDS

    def _apply(self, agreement: WorldAgreement) -> None:
        """Log and carry out the agreement on the world that is about to begin."""
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


def run_host(job: JobSpec, logs: RankLogs, key: JobKey | None, warnings: WarningSignals) -> None:
    """Join or serve the rendezvous and run this host's agent; errors as for `elastic_run.run_job`.

    Args:
        job: to run.
        logs: of the ranks.
        key: of the job; None: several hosts do without.
        warnings: of this process; they raise `WarnedExit`.
    """
    member = uuid.uuid4().hex
    run_agent = partial(_run_agent, job, member, logs=logs, key=key, warnings=warnings)
    if job.address is None:
        run_agent(LocalCoordinator(job, member), address="127.0.0.1", serving=False)
        return
    server = _serve_if_local(job.address, key)
    try:
        if server is None:
            wait_for_server(job.address, job.timeouts.join, log_line)
        coordinator = RemoteCoordinator(job, member, job.address, key)
        address = reachable_address(job.address, serving=server is not None)
        run_agent(coordinator, address=address, serving=server is not None)
    except ConnectionLost as error:
        raise _store_lost(job.address, str(error)) from None
    finally:
        if server is not None:
            server.close()


def _run_agent(
    job: JobSpec,
    member: str,
    coordinator: Coordinator,
    *,
    logs: RankLogs,
    key: JobKey | None,
    warnings: WarningSignals,
    address: str,
    serving: bool,
) -> None:
    try:
        coordinator.register()
        agent = ElasticAgent(
            job, member, coordinator, logs, key=key, warnings=warnings, address=address, serving=serving
        )
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
