"""The thread that watches: five times a second it tells the others how this rank is, hears how they are, and judges.

take in what came → look at the processes of this host → tell the others → judge
                                                          verdict: let more evidence come for a moment, then leave:
                                                          free the training thread, raise in it, end the process

[Note: own absence] A watcher that did not run for a while (Python's lock was held, the machine slept) has not listened
either. What it would hold against others for that time is taken back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import logging
import threading
import time
from collections.abc import Collection
from typing import Any

from paceline._core.graceful_shutdown import ShutdownListener
from paceline._core.step_state import step_state
from paceline.errors import PeerFailed
from paceline.health import abort_collectives, stack_probe
from paceline.health.attribution import Attribution, RankObservation, StallLimits, attribute_failure, late
from paceline.health.failure_text import error_of, headline
from paceline.health.heartbeat import FailureNotice, Heartbeat, MalformedFrame, clipped
from paceline.health.peer_mesh import FULL_MESH, PeerMesh
from paceline.health.process_probe import ProbedProcess, RankState
from paceline.health.straggler import StepPaces

__all__ = ["MonitorThread"]

log = logging.getLogger("paceline.watch")

BEAT_SECONDS = 0.2
_RELAYED_SECONDS = 1.0  # between rows, where they are passed on
_SETTLE_SECONDS = {True: 0.25, False: 0.5}  # for better evidence to come, by whether the verdict is certain
_QUIET_SECONDS = 0.5  # without a row of a rank of this host, until its process is looked at
_ARM_SECONDS = 1.5  # at least, without a turn, until stacks are told that need no lock; below two beats
_STACK_SECONDS = 5.0  # between two stacks that a rank tells of itself
_ABSENT_SECONDS = 1.0
_ACKNOWLEDGE_SECONDS = 1.0
_ASKED_SECONDS = 1.0  # for a reason to show, once the launcher asked this rank to leave
_SAY_SECONDS = 1.0  # for the training thread to raise a verdict, before it is logged
_STALLS = ("stopped", "held", "stalled", "finished", "elsewhere")


class MonitorThread:
    """The watcher of this rank.

    Args:
        mesh: its connections. limits: how long is too long. leaves_stalls: whether a stall ends the training.
        warn: seconds of waiting after which a word is said. grace: seconds to free the training thread.
        launcher: where the launcher asks this rank to leave.

    Attributes:
        error: the verdict as an error, once there is one; `decided` is set then.
    """

    def __init__(
        self,
        mesh: PeerMesh,
        limits: StallLimits,
        *,
        leaves_stalls: bool,
        warn: float,
        grace: float,
        launcher: ShutdownListener,
    ) -> None:
        self.mesh, self.me, self.cards = mesh, mesh.me, mesh.cards
        relayed = len(self.cards) > FULL_MESH
        beat = 1.0 + relayed * _RELAYED_SECONDS * len(self.cards).bit_length()
        self.limits = limits.sooner(_SETTLE_SECONDS[False] + 3 * BEAT_SECONDS, beat)
        self._leaves_stalls, self._warn, self._grace = leaves_stalls, warn, grace
        self._launcher, self._asked_at, self._at_rest = launcher, 0.0, False
        self._rows_every = _RELAYED_SECONDS if relayed else 0.0
        self.error: PeerFailed | None = None
        self.decided = threading.Event()
        self.inside = False
        """Whether the training thread is in a with-block, so that raising in it ends there."""
        self._paces = StepPaces()
        self._rows: dict[int, Heartbeat] = {}
        self._heard = {card.rank: time.monotonic() for card in self.cards}
        self._notices: dict[tuple[str, ...], tuple[FailureNotice, float]] = {}
        self._acknowledged: dict[tuple[str, ...], set[int]] = {}
        self._dumped: set[int] = set()
        self._neighbours = {
            card.rank: ProbedProcess(card.pid, card.start)
            for card in self.cards
            if card.key == self.me.key and card.rank != self.me.rank
        }
        self._stopped: tuple[int, ...] = ()
        self._sequence = 0
        self._standing = RankState(self.me.ident)
        self._pending: tuple[Attribution, float] | None = None
        self._warned: set[tuple[int | None, int]] = set()
        self._told_stack = self._armed = self._sent = self._turned = 0.0
        self._left_at, self._said, self._raised_in = 0.0, False, False
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        for problem in self.mesh.dial():
            log.warning("can't be watched by this rank: %s", problem)
        self._tell(time.monotonic())
        self._arm(time.monotonic())
        self._thread.start()

    # ------------------------------------------------------------------ what the training thread calls

    def publish(self, notice: FailureNotice, *, wait: bool = False) -> None:
        """Tell all ranks; with `wait`, return once the neighbours have it, or after a second."""
        with self._lock:
            self._take(notice, None)
        deadline = time.monotonic() + (_ACKNOWLEDGE_SECONDS if wait else 0.0)
        while time.monotonic() < deadline:
            with self._lock:
                missing = {link.rank for link in self.mesh.links.values() if link.state == "open"}
                missing -= self._acknowledged.get(notice.key, set())
            if not missing or not self._thread.is_alive():
                return
            time.sleep(0.01)

    def hurry(self) -> PeerFailed | None:
        """Return whom the present evidence speaks against, for a thread whose connection failed; None: nobody."""
        with self._lock:
            verdict = None if self.decided.is_set() else self._judge(hurried=True)
            if verdict is not None:
                self._decide(verdict)
        return self.error

    def paces(self) -> dict[int, float]:
        """Return the working seconds of a step, by rank, as far as they are known."""
        with self._lock:
            return self._paces.seconds()

    def notice_of(self, kind: str, **fields: Any) -> FailureNotice:
        """Return a notice of this rank about itself, as it stands."""
        phase = step_state.task or step_state.phase
        me = self.me.rank
        return FailureNotice(
            kind, me, me, step=step_state.step, phase=phase, bucket=step_state.bucket, **fields
        )

    def close(self) -> None:
        """End the thread, tell nobody, and let go of everything."""
        self._closing.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        with contextlib.suppress(RuntimeError, ValueError):
            faulthandler.cancel_dump_traceback_later()
        if not self.decided.is_set():  # else this rank is about to end
            self._launcher.done()
        with self._lock:
            self.mesh.push()
            self.mesh.close()
            for process in self._neighbours.values():
                process.close()

    def forsake(self) -> None:
        """Have no more to do with it: this is a child that was forked."""
        self.mesh.close(forked=True)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            pidfds = [each.pidfd for each in self._neighbours.values() if each.pidfd >= 0]
            ended = self.mesh.rest(BEAT_SECONDS, pidfds)
            with self._lock:
                if self._closing.is_set():
                    return
                try:
                    self._turn(ended)
                except Exception:  # the training must not end because watching it failed
                    log.exception("watching the ranks failed, and ends on rank %d", self.me.rank)
                    return

    def _turn(self, ended: Collection[int] = ()) -> None:
        """Take one turn; `ended` are descriptors of processes that are gone."""
        now = time.monotonic()
        self._return_from_absence(now)
        for rank, message in self.mesh.receive():
            try:
                self._understand(rank, message, now)
            except MalformedFrame as error:
                log.warning("rank %d told what can't be (%s): its connection is closed", rank, error)
                self.mesh.refuse(rank)
        self._read_dumps()
        self._look_at_neighbours(now, ended)
        self._tell(now)
        self._arm(now)
        if self.decided.is_set():
            self._see_to_leaving(now)
        elif not self._at_rest:
            self._consider(now)

    def _return_from_absence(self, now: float) -> None:
        """See [Note: own absence]."""
        away = now - self._turned - BEAT_SECONDS if self._turned else 0.0
        self._turned = now
        if away > _ABSENT_SECONDS:
            self._heard = {rank: heard + away for rank, heard in self._heard.items()}

    def _understand(self, source: int, message: dict[str, Any], now: float) -> None:
        if "row" in message:
            row = Heartbeat.of(message["row"], len(self.cards))
            known = self._rows.get(row.rank)
            if row.rank != self.me.rank and (known is None or row.sequence > known.sequence):
                self._rows[row.rank], self._heard[row.rank] = row, now
                if row.rank in self._dumped:
                    self._dumped.discard(row.rank)
                    self.mesh.forget_dump(row.rank)
                if row.sees_waiting:
                    self._paces.note(row.rank, row.rounds, row.busy_seconds)
        elif "note" in message:
            notice = FailureNotice.of(message["note"], len(self.cards))
            self.mesh.send({"ack": list(notice.key)}, to=source)
            self._take(notice, source)
        elif isinstance(message.get("ack"), list):
            self._acknowledged.setdefault(tuple(map(str, message["ack"])), set()).add(source)

    def _take(self, notice: FailureNotice, source: int | None) -> None:
        """Keep a notice that is new, and pass it on."""
        if notice.key in self._notices or len(self._notices) > 8 * len(self.cards) + 100:
            return
        self._notices[notice.key] = notice, time.monotonic()
        self.mesh.send(notice.message())
        if notice.kind == "thread" and source is not None:
            log.warning("a thread of rank %d raised %s:\n%s", notice.rank, notice.name, notice.text)
        if notice.kind == "stack" and notice.name == "dump":
            self._dumped.add(notice.rank)

    def _read_dumps(self) -> None:
        for rank, text in self.mesh.dumps():
            stack = stack_probe.section(text, self.cards[rank].ident)
            if stack:
                told = f"(told without Python's lock)\n{stack}"
                self._take(FailureNotice("stack", rank, self.me.rank, name="dump", text=clipped(told)), None)

    def _look_at_neighbours(self, now: float, ended: Collection[int]) -> None:
        """See which processes of this host are stopped or gone, of those that ended or are not heard."""
        stopped = []
        for rank, process in list(self._neighbours.items()):
            if process.pidfd not in ended and now - self._heard[rank] < _QUIET_SECONDS:
                continue
            state = process.state()
            if state == "stopped":
                stopped.append(rank)
            elif state == "gone":
                code = process.code()
                process.close()
                del self._neighbours[rank]
                row = self._rows.get(rank)
                place = (row.step, row.task or row.phase, row.bucket) if row is not None else (0, "", -1)
                self._take(FailureNotice("gone", rank, self.me.rank, 0.0, "", "", code, *place), None)
        self._stopped = tuple(stopped)

    def _tell(self, now: float) -> None:
        """Send this rank's row and, where not everybody is connected, what others told."""
        self._sequence += 1
        row = self._rows[self.me.rank] = self._standing.row(self.me.rank, self._sequence, self._stopped)
        self._heard[self.me.rank] = now
        if row.sees_waiting:
            self._paces.note(row.rank, row.rounds, row.busy_seconds)
        self.mesh.push()
        if now - self._sent < self._rows_every:
            return
        self.mesh.send(row.message(), vital=False)
        if self._rows_every:
            for rank, other in self._rows.items():
                held = now - self._heard[rank]
                if rank != self.me.rank and held <= now - self._sent:
                    older = dataclasses.replace(other, age=other.age + held, still=other.still + held)
                    self.mesh.send(older.message(), vital=False)
        self._sent = now

    def _arm(self, now: float) -> None:
        """Put off the moment at which stacks are told without Python's lock: it comes when this thread can't run."""
        patience = max(_ARM_SECONDS, min(5.0, self.limits.stall / 3, self.limits.lost / 3))
        if self.mesh.dump is None or now - self._armed < patience / 3:
            return
        self._armed = now
        try:
            faulthandler.dump_traceback_later(patience, file=self.mesh.dump.fileno())
        except (RuntimeError, ValueError, OSError):
            self.mesh.dump = None

    # ------------------------------------------------------------------ judging

    def seen(self) -> list[RankObservation]:
        """Return what this rank knows of all ranks."""
        now = time.monotonic()
        found = []
        for card in self.cards:
            link = self.mesh.links.get(card.rank)
            state = "open" if card.rank == self.me.rank else link.state if link is not None else "none"
            since = now - link.since if link is not None and link.state != "open" else 0.0
            silent = 0.0 if card.rank == self.me.rank else now - self._heard[card.rank]
            dumped = card.rank in self._dumped
            unanswered = self.mesh.unanswered(card.rank) if silent > self.limits.beat else 0.0
            row = self._rows.get(card.rank)
            found.append(RankObservation(card.rank, card.key, row, silent, state, since, unanswered, dumped))
        return found

    def notices(self) -> list[FailureNotice]:
        """Return what has happened, in the order in which it was heard."""
        now = time.monotonic()
        return [dataclasses.replace(note, ago=note.ago + now - at) for note, at in self._notices.values()]

    def _judge(self, *, hurried: bool = False) -> Attribution | None:
        verdict = attribute_failure(self.me.rank, self.seen(), self.notices(), self.limits, hurried=hurried)
        if verdict is not None and verdict.kind in _STALLS and not self._leaves_stalls and not hurried:
            self._warn_of(verdict)
            return None
        return verdict

    def _consider(self, now: float) -> None:
        asked = self._launcher.requested()
        if asked is None and self._all_well(now):
            self._pending = None
            return
        self._look_out(now)
        self._asked_at = self._asked_at or (now if asked else 0.0)
        verdict = self._judge(hurried=asked is not None) if asked != "changed" else None
        if verdict is None:
            self._pending = None
            if asked == "changed" or (asked and now - self._asked_at > _ASKED_SECONDS):
                self._come_to_rest()
            return
        if self._pending is None:
            self._pending = verdict, now
            if not verdict.certain and verdict.rank is not None:
                who, ago, kind = verdict.rank, verdict.seconds, verdict.kind
                self._take(
                    FailureNotice("verdict", who, self.me.rank, ago, kind, others=verdict.others), None
                )
        if now - self._pending[1] >= _SETTLE_SECONDS[verdict.certain]:
            self._decide(verdict)

    def _all_well(self, now: float) -> bool:
        """Return whether there is nothing to be judged: all are heard, nobody waits for long, nothing happened."""
        if self._notices or any(link.state != "open" for link in self.mesh.links.values()):
            return False
        oldest = now - self.limits.beat
        patience = min(self._warn, self.limits.stall, self.limits.lost) / 2
        return all(heard > oldest for heard in self._heard.values()) and not any(
            row.waiting and row.age > patience for row in self._rows.values()
        )

    def _look_out(self, now: float) -> None:
        """Say a word where ranks wait for long; who is waited for tells where it stands."""
        verdict = late(self.seen(), self.notices(), self._warn, self.limits.beat)
        if verdict is None:
            return
        if verdict.rank == self.me.rank and now - self._told_stack > _STACK_SECONDS:
            self._told_stack = now
            stack = stack_probe.stack_of(self.me.ident)
            self._take(self.notice_of("stack", name=f"{self._standing.fingerprint:x}", text=stack), None)
        self._warn_of(verdict)

    def _warn_of(self, verdict: Attribution) -> None:
        """Log a stall once: on the rank that waits longest, and on the one that it waits for."""
        incident = (verdict.rank, step_state.step)
        if incident in self._warned or self.me.rank not in (verdict.rank, verdict.waiting):
            return
        self._warned.add(incident)
        log.warning("%s", headline(verdict, self.cards, self.seen(), self.notices()))

    # ------------------------------------------------------------------ leaving

    def _come_to_rest(self) -> None:
        """Have the launcher end this rank, and the others not wonder."""
        self._take(self.notice_of("leaves", name="the launcher asked"), None)
        self._at_rest = True
        self._launcher.done()

    def _decide(self, verdict: Attribution) -> None:
        """Make `verdict` the end of this training, and free the training thread."""
        self.error = error_of(verdict, self.cards, self.seen(), self.notices())
        self._left_at = time.monotonic()
        self._take(self.notice_of("leaves", name=verdict.kind), None)
        self.decided.set()
        abort_collectives.abort_groups(self.error, self.mesh.files())

    def _see_to_leaving(self, now: float) -> None:
        """Raise in a training thread that does not come; end the process if it still stands where it stood."""
        assert self.error is not None, "decided"
        waited = now - self._left_at
        if not self._said and waited > min(_SAY_SECONDS, self._grace / 2):
            self._said = True
            log.error("%s", self.error)
        if self.inside and not self._raised_in and waited > self._grace / 2:
            self._raised_in = True
            abort_collectives.raise_in(self.me.ident, self.error)
        if waited > self._grace and self._standing.since <= self._left_at:
            abort_collectives.end_process(self.error)
