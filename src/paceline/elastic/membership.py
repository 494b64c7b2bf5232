"""Runs the state machine of this process's membership: reads and writes the job's store in a thread.

The training thread feeds what happens to it, and carries out the actions that concern the training. The thread feeds
what appears in the store, and what it sees of the other members: a process of this host that ends, at once; a process
whose sign of life in the store stays unchanged for too long.
"""

from __future__ import annotations

import json
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch.distributed as dist

from paceline.elastic.member import Member
from paceline.elastic.member_events import (
    Abort,
    Action,
    CreateView,
    Died,
    End,
    Event,
    Finish,
    FormWorld,
    Leave,
    Overdue,
    StoreLost,
    Suspected,
    Train,
    Unreachable,
    ViewSeen,
    WaitTimedOut,
    WriteChange,
    WriteFormed,
    WriteReport,
)
from paceline.elastic.store_link import StoreLink
from paceline.elastic.store_records import (
    dead_key,
    event_of,
    joiner_key,
    lost_key,
    records_of,
    view_key,
    view_value,
    watched_keys,
)
from paceline.elastic.view import View
from paceline.errors import WorldError
from paceline.world.process_probe import LocalProcess, host_key, process_start_ticks

__all__ = ["Membership", "TrainingAction", "wait_for_view"]

log = logging.getLogger("paceline.elastic")

TrainingAction = Abort | FormWorld | Train | Finish | Leave | End

_BUSY_SECONDS = 0.01
_POLL_SECONDS = {"training": 0.05}
"""Between two looks at the store, by phase; a process of this host that ends is noticed at once."""

_SIGN_SECONDS = 0.5
"""Between two signs of life."""


@dataclass(frozen=True)
class _Process:
    """The process of a member, as it describes itself in the store."""

    host_key: str
    pid: int
    start_ticks: int


class Membership:
    """The membership of this process.

    Args:
        store: of the job.
        member: initial state.
        lost: seconds without a sign of life after which a member is unreachable.
        wait: seconds to wait for joiners while there are too few members.
        on_abort: frees the training thread from waits for other members; called in any thread.
    """

    def __init__(
        self, store: StoreLink, member: Member, *, lost: float, wait: float, on_abort: Callable[[], None]
    ) -> None:
        self._store, self._member = store, member
        self._lost, self._wait, self._on_abort = lost, wait, on_abort
        self._todo: deque[TrainingAction] = deque()
        self._changed = threading.Condition(threading.RLock())
        self._aborting = False
        self._signs: dict[str, tuple[bytes, float]] = {}
        self._on_lost_hosts: set[str] = set()
        self._processes: dict[str, LocalProcess | None] = {}
        self._signed = self._reported_at = 0.0
        self._closing = threading.Event()
        own = _Process(host_key(), os.getpid(), process_start_ticks(os.getpid()))
        store.write(f"process/{member.me}", json.dumps(asdict(own)).encode())
        self._thread = threading.Thread(target=self._run, name="paceline membership", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    # ------------------------------------------------------------------ called by the training thread

    @property
    def member(self) -> Member:
        """The present state."""
        with self._changed:
            return self._member

    @property
    def aborting(self) -> bool:
        """Whether training, or forming a world, has to stop."""
        return self._aborting

    def feed(self, event: Event) -> None:
        """Take in an event."""
        with self._changed:
            self._feed(event)

    def stopped(self, event: Event) -> None:
        """Take in that the training thread has stopped."""
        with self._changed:
            self._aborting = False
            self._feed(event)

    def next_action(self) -> TrainingAction:
        """Wait for what the training thread has to do next."""
        with self._changed:
            while not self._todo:
                if self._aborting:
                    return Abort()
                self._changed.wait(1.0)
                if not self._thread.is_alive() and not self._todo:
                    return Leave("the thread that reads the job's store has failed")
            return self._todo.popleft()

    def announce(self) -> None:
        """Announce this process as a newcomer, in the first free slot."""
        slot, me = self.member.view.slots, self.member.me.encode()
        while self._store.create(joiner_key(slot), me) != me:
            slot += 1

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        for process in self._processes.values():
            if process is not None:
                process.close()

    # ------------------------------------------------------------------ the machine

    def _feed(self, event: Event) -> None:
        if self._member.phase == "gone":
            return
        before = self._member.phase
        self._member, actions = self._member.handle(event)
        if self._member.phase == "reported" and before != "reported":
            self._reported_at = time.monotonic()
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case WriteReport() | WriteChange() | WriteFormed():
                for key, value in records_of(action, self._member.me).items():
                    self._store.write(key, value)
            case CreateView(view):
                key = view_key(view.epoch)
                self._feed(event_of(key, self._store.create(key, view_value(view))))
            case Abort():
                self._aborting = True
                self._on_abort()
                self._changed.notify_all()
            case _:
                self._todo.append(action)
                self._changed.notify_all()

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                with self._changed:
                    if self._member.phase == "gone":
                        return
                    self._look()
                self._wait_for_processes(_POLL_SECONDS.get(self._member.phase, _BUSY_SECONDS))
            except Exception as error:
                lost = isinstance(error, dist.DistError | OSError)
                log.warning("the store of the job is lost: %s", error, exc_info=None if lost else error)
                self.feed(StoreLost())
                return

    def _look(self) -> None:
        for key in list(watched_keys(self._member)):
            value = self._store.read(key)
            if value is not None:
                self._feed(event_of(key, value))
        now = time.monotonic()
        if now - self._signed > _SIGN_SECONDS:
            self._signed = now
            self._store.write(f"alive/{self._member.me}", str(time.monotonic_ns()).encode())
            self._check_signs(now)
        if self._member.phase == "reported":
            if now - self._reported_at > self._lost or self._only_lost_hosts_are_missing():
                self._feed(Overdue())
            if now - self._reported_at > self._lost + self._wait:
                self._feed(WaitTimedOut())

    def _check_signs(self, now: float) -> None:
        """Look for signs of life of the other members."""
        if self._member.phase == "joining":
            return
        for other in self._member.view.participants:
            if other == self._member.me or other in self._member.dead:
                continue
            sign = self._store.read(f"alive/{other}") or b""
            known, since = self._signs.get(other, (b"", now))
            if sign != known or other not in self._signs:
                self._signs[other] = sign, now
                since = now
            if host_lost := self._store.read(lost_key(other)) is not None:
                self._on_lost_hosts.add(other)
            if (host_lost or now - since > self._lost) and other not in self._member.unreachable:
                self._feed(Unreachable(other))
                if other in self._member.view.members or self._member.phase == "forming":  # else it has left
                    why = "its host is lost" if host_lost else f"no sign of life for {now - since:.1f} s"
                    log.warning("member %s can't be reached: %s", other, why)
                    self._feed(Suspected())

    def _only_lost_hosts_are_missing(self) -> bool:
        """Return whether reports are missing, all of them of members on lost hosts."""
        reported = {report.member for report in self._member.reports}
        missing = set(self._member.view.participants) - self._member.dead - reported
        return bool(missing) and missing <= self._on_lost_hosts

    def _wait_for_processes(self, seconds: float) -> None:
        """Sleep until a member's process on this host ends, or for some seconds."""
        poll, watched = select.poll(), {}
        with self._changed:
            for other in self._member.view.participants:
                process = self._process_of(other)
                if process is not None and process.pidfd >= 0 and other not in self._member.dead:
                    poll.register(process.pidfd, select.POLLIN)
                    watched[process.pidfd] = other
        for descriptor, _ in poll.poll(1000 * seconds) if watched else []:
            self._died(watched[descriptor])
        if not watched:
            self._closing.wait(seconds)

    def _process_of(self, other: str) -> LocalProcess | None:
        """Return a member's process if it is on this host, and another one."""
        record = None
        if other not in self._processes and other != self._member.me:
            record = self._store.read(f"process/{other}")
        if record is not None:
            found = _Process(**json.loads(record))
            here = found.host_key == host_key()
            self._processes[other] = LocalProcess(found.pid, found.start_ticks) if here else None
            if here and process_start_ticks(found.pid) != found.start_ticks:
                self._died(other)
        return self._processes.get(other)

    def _died(self, other: str) -> None:
        """Make a death known to all members."""
        with self._changed:
            self._store.write(dead_key(other), b"")
            self._feed(Died(other))


def wait_for_view(store: StoreLink, seconds: float) -> View:
    """Return the newest view in the store; wait for the first one.

    Raises:
        WorldError: there is none in time.
    """
    end = time.monotonic() + seconds
    while (view := _newest_view(store)) is None:
        if time.monotonic() > end:
            raise WorldError("there is no world to join", remedy="start the run without PACELINE_JOINER")
        time.sleep(0.05)
    return view


def _newest_view(store: StoreLink) -> View | None:
    found, epoch = None, 0
    while (value := store.read(view_key(epoch))) is not None:
        event = event_of(view_key(epoch), value)
        assert isinstance(event, ViewSeen), "a view's key"
        found, epoch = event.view, epoch + 1
    return found
