"""The watchdog's thread: five times per second it sends a heartbeat, receives those of others, and looks for failures.

receive → check local processes → send a heartbeat, report → attribute
                                                     failure: wait a moment for better evidence, then free the training
                                                     thread, raise in it, or end the process

[Note: own absence] While the thread could not run (Python's lock was held, the machine slept) it could not receive
either. That time does not count as silence of other ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import threading
import time
from collections.abc import Collection, Iterable

from paceline._core.processes.graceful_shutdown import ShutdownListener
from paceline.errors import PeerFailed
from paceline.health import abort_collectives, thread_probe
from paceline.health.aggregation.groups import PeerGroups
from paceline.health.attribution import Attribution, StallLimits
from paceline.health.failure_detector import HEARTBEAT_SECONDS, FailureDetector, suspicion_limits
from paceline.health.heartbeat import FailureNotice, Heartbeat, MalformedFrame, clip_text
from paceline.health.peer_mesh import PeerMesh
from paceline.health.pending_connections import CONNECT_SECONDS
from paceline.world.process_probe import LocalProcess

__all__ = ["MonitorThread"]

log = logging.getLogger("paceline.health")

_LEAST_SECONDS = 0.02  # between two turns, however much arrives
_QUIET_SECONDS = 0.5  # without a heartbeat of a rank on this host, before its process is checked
_ABSENCE_SECONDS = 1.0
_ACKNOWLEDGE_SECONDS = 1.0
_SHUTDOWN_SECONDS = 1.0  # wait for evidence of the reason after the launcher's request to exit
_LOG_SECONDS = 1.0  # for the training thread to raise the error, before it is logged


class MonitorThread:
    """The monitor of this rank.

    Args:
        mesh: its connections.
        groups: of the world.
        limits: time limits.
        leave_on_stall: whether a stall ends the training.
        warn: seconds of waiting after which a warning is logged.
        grace: seconds to free the training thread.
        shutdown: receives the launcher's request to exit.

    Attributes:
        detector: what is known of all ranks.
        error: the attributed failure; set together with the event `decided`.
        in_block: whether the training thread is inside the with-block, so that an exception raised in it ends there.
    """

    def __init__(
        self,
        mesh: PeerMesh,
        groups: PeerGroups,
        limits: StallLimits,
        *,
        leave_on_stall: bool,
        warn: float,
        grace: float,
        shutdown: ShutdownListener,
    ) -> None:
        self.mesh, self.own, self.endpoints = mesh, mesh.own, mesh.endpoints
        self.limits = suspicion_limits(limits, groups)
        self._grace = grace
        self._shutdown, self._shutdown_since, self._exiting = shutdown, 0.0, False
        self.error: PeerFailed | None = None
        self.decided = threading.Event()
        self._connected = threading.Event()  # by all peers, so that a notice reaches every one
        self.in_block = False
        self.detector = FailureDetector(mesh, groups, self.limits, leave_on_stall=leave_on_stall, warn=warn)
        mates = [self.endpoints[rank] for rank in groups.mates(self.own.rank)]
        self._local = {
            each.rank: LocalProcess(each.pid, each.start_ticks)
            for each in mates
            if each.host_key == self.own.host_key
        }
        self._stopped: tuple[int, ...] = ()
        self._probe = thread_probe.TrainingThreadProbe(self.own.thread_ident)
        self._sequence = 0
        self._dump_armed_at = self._heartbeat_sent_at = self._turned_at = 0.0
        self._failed_at, self._logged, self._raised = 0.0, False, False
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread, and wait until the peers of this rank are connected with it."""
        self.mesh.connect()
        self._thread.start()
        if self._connected.wait(CONNECT_SECONDS):
            return
        failures = {}
        for rank, text in self.mesh.missing().items():
            failures.setdefault(text or "they did not connect", []).append(rank)
        for text, ranks in failures.items():
            log.warning("ranks %s can't be watched by this rank: %s", ranks, text)

    # ------------------------------------------------------------------ called by the training thread

    def publish(self, notice: FailureNotice, *, wait: bool = False) -> None:
        """Send a notice to all ranks; with `wait`, return once all peers acknowledged it, or after a second."""
        with self._lock:
            self.detector.publish(notice)
        deadline = time.monotonic() + (_ACKNOWLEDGE_SECONDS if wait else 0.0)
        while time.monotonic() < deadline:
            with self._lock:
                missing = {link.rank for link in self.mesh.links.values() if link.state == "open"}
                missing -= self.detector.acknowledged.get(notice.key, set())
            if not missing or not self._thread.is_alive():
                return
            time.sleep(0.01)

    def attribute_now(self) -> PeerFailed | None:
        """Return the failure that the present evidence shows, after an error of a connection; None if it shows none."""
        with self._lock:
            failure = None if self.decided.is_set() else self.detector.attribute(urgent=True)
            if failure is not None:
                self._fail(failure)
        return self.error

    def slowest(self) -> tuple[int, float, float] | None:
        """Return the slowest rank, its seconds per step over the median of the others', and its seconds."""
        with self._lock:
            return self.detector.slowest()

    def close(self) -> None:
        """End the thread without a notice, and release everything."""
        self._closing.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        with contextlib.suppress(RuntimeError, ValueError):
            faulthandler.cancel_dump_traceback_later()
        if not self.decided.is_set():  # else this rank is about to end
            self._shutdown.done()
        with self._lock:
            self.mesh.flush()
            self.mesh.close()
            for process in self._local.values():
                process.close()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            pidfds = [each.pidfd for each in self._local.values() if each.pidfd >= 0]
            self._closing.wait(_LEAST_SECONDS)
            ended = self.mesh.wait(HEARTBEAT_SECONDS - _LEAST_SECONDS, pidfds)
            with self._lock:
                if self._closing.is_set():
                    return
                try:
                    self._turn(ended)
                except Exception:  # the training must not end because watching it failed
                    log.exception("the watchdog of rank %d failed and has stopped", self.own.rank)
                    return

    def _turn(self, ended: Collection[int] = ()) -> None:
        """Take one turn; `ended` are pidfds of processes that have ended."""
        now = time.monotonic()
        due = now - self._heartbeat_sent_at > 0.9 * HEARTBEAT_SECONDS
        # Stacks before heartbeats: those heartbeats that precede them have arrived then.
        dumps = list(self.mesh.stack_dumps()) if due else []
        absent = now - self._turned_at - HEARTBEAT_SECONDS if self._turned_at else 0.0
        self._turned_at = now
        if absent > _ABSENCE_SECONDS:  # see [Note: own absence]
            self.detector.ignore_absence(absent)
        for rank, message in self.mesh.receive():
            try:
                self.detector.receive(rank, message, now)
            except MalformedFrame as error:
                log.warning("rank %d sent a malformed message (%s): its connection is closed", rank, error)
                self.mesh.reject(rank)
        if not self._connected.is_set() and not self.mesh.missing() and not self.mesh.awaits_dump():
            self._arm_stack_dump(now)  # before training, whose first step may hold Python's lock
            self._connected.set()
        self._check_local_processes(now, ended)
        self._publish_stack_dumps(dumps)
        if due:
            self._heartbeat_sent_at = now
            self._send_heartbeat(now)
            self._arm_stack_dump(now)
        self.detector.report(now)
        if self.decided.is_set():
            self._enforce_exit(now)
        elif not self._exiting:
            self._detect(now)

    def _publish_stack_dumps(self, dumps: Iterable[tuple[int, str]]) -> None:
        for rank, text in dumps:
            stack = thread_probe.stack_in_dump(text, self.endpoints[rank].thread_ident)
            if stack:
                text = clip_text(f"(dumped without Python's lock)\n{stack}")
                sequence = self.detector.latest_sequence(rank)
                self.detector.publish(
                    FailureNotice("stack", rank, self.own.rank, name="dump", text=text, sequence=sequence)
                )

    def _check_local_processes(self, now: float, ended: Collection[int]) -> None:
        """Find stopped or ended processes among those of this host that ended or are silent."""
        stopped = []
        for rank, process in list(self._local.items()):
            if process.pidfd not in ended and now - self.detector.heard_at[rank] < _QUIET_SECONDS:
                continue
            state = process.state()
            if state == "stopped":
                stopped.append(rank)
            elif state == "gone":
                code = process.exit_code()
                process.close()
                del self._local[rank]
                last = self.detector.heartbeats.get(rank) or Heartbeat(rank, 0, phase="")
                place = {"step": last.step, "phase": last.task or last.phase, "bucket": last.bucket}
                self.detector.publish(FailureNotice("gone", rank, self.own.rank, code=code, **place))
        self._stopped = tuple(stopped)

    def _send_heartbeat(self, now: float) -> None:
        self._sequence += 1
        self.mesh.flush()
        self.detector.beat(self._probe.heartbeat(self.own.rank, self._sequence, self._stopped), now)

    def _arm_stack_dump(self, now: float) -> None:
        """Restart the timer after which faulthandler dumps all stacks: it expires if this thread can't run."""
        timeout = self.limits.dump
        if self.mesh.dump is None or now - self._dump_armed_at < timeout / 3:
            return
        self._dump_armed_at = now
        try:
            faulthandler.dump_traceback_later(timeout, file=self.mesh.dump.fileno())
        except (RuntimeError, ValueError, OSError):
            self.mesh.dump = None

    # ------------------------------------------------------------------ failures

    def _detect(self, now: float) -> None:
        request = self._shutdown.requested()
        self._shutdown_since = self._shutdown_since or (now if request else 0.0)
        failure = self.detector.detect(now, request)
        if failure is not None:
            self._fail(failure)
        elif self.detector.pending is None and (
            request == "changed" or (request and now - self._shutdown_since > _SHUTDOWN_SECONDS)
        ):  # let the launcher end this rank, without the others reporting it as failed
            self.detector.publish(self.detector.own_notice("leaves", name="the launcher requested the exit"))
            self._exiting = True
            self._shutdown.done()

    def _fail(self, failure: Attribution) -> None:
        """End this training because of `failure`, and free the training thread."""
        self.error = self.detector.error_of(failure)
        self._failed_at = time.monotonic()
        self.detector.publish(self.detector.own_notice("leaves", name=failure.kind))
        self.decided.set()
        abort_collectives.abort_groups(self.error)

    def _enforce_exit(self, now: float) -> None:
        """Raise in a training thread that does not end; end the process if it never moves."""
        assert self.error is not None, "decided"
        waited = now - self._failed_at
        if not self._logged and waited > min(_LOG_SECONDS, self._grace / 2):
            self._logged = True
            log.error("%s", self.error)
        if self.in_block and not self._raised and waited > self._grace / 2:
            self._raised = True
            abort_collectives.raise_in_thread(self.own.thread_ident, self.error)
        if waited > self._grace and self._probe.moved_at <= self._failed_at:
            abort_collectives.end_process(self.error)
