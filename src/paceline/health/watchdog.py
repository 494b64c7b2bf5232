"""`Watchdog`: a stall, a death or an exception on one rank is named on every rank, within seconds.

The training thread writes down where it is (`paceline._core.step_state`), and does no more. A thread beside it does the
rest:

    watch.py       the user's side: around the loop, and where an exception passes
    watcher.py     the thread: tell, hear, judge, leave
    culprit.py     whose fault it is, as a function                words.py       and how to say it
    beat.py        what is told                                    mesh.py        over which connections
    processes.py   the processes of this host                      stacks.py      where a thread stands
    standing.py    how this rank stands                            straggler.py   which rank is slow
    leave.py       freeing a thread that waits for ever            reach.py       addresses
    symptoms.py    errors that tell of others
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict
from types import TracebackType
from typing import Any, Literal, Self

from paceline._core.graceful_shutdown import ShutdownListener
from paceline.errors import PeerFailed, UsageError, unknown
from paceline.health.attribution import StallLimits
from paceline.health.monitor_thread import MonitorThread
from paceline.health.peer_mesh import LOOPBACK, MeshCard, PeerMesh, listen, own_address
from paceline.health.process_probe import host_key, start_of
from paceline.health.stack_probe import exception_text
from paceline.health.straggler import Straggler, slowest_of
from paceline.health.symptoms import is_symptom
from paceline.world.object_collectives import gather_texts, rank_and_size

__all__ = ["Watchdog"]

_CAUSE_SECONDS = 2.0
"""How long a rank whose connection failed waits for the cause to be known."""


class Watchdog:
    """Watches all ranks while the block runs, and raises the same error on all when one of them is lost.

    An exception on one rank, a process that ends or is stopped, a host that can't be reached, a rank that stands still
    while the others wait for it: every other rank raises `PeerFailed`, which names the rank, its host, step and
    phase, what happened, and its traceback or where it stands. A thread that waits in a collective is freed for
    that. All ranks make a Watch at the same place; in a world of one it does nothing.

    Args:
        stall: seconds within which a rank that stands still is named, if others wait for it so long. A rank that
            moves on from line to line is at work; evaluating and writing checkpoints never count as standing still.
        lost: seconds within which a stopped process or an unreachable host is named; below 3, up to a second later.
        on_stall: ``"leave"``: a stall ends the training on all ranks; ``"tell"``: it is only logged.
        warn: seconds of waiting after which the stall to come is logged, once; None: a quarter of `stall`.
        grace: seconds to free a rank that is to end; one that still stands then writes the error to standard error
            and exits with code 70.

    Raises:
        UsageError: a value that makes no sense.
        PeerFailed: at the end of the block: a rank was lost.

    Example:
        >>> with Watchdog(stall=30) as watch:
        ...     for step in range(3):
        ...         slowest = watch.slowest()
    """

    def __init__(
        self,
        *,
        stall: float = 60.0,
        lost: float = 15.0,
        on_stall: Literal["leave", "tell"] = "leave",
        warn: float | None = None,
        grace: float = 10.0,
    ) -> None:
        for name, value in {"stall": stall, "lost": lost, "warn": warn, "grace": grace}.items():
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise UsageError(f"{name}={value!r} is no time to wait", remedy="give seconds > 0")
        if on_stall not in ("leave", "tell"):
            raise unknown("on_stall", on_stall, ["leave", "tell"])
        self._watcher: MonitorThread | None = None
        self._pid = os.getpid()
        if rank_and_size()[1] == 1:
            return
        warn = stall / 4 if warn is None else warn
        self._watcher = MonitorThread(
            _meet(lost),
            StallLimits(stall, lost),
            leaves_stalls=on_stall == "leave",
            warn=warn,
            grace=grace,
            launcher=ShutdownListener(),
        )
        self._hook()
        _watches.add(self)
        self._watcher.start()

    def __enter__(self) -> Self:
        if self._watcher is not None:
            self._watcher.inside = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watcher is None:
            return
        self._watcher.inside = False
        failed = None
        if error is not None:
            with contextlib.suppress(MemoryError):  # it may be what `error` is: then its end has to tell
                failed = self._explain(error, trace)
        self.close()
        if failed is not None and failed is not error:
            raise failed from error

    def close(self) -> None:
        """Stop watching and being watched; closing twice is closing once."""
        watcher, self._watcher = self._watcher, None
        if watcher is None or os.getpid() != self._pid:
            return
        self._unhook()
        _watches.discard(self)
        if not watcher.decided.is_set():
            watcher.publish(watcher.notice_of("done"))
        watcher.close()

    def slowest(self) -> Straggler | None:
        """Return the rank that works longest in a step, with how much longer than the others; None: not known.

        Waiting for other ranks is no work. It is told from work on CPUs only, and not with full-shard.

        Example:
            >>> Watchdog().slowest() is None
            True
        """
        watcher = self._watcher
        seconds = watcher.paces() if watcher is not None else {}
        found = slowest_of(seconds)
        if watcher is None or found is None:
            return None
        rank, factor = found
        return Straggler(rank, watcher.cards[rank].host, factor, seconds[rank])

    # ------------------------------------------------------------------ exceptions

    def _explain(self, error: BaseException, trace: TracebackType | None) -> PeerFailed | None:
        """Tell the others of an exception that passes, and return what is to be raised in its place, if anything."""
        watcher = self._watcher
        if watcher is None or isinstance(error, PeerFailed):
            return None
        if isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
            return None
        if is_symptom(error) and not watcher.decided.wait(_CAUSE_SECONDS):
            failed = watcher.hurry()
            if failed is None:
                watcher.publish(watcher.notice_of("leaves", name=type(error).__name__[:200]))
            return failed
        if watcher.decided.is_set() and not isinstance(error, KeyboardInterrupt):
            return watcher.error
        name = _first_line(error)
        watcher.publish(watcher.notice_of("raised", name=name, text=exception_text(error, trace)), wait=True)
        return None

    def _hook(self) -> None:
        """Hear of exceptions that nobody catches."""
        self._hooks: tuple[Callable[..., Any], Callable[..., Any]] = sys.excepthook, threading.excepthook
        before, before_in_thread = self._hooks
        reference = weakref.ref(self)

        def pass_on(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            watch = reference()
            if watch is not None and watch._watcher is not None and os.getpid() == watch._pid:
                failed = watch._explain(error, trace)
                watch.close()
                if failed is not None:
                    failed.__cause__ = error
                    kind, error, trace = type(failed), failed, failed.__traceback__
            before(kind, error, trace)

        def pass_on_in_thread(told: threading.ExceptHookArgs) -> None:
            watch = reference()
            if watch is not None and os.getpid() == watch._pid and told.exc_value is not None:
                watch._hear_of_thread(told.thread, told.exc_value)
            before_in_thread(told)

        self._own_hooks = pass_on, pass_on_in_thread
        sys.excepthook, threading.excepthook = pass_on, pass_on_in_thread

    def _hear_of_thread(self, thread: threading.Thread | None, error: BaseException) -> None:
        """Tell the others of an exception in a thread: the rank's own, if that is the one that trains."""
        watcher = self._watcher
        if watcher is None or isinstance(error, SystemExit):
            return
        if thread is not None and thread.ident == watcher.me.ident:
            self._explain(error, error.__traceback__)
            return
        text = exception_text(error, error.__traceback__)
        watcher.publish(watcher.notice_of("thread", name=_first_line(error), text=text))

    def _unhook(self) -> None:
        """Take the hooks back, unless somebody has put others over them."""
        if sys.excepthook is self._own_hooks[0]:
            sys.excepthook = self._hooks[0]
        if threading.excepthook is self._own_hooks[1]:
            threading.excepthook = self._hooks[1]


def _first_line(error: BaseException) -> str:
    text = ""
    with contextlib.suppress(Exception):
        text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:200].encode(errors="replace").decode().removesuffix(": ")


def _meet(lost: float) -> PeerMesh:
    """Tell all ranks where this one is, hear where they are, and return the connections to them; a collective."""
    rank, ranks = rank_and_size()
    keys = _told_by_all({"key": host_key()})
    alone = len({each["key"] for each in keys}) == 1
    listener = None
    for address in (LOOPBACK,) if alone else (own_address(), "0.0.0.0"):
        with contextlib.suppress(OSError):
            listener = listen(address)
            break
    assert listener is not None, "every host has addresses of its own"
    host, pid = os.uname().nodename, os.getpid()
    mine = MeshCard(
        rank,
        host,
        host_key(),
        pid,
        start_of(pid),
        threading.get_ident(),
        LOOPBACK if alone else own_address(),
        listener.getsockname()[1],
        secrets.token_hex(16),
    )
    cards = [MeshCard(**each) for each in _told_by_all(asdict(mine))]
    assert len(cards) == ranks, "one of each"
    return PeerMesh(mine, cards, listener, lost)


def _told_by_all(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what every rank tells, by rank."""
    return [json.loads(text) for text in gather_texts(json.dumps(facts))]


_watches: weakref.WeakSet[Watchdog] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for watch in list(_watches):
        watch.close()


def _forsake_all() -> None:
    for watch in list(_watches):
        if watch._watcher is not None:
            watch._watcher.forsake()
            watch._watcher = None


os.register_at_fork(after_in_child=_forsake_all)
