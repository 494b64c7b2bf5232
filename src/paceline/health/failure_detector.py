"""What this rank knows of all ranks, from messages of others, and when it amounts to a failure.

Heartbeats come from the ranks of this rank's group; what is known of other groups comes in summaries
(`aggregation`). Notices are forwarded by every rank to all that it is connected with, if they can change what others
attribute: of many reports of the same, the first are enough.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from paceline._core.processes.graceful_shutdown import Reason
from paceline._core.step_state import StepState, step_state
from paceline.errors import PeerFailed
from paceline.health import thread_probe
from paceline.health.aggregation.groups import PeerGroups, ranges
from paceline.health.aggregation.parent_search import PeerNetwork
from paceline.health.aggregation.summary import Departures
from paceline.health.aggregation.summary_exchange import REPORT_SECONDS, GroupState, SummaryExchange
from paceline.health.attribution import (
    Attribution,
    RankObservation,
    StallLimits,
    attribute_failure,
    find_late_rank,
    waited_seconds,
)
from paceline.health.failure_text import failure_headline, peer_failed
from paceline.health.heartbeat import FailureNotice, Heartbeat, MalformedFrame, NoticeKind
from paceline.health.straggler import StepTimes, StepTimeSummary, find_slowest

__all__ = ["HEARTBEAT_SECONDS", "SETTLE_SECONDS", "FailureDetector", "heartbeat_interval", "suspicion_limits"]

log = logging.getLogger("paceline.health")

HEARTBEAT_SECONDS = 0.2

SETTLE_SECONDS = {True: 0.25, False: 0.5}
"""Wait for better evidence, by whether the attribution is certain."""

_STACK_SECONDS = 5.0  # between two stacks that a rank sends of itself
_STALLS = ("stopped", "held", "stalled", "finished", "elsewhere")
_MOST_FORWARDED = 16  # notices of a kind, of which only the first counts or each has a long text
_MOST_ENDS = 64  # of processes that a launcher has ended


def heartbeat_interval(groups: PeerGroups) -> float:
    """Return the seconds between two signs of life of a rank, with usual delays on the way to any other."""
    reports = 0 if len(groups.groups) == 1 else groups.depth + 1
    return 1.0 + 1.2 * REPORT_SECONDS * reports


def suspicion_limits(limits: StallLimits, groups: PeerGroups) -> StallLimits:
    """Return when to suspect a rank so that all ranks name it within `limits`."""
    hops = 0 if len(groups.groups) == 1 else 2 * (groups.depth + 1)
    naming = SETTLE_SECONDS[False] + (3 + 0.5 * hops) * HEARTBEAT_SECONDS
    return limits.minus(naming, heartbeat_interval(groups))


class FailureDetector:
    """Evidence and decisions of one rank's monitor, without threads, sockets and clocks.

    Args:
        mesh: connections to other ranks.
        groups: of the world.
        limits: time limits.
        leave_on_stall: whether a stall is a failure; else it is logged.
        warn: seconds of waiting after which a warning is logged.
        state: of this rank.

    Attributes:
        heartbeats: the latest of each rank of this group.
        heard_at: when they arrived; at first, when this object was made.
        dumped: ranks that wrote their stacks without Python's lock since their latest heartbeats; the numbers of these.
        step_times: working seconds per step of each rank of this group.
        acknowledged: ranks that have a notice of this one, by its key.
        pending: a failure that waits for better evidence, and since when.
    """

    def __init__(
        self,
        mesh: PeerNetwork,
        groups: PeerGroups,
        limits: StallLimits,
        *,
        leave_on_stall: bool,
        warn: float,
        state: StepState = step_state,
    ) -> None:
        now, own = mesh.now(), mesh.own.rank
        self._mesh, self._limits, self._state = mesh, limits, state
        self._leave_on_stall = leave_on_stall
        self.mates = groups.mates(own)
        self.heartbeats: dict[int, Heartbeat] = {}
        self.heard_at = dict.fromkeys(sorted((own, *self.mates)), now)
        self.dumped: dict[int, int] = {}
        self.step_times = StepTimes()
        self.acknowledged: dict[tuple[str, ...], set[int]] = {}
        self.pending: tuple[Attribution, float] | None = None
        self.exchange = SummaryExchange(mesh, groups, limits.interval) if len(groups.groups) > 1 else None
        # Of two reports, one may be so much older that its rank seems to wait for the other's.
        self._warn_seconds = warn if self.exchange is None else max(warn, limits.interval)
        self._notices: dict[tuple[str, ...], tuple[FailureNotice, float]] = {}
        self._synchronised: dict[int, object] = {}
        self._changes = -1  # of connections at the latest report
        self._warned: set[tuple[int | None, int]] = set()
        self._stack_sent = float("-inf"), ""

    # ------------------------------------------------------------------ messages

    def receive(self, source: int, message: dict[str, Any], now: float) -> None:
        """Take in a message.

        Raises:
            MalformedFrame: it is invalid, or not for its sender to send.
        """
        ranks = len(self._mesh.endpoints)
        if "row" in message:
            heartbeat = Heartbeat.parse(message["row"], ranks)
            if heartbeat.rank != source or source not in self.heard_at:
                raise MalformedFrame(f"a heartbeat of rank {heartbeat.rank}")
            self.add_heartbeat(heartbeat, now)
        elif "note" in message:
            notice = FailureNotice.parse(message["note"], ranks)
            self._mesh.send({"ack": list(notice.key)}, to=[source])
            if self.publish(notice, source) and notice.kind == "thread":
                log.warning("a thread of rank %d raised %s:\n%s", notice.rank, notice.name, notice.text)
        elif isinstance(message.get("ack"), list):
            self.acknowledged.setdefault(tuple(map(str, message["ack"])), set()).add(source)
        elif self.exchange is not None and ("up" in message or "world" in message):
            self.exchange.receive(source, message, now)

    def add_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Record a heartbeat if it is newer than the known one."""
        rank, known = heartbeat.rank, self.heartbeats.get(heartbeat.rank)
        if known is not None and heartbeat.sequence <= known.sequence:
            return
        self.heartbeats[rank], self.heard_at[rank] = heartbeat, now
        if self.dumped.get(rank, heartbeat.sequence) < heartbeat.sequence:
            del self.dumped[rank]
            self._mesh.discard_dump(rank)
        if heartbeat.sees_waiting:
            self.step_times.add(rank, heartbeat.rounds, heartbeat.busy_seconds)

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        """Record this rank's heartbeat, and send it to its group."""
        self.add_heartbeat(heartbeat, now)
        self._mesh.send(heartbeat.message(), to=self.mates, droppable=True)
        self._changes = -1

    def report(self, now: float) -> None:
        """Send what is due to other groups, and to ranks that were connected since; to be called in every turn."""
        if self.exchange is None or self._changes == self._mesh.changes:
            return
        self._changes = self._mesh.changes
        reported = {notice.rank for notice, _ in self._notices.values() if notice.kind == "gone"}
        for rank, link in self._mesh.links.items():
            known = self._synchronised.get(rank)
            if link is not known and link.state == "open":
                self._synchronised[rank] = link
                for notice in self._aged_notices(now):
                    if notice.kind not in ("done", "leaves"):
                        self._mesh.send(notice.message(), to=[rank])
            elif link is known and link.state == "closed":
                self._report_end(rank, reported, now - link.since)
        state = GroupState(
            lambda: self._group_rows(now),
            lambda rank: now - self.heard_at[rank],
            self._departures(),
            reported,
            self._step_times,
        )
        self.exchange.turn(state, now)
        for rank in self.exchange.ended - reported:
            self.publish(FailureNotice("gone", rank, self._mesh.own.rank))

    def _report_end(self, rank: int, reported: set[int], ago: float) -> None:
        """Report a rank of another group whose connection has ended; ranks of its own group know more."""
        left = {notice.rank for notice, _ in self._notices.values() if notice.kind in ("done", "leaves")}
        if rank not in self.heard_at and rank not in reported and rank not in left:
            reported.add(rank)
            self.publish(FailureNotice("gone", rank, self._mesh.own.rank, ago))

    def publish(self, notice: FailureNotice, source: int | None = None) -> bool:
        """Record a notice and forward it if it is news; return whether it is new.

        Args:
            notice: the event.
            source: rank that sent it; None: it comes from this rank.
        """
        known = self._notices.get(notice.key)
        if known is None and len(self._notices) > 8 * len(self._mesh.endpoints) + 100:
            return False
        if known is not None and (notice.kind != "stack" or notice.sequence <= known[0].sequence):
            return False
        news = self._is_news(notice)
        self._notices[notice.key] = notice, self._mesh.now()
        is_dump = notice.kind == "stack" and notice.name == "dump"
        if is_dump and notice.sequence >= self.latest_sequence(notice.rank):
            self.dumped[notice.rank] = notice.sequence
        if news if source is not None else news or notice.kind not in ("gone", "verdict"):
            self._mesh.send(notice.message(), besides=source)
        return True

    def _is_news(self, notice: FailureNotice) -> bool:
        """Return whether a notice may change what ranks attribute that know those that this rank knows."""
        now = self._mesh.now()
        known = [
            (each, each.ago + now - at) for each, at in self._notices.values() if each.kind == notice.kind
        ]
        match notice.kind:
            case "done" | "leaves":
                return False  # summaries have them
            case "verdict":
                return all((notice.rank, notice.by) < (each.rank, each.by) for each, _ in known)
            case "gone":
                same = [each for each, _ in known if each.rank == notice.rank]
                more = not same or (notice.code is not None and all(each.code is None for each in same))
                return more and (len(known) < _MOST_ENDS or notice.code not in (-2, -15))
            case "raised":
                return len(known) < _MOST_FORWARDED or all(notice.ago > ago for _, ago in known)
            case _:
                return len(known) < _MOST_ENDS

    # ------------------------------------------------------------------ evidence

    def own_notice(self, kind: NoticeKind, *, name: str = "", text: str = "") -> FailureNotice:
        """Return a notice of this rank about itself, with its present state."""
        rank, phase = self._mesh.own.rank, self._state.task or self._state.phase
        place = {"step": self._state.step, "phase": phase, "bucket": self._state.bucket}
        return FailureNotice(
            kind, rank, rank, name=name, text=text, sequence=self.latest_sequence(rank), **place
        )

    def latest_sequence(self, rank: int) -> int:
        """Return the number of a rank's latest heartbeat; 0: none has arrived."""
        known = self.heartbeats.get(rank)
        return 0 if known is None else known.sequence

    def ignore_absence(self, seconds: float) -> None:
        """Shift all arrival times: for so long this rank could not receive."""
        self.heard_at = {rank: heard + seconds for rank, heard in self.heard_at.items()}
        if self.exchange is not None:
            self.exchange.ignore_absence(seconds)

    def snapshot(self) -> tuple[list[RankObservation], list[FailureNotice]]:
        """Return what is known of each rank, and all notices with their present age."""
        now = self._mesh.now()
        rows, notices = self._group_rows(now), self._aged_notices(now)
        if self.exchange is not None:
            rows += self.exchange.observations(now)
            direct = {notice.rank for notice in notices if notice.kind in ("done", "leaves")}
            notices += [notice for notice in self.exchange.departures() if notice.rank not in direct]
        return rows, notices

    def slowest(self) -> tuple[int, float, float] | None:
        """Return the slowest rank, its seconds over the median of the others', and its seconds; None if unknown."""
        seconds = self.step_times.medians()
        if self.exchange is not None:
            times = self.exchange.times()
            found = times.slowest()
            return None if found is None else (*found, times.seconds)
        found = find_slowest(seconds)
        return None if found is None else (*found, seconds[found[0]])

    def _aged_notices(self, now: float) -> list[FailureNotice]:
        return [dataclasses.replace(each, ago=each.ago + now - at) for each, at in self._notices.values()]

    def _group_rows(self, now: float) -> list[RankObservation]:
        return [self._observe(rank, now) for rank in self.heard_at]

    def _step_times(self) -> StepTimeSummary:
        return StepTimeSummary.of(self.step_times.medians())

    def _departures(self) -> Departures:
        """Return the departures that ranks announced to this one."""
        notices = [notice for notice, _ in self._notices.values()]
        done = [notice for notice in notices if notice.kind == "done"]
        leaves = [notice.rank for notice in notices if notice.kind == "leaves"]
        first = min(done, key=lambda notice: (notice.step, notice.rank), default=None)
        return Departures(
            tuple((first, last) for first, last in ranges(notice.rank for notice in done)),
            tuple((first, last) for first, last in ranges(leaves)),
            None if first is None else (first.rank, first.step, first.phase, first.bucket),
        )

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
        if self.exchange is not None and not self.exchange.is_unremarkable(longest, now):
            return False
        return all(now - heard < self._limits.interval for heard in self.heard_at.values()) and not any(
            each.waiting and each.age > longest for each in self.heartbeats.values()
        )

    def _warn_of_late_rank(self, now: float) -> None:
        """Log a long wait, and send the stack of this rank if others wait for it."""
        late = find_late_rank(*self.snapshot(), self._warn_seconds, self._limits.interval)
        if late is None:
            return
        own, (sent_at, sent) = self._mesh.own, self._stack_sent
        if late.rank == own.rank and now - sent_at > _STACK_SECONDS:
            fingerprint = f"{thread_probe.stack_fingerprint(thread_probe.current_frame(own.thread_ident)):x}"
            self._stack_sent = now, fingerprint
            if fingerprint != sent:
                stack = thread_probe.format_stack(own.thread_ident)
                self.publish(self.own_notice("stack", name=fingerprint, text=stack))
        self._warn(late)

    def _warn(self, stall: Attribution) -> None:
        """Log a stall once, on the rank that waits longest and on the one that it waits for."""
        own, incident = self._mesh.own.rank, (stall.rank, self._state.step)
        if self.exchange is not None and stall.waiting is not None:
            stall = dataclasses.replace(stall, waiting=self._first_waiting(stall.rank))
        if incident in self._warned or own not in (stall.rank, stall.waiting):
            return
        self._warned.add(incident)
        log.warning("%s", failure_headline(stall, self._mesh.endpoints, *self.snapshot()))

    def _first_waiting(self, late: int | None) -> int | None:
        """Return the lowest of the ranks that wait longest, as far as times of different ages can be compared."""
        rows = [row for row in self.snapshot()[0] if row.rank != late]
        waits = {row.rank: waited_seconds(row, self._limits) for row in rows}
        longest = max(waits.values(), default=0.0)
        return min(
            (rank for rank, each in waits.items() if each >= longest - self._limits.interval), default=None
        )
