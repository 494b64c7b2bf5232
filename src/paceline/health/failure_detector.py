"""Collects what this rank knows of all ranks, and decides when it amounts to a failure."""

from __future__ import annotations

import dataclasses
import logging
import time

from paceline._core.graceful_shutdown import Reason
from paceline._core.step_state import step_state
from paceline.errors import PeerFailed
from paceline.health import thread_probe
from paceline.health.attribution import (
    Attribution,
    RankObservation,
    StallLimits,
    attribute_failure,
    find_late_rank,
)
from paceline.health.failure_text import failure_headline, peer_failed
from paceline.health.heartbeat import FailureNotice, Heartbeat, NoticeKind
from paceline.health.peer_mesh import PeerMesh
from paceline.health.straggler import StepTimes

__all__ = ["SETTLE_SECONDS", "FailureDetector"]

log = logging.getLogger("paceline.health")

SETTLE_SECONDS = {True: 0.25, False: 0.5}
"""Wait for better evidence, by whether the attribution is certain."""

_STACK_SECONDS = 5.0  # between two stacks that a rank sends of itself
_STALLS = ("stopped", "held", "stalled", "finished", "elsewhere")


class FailureDetector:
    """Evidence and decisions of one rank's monitor.

    Args:
        mesh: connections to the other ranks.
        limits: time limits.
        leave_on_stall: whether a stall is a failure; else it is logged.
        warn: seconds of waiting after which a warning is logged.

    Attributes:
        heartbeats: the latest of each rank.
        heard_at: ``time.monotonic()`` when they arrived; at first, when this object was made.
        dumped: ranks that wrote their stacks without Python's lock since their latest heartbeats.
        step_times: working seconds per step of each rank.
        pending: a failure that waits for better evidence, and since when.
    """

    def __init__(self, mesh: PeerMesh, limits: StallLimits, *, leave_on_stall: bool, warn: float) -> None:
        self._mesh, self._limits = mesh, limits
        self._leave_on_stall, self._warn_seconds = leave_on_stall, warn
        self.heartbeats: dict[int, Heartbeat] = {}
        self.heard_at = {endpoint.rank: time.monotonic() for endpoint in mesh.endpoints}
        self.dumped: set[int] = set()
        self.step_times = StepTimes()
        self.pending: tuple[Attribution, float] | None = None
        self._notices: dict[tuple[str, ...], tuple[FailureNotice, float]] = {}
        self._warned: set[tuple[int | None, int]] = set()
        self._stack_sent_at = 0.0

    # ------------------------------------------------------------------ evidence

    def add_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Record a heartbeat if it is newer than the known one."""
        rank, known = heartbeat.rank, self.heartbeats.get(heartbeat.rank)
        if known is not None and heartbeat.sequence <= known.sequence:
            return
        self.heartbeats[rank], self.heard_at[rank] = heartbeat, now
        if rank in self.dumped:
            self.dumped.discard(rank)
            self._mesh.discard_dump(rank)
        if heartbeat.sees_waiting:
            self.step_times.add(rank, heartbeat.rounds, heartbeat.busy_seconds)

    def publish(self, notice: FailureNotice) -> bool:
        """Record a notice and forward it to all peers; return whether it is new."""
        if notice.key in self._notices or len(self._notices) > 8 * len(self.heard_at) + 100:
            return False
        self._notices[notice.key] = notice, time.monotonic()
        if notice.kind == "stack" and notice.name == "dump":
            self.dumped.add(notice.rank)
        self._mesh.send(notice.message())
        return True

    def own_notice(self, kind: NoticeKind, *, name: str = "", text: str = "") -> FailureNotice:
        """Return a notice of this rank about itself, with its present state."""
        rank, phase = self._mesh.own.rank, step_state.task or step_state.phase
        place = {"step": step_state.step, "phase": phase, "bucket": step_state.bucket}
        return FailureNotice(kind, rank, rank, name=name, text=text, **place)

    def ignore_absence(self, seconds: float) -> None:
        """Shift all arrival times: for so long this rank could not receive."""
        self.heard_at = {rank: heard + seconds for rank, heard in self.heard_at.items()}

    def snapshot(self) -> tuple[list[RankObservation], list[FailureNotice]]:
        """Return what is known of each rank, and all notices with their present age."""
        now = time.monotonic()
        notices = [dataclasses.replace(each, ago=each.ago + now - at) for each, at in self._notices.values()]
        return [self._observe(rank, now) for rank in self.heard_at], notices

    def _observe(self, rank: int, now: float) -> RankObservation:
        own, link = rank == self._mesh.own.rank, self._mesh.links.get(rank)
        silent = 0.0 if own else now - self.heard_at[rank]
        return RankObservation(
            rank,
            self._mesh.endpoints[rank].host_key,
            self.heartbeats.get(rank),
            silent,
            link="open" if own else link.state if link is not None else "none",
            link_seconds=now - link.since if link is not None and link.state != "open" else 0.0,
            unanswered=self._mesh.unanswered(rank) if silent > self._limits.interval else 0.0,
            dumped=rank in self.dumped,
        )

    # ------------------------------------------------------------------ decisions

    def attribute(self, *, urgent: bool = False) -> Attribution | None:
        """Return the failure that the present evidence shows; see `attribute_failure`."""
        failure = attribute_failure(self._mesh.own.rank, *self.snapshot(), self._limits, urgent=urgent)
        if failure is not None and failure.kind in _STALLS and not self._leave_on_stall and not urgent:
            self._warn(failure)
            return None
        return failure

    def error_of(self, failure: Attribution) -> PeerFailed:
        """Return the error that reports a failure."""
        return peer_failed(failure, self._mesh.endpoints, *self.snapshot())

    def detect(self, now: float, request: Reason | None) -> Attribution | None:
        """Return a failure that has been known long enough; log long waits.

        Args:
            now: ``time.monotonic()``.
            request: the launcher's request to exit; ``"failed"`` makes weaker evidence count.
        """
        if request is None and self._is_unremarkable(now):
            self.pending = None
            return None
        self._warn_of_late_rank(now)
        failure = self.attribute(urgent=request is not None) if request != "changed" else None
        if failure is None:
            self.pending = None
            return None
        if self.pending is None:
            self.pending = failure, now
            if not failure.certain and failure.rank is not None:
                own, others = self._mesh.own.rank, failure.others
                verdict = {"name": failure.kind, "others": others}
                self.publish(FailureNotice("verdict", failure.rank, own, failure.seconds, **verdict))
        return failure if now - self.pending[1] >= SETTLE_SECONDS[failure.certain] else None

    def _is_unremarkable(self, now: float) -> bool:
        """Return whether there is nothing to attribute: all ranks are heard, none waits long, nothing happened."""
        if self._notices or any(link.state != "open" for link in self._mesh.links.values()):
            return False
        longest = min(self._warn_seconds, self._limits.stall, self._limits.lost) / 2
        return all(now - heard < self._limits.interval for heard in self.heard_at.values()) and not any(
            each.waiting and each.age > longest for each in self.heartbeats.values()
        )

    def _warn_of_late_rank(self, now: float) -> None:
        """Log a long wait, and send the stack of this rank if others wait for it."""
        late = find_late_rank(*self.snapshot(), self._warn_seconds, self._limits.interval)
        if late is None:
            return
        if late.rank == self._mesh.own.rank and now - self._stack_sent_at > _STACK_SECONDS:
            self._stack_sent_at = now
            ident = self._mesh.own.thread_ident
            fingerprint = thread_probe.stack_fingerprint(thread_probe.current_frame(ident))
            stack = thread_probe.format_stack(ident)
            self.publish(self.own_notice("stack", name=f"{fingerprint:x}", text=stack))
        self._warn(late)

    def _warn(self, stall: Attribution) -> None:
        """Log a stall once, on the rank that waits longest and on the one that it waits for."""
        incident = (stall.rank, step_state.step)
        if incident in self._warned or self._mesh.own.rank not in (stall.rank, stall.waiting):
            return
        self._warned.add(incident)
        log.warning("%s", failure_headline(stall, self._mesh.endpoints, *self.snapshot()))
