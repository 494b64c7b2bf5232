"""`Watchdog`: names a rank that stalls, ends or raises on every other rank, within seconds.

The training thread only writes its state (`paceline._core.step_state`). A monitor thread does the rest:

    monitor_thread.py     sends and receives heartbeats; ends the training
    failure_detector.py   collects evidence; attribution.py decides on it; failure_text.py writes the error
    heartbeat.py, peer_mesh.py, peer_endpoint.py   messages, connections, addresses
    pending_connections.py, peer_handshake.py      connections that are not authenticated yet
    aggregation/          summaries of other hosts' ranks, up and down a tree
    thread_probe.py       state of the training thread; world/process_probe.py: of local processes
    abort_collectives.py  ends waits in collectives
    straggler.py          finds the slowest rank
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import secrets
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Literal, Self

import torch.distributed as dist

from paceline._core.job_key import KEY_FILE_VARIABLE, KEY_VARIABLE, JobKey
from paceline._core.processes.graceful_shutdown import ShutdownListener
from paceline.errors import (
    BackwardFailed,
    CollectiveError,
    EnvelopeError,
    MismatchError,
    PeerFailed,
    SyncError,
    UsageError,
    unknown,
)
from paceline.health.aggregation.groups import PeerGroups
from paceline.health.attribution import StallLimits
from paceline.health.monitor_thread import MonitorThread
from paceline.health.peer_endpoint import LOOPBACK, PeerEndpoint, open_listener, watchdog_address
from paceline.health.peer_handshake import world_key
from paceline.health.peer_mesh import PeerMesh
from paceline.health.straggler import Straggler
from paceline.health.thread_probe import format_exception
from paceline.world.control_collectives import gather_texts, rank_and_size
from paceline.world.live_file import LEFT_EXIT_CODE
from paceline.world.process_probe import host_key, process_start_ticks
from paceline.world.rendezvous import format_ranks

__all__ = ["Watchdog", "is_symptom"]

_ATTRIBUTION_SECONDS = 2.0
"""How long a rank whose connection failed waits for an attribution by others."""

_SIGNAL_STATUS = 128
_ORDERLY_CODES = (None, 0, LEFT_EXIT_CODE)


class Watchdog:
    """Watches all ranks while the block runs, and raises the same error on all when one of them fails.

    When a rank raises, ends, is stopped, becomes unreachable, or stands still while the others wait for it, every
    other rank raises `PeerFailed` with the rank, its host, step and phase, what happened, and its traceback or stack.
    Threads that wait in collectives are freed for that. All ranks make a Watchdog at the same place; in a world of
    one it does nothing.

    Args:
        stall: seconds after which a rank that stands still is named, if others wait for it. A rank whose stack
            changes is working; evaluation and checkpoints never count as standing still.
        lost: seconds after which a stopped process or an unreachable host is named; below 3, up to a second later;
            a process that is stopped and alone on its host, after 4.5 at the earliest.
        on_stall: ``"leave"``: a stall ends the training on all ranks; ``"tell"``: it is only logged.
        warn: seconds of waiting after which a warning is logged, once per step; None: a quarter of `stall`.
        grace: seconds to free the training thread of a rank that is to end; a thread that still has not moved is
            ended with its process: the error on standard error, exit code 70.

    Raises:
        UsageError: an argument is invalid.
        PeerFailed: a rank failed; at the end of the block.

    Example:
        >>> with Watchdog(stall=30) as watchdog:
        ...     for step in range(3):
        ...         slowest = watchdog.slowest()
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
                raise UsageError(f"{name}={value!r} is not a valid time", remedy="pass seconds > 0")
        if on_stall not in ("leave", "tell"):
            raise unknown("on_stall", on_stall, ["leave", "tell"])
        self._limits = StallLimits(stall, lost)
        self._leave_on_stall, self._grace = on_stall == "leave", grace
        self._warn = stall / 4 if warn is None else warn
        self._monitor: MonitorThread | None = None
        self._in_block = False
        self._pid = os.getpid()
        self._open()

    def _open(self) -> None:
        if rank_and_size()[1] == 1:
            return
        mesh, groups = _open_mesh(self._limits.lost)
        self._monitor = MonitorThread(
            mesh,
            groups,
            self._limits,
            leave_on_stall=self._leave_on_stall,
            warn=self._warn,
            grace=self._grace,
            shutdown=ShutdownListener(),
        )
        self._monitor.in_block = self._in_block
        self._install_hooks()
        _open_watchdogs.add(self)
        self._monitor.start()

    def rejoin(self) -> None:
        """Watch the ranks of the present default group, after it was made anew; all ranks call this.

        `close` ends the watch over the ranks before, whose end is no failure then.
        """
        self.close()
        self._open()

    def __enter__(self) -> Self:
        self._in_block = True
        if self._monitor is not None:
            self._monitor.in_block = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._in_block = False
        if self._monitor is None:
            return
        self._monitor.in_block = False
        failed = None
        if error is not None:
            with contextlib.suppress(MemoryError):  # maybe `error` itself; the end of the process reports it
                failed = self._report(error, trace)
        self.close()
        if failed is not None and failed is not error:
            raise failed from error

    def close(self) -> None:
        """Stop watching and being watched; may be called twice."""
        monitor, self._monitor = self._monitor, None
        if monitor is None or os.getpid() != self._pid:
            return
        self._remove_hooks()
        _open_watchdogs.discard(self)
        if not monitor.decided.is_set():
            monitor.publish(monitor.detector.own_notice("done"))
        monitor.close()

    def slowest(self) -> Straggler | None:
        """Return the rank that works longest per step, compared with the others; None: unknown.

        Waiting for other ranks does not count as work. Known on CPUs only, and not with full-shard.

        Example:
            >>> Watchdog().slowest() is None
            True
        """
        if self._monitor is None:
            return None
        found = self._monitor.slowest()
        if found is None:
            return None
        rank, factor, seconds = found
        return Straggler(rank, self._monitor.endpoints[rank].host, factor, seconds)

    # ------------------------------------------------------------------ exceptions

    def _report(self, error: BaseException, trace: TracebackType | None) -> PeerFailed | None:
        """Report an exception of the training thread; return the error to raise in its place, if any."""
        monitor = self._monitor
        if monitor is None or isinstance(error, PeerFailed):
            return None
        if isinstance(error, GeneratorExit) or (
            isinstance(error, SystemExit) and error.code in _ORDERLY_CODES
        ):
            return None
        if is_symptom(error) and not monitor.decided.wait(_ATTRIBUTION_SECONDS):
            failed = monitor.attribute_now()
            if failed is None:
                monitor.publish(monitor.detector.own_notice("leaves", name=type(error).__name__[:200]))
            return failed
        if monitor.decided.is_set() and not isinstance(error, KeyboardInterrupt):
            return monitor.error
        ended = _ending_signal(error)
        name = _first_line(error) if ended is None else f"{type(error).__name__}, ended by {ended}"
        text = format_exception(error, trace) if ended is None else ""  # where it was is no cause
        monitor.publish(monitor.detector.own_notice("raised", name=name, text=text), wait=True)
        return None

    def _report_thread(self, thread: threading.Thread | None, error: BaseException) -> None:
        """Report an exception of a thread: as the rank's own if it is the training thread."""
        monitor = self._monitor
        if monitor is None or isinstance(error, SystemExit):
            return
        if thread is not None and thread.ident == monitor.own.thread_ident:
            self._report(error, error.__traceback__)
            return
        text = format_exception(error, error.__traceback__)
        monitor.publish(monitor.detector.own_notice("thread", name=_first_line(error), text=text))

    def _install_hooks(self) -> None:
        """Report exceptions that nothing catches."""
        self._previous: tuple[Callable[..., Any], Callable[..., Any]] = sys.excepthook, threading.excepthook
        previous, previous_in_thread = self._previous
        reference = weakref.ref(self)

        def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            watchdog = reference()
            if watchdog is not None and watchdog._monitor is not None and os.getpid() == watchdog._pid:
                failed = watchdog._report(error, trace)
                watchdog.close()
                if failed is not None:
                    failed.__cause__ = error
                    kind, error, trace = type(failed), failed, failed.__traceback__
            previous(kind, error, trace)

        def report_thread(args: threading.ExceptHookArgs) -> None:
            watchdog = reference()
            if watchdog is not None and os.getpid() == watchdog._pid and args.exc_value is not None:
                watchdog._report_thread(args.thread, args.exc_value)
            previous_in_thread(args)

        self._hooks = report, report_thread
        sys.excepthook, threading.excepthook = self._hooks

    def _remove_hooks(self) -> None:
        """Restore the previous hooks, unless others were installed since."""
        if sys.excepthook is self._hooks[0]:
            sys.excepthook = self._previous[0]
        if threading.excepthook is self._hooks[1]:
            threading.excepthook = self._previous[1]


def _ending_signal(error: BaseException) -> str | None:
    """Return the name of the signal that made a handler exit with status 128 + its number, as shells do."""
    code = error.code if isinstance(error, SystemExit) else None
    with contextlib.suppress(ValueError):
        return signal.Signals(code - _SIGNAL_STATUS).name if isinstance(code, int) else None
    return None


def _first_line(error: BaseException) -> str:
    text = ""
    with contextlib.suppress(Exception):
        text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:200].encode(errors="replace").decode().removesuffix(": ")


# ------------------------------------------------------------------ symptoms of failures elsewhere

_SYMPTOM_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "wait timeout",
    "socket timeout",
    "socket closed",
    "gloo/transport",
    "nccl error",
    "nccl communicator",
    "remote process exited",
    "another rank ended or stopped answering",
)


def is_symptom(error: BaseException | None) -> bool:
    """Return whether `error`, or one of its causes, is the consequence of a failure on another rank.

    Example:
        >>> is_symptom(RuntimeError("Connection reset by peer")), is_symptom(RuntimeError("shape mismatch"))
        (True, False)
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if not isinstance(error, MismatchError | EnvelopeError):
            if isinstance(error, CollectiveError | BackwardFailed | dist.DistError):
                return True
            text = str(error).lower() if isinstance(error, RuntimeError | ConnectionError | SyncError) else ""
            if any(symptom in text for symptom in _SYMPTOM_TEXTS):
                return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


# ------------------------------------------------------------------ set-up and process exit


def _open_mesh(lost: float) -> tuple[PeerMesh, PeerGroups]:
    """Listen, and return the mesh and the groups of all ranks; a collective."""
    rank, ranks = rank_and_size()
    job_key = JobKey.from_environment(os.environ)
    keys = gather_texts(
        json.dumps([host_key(), "" if job_key is None else job_key.derive("watchdog check").hex()])
    )
    host_keys, checks = zip(*map(json.loads, keys), strict=True)
    _check_job_keys(checks)
    one_host = len(set(host_keys)) == 1
    listener = None
    for address in (LOOPBACK,) if one_host else (watchdog_address(), "0.0.0.0"):
        with contextlib.suppress(OSError):
            listener = open_listener(address)
            break
    assert listener is not None, "every host has an address"
    pid = os.getpid()
    own = PeerEndpoint(
        rank=rank,
        host=os.uname().nodename,
        host_key=host_key(),
        pid=pid,
        start_ticks=process_start_ticks(pid),
        thread_ident=threading.get_ident(),
        address=LOOPBACK if one_host else watchdog_address(),
        port=listener.getsockname()[1],
        token=secrets.token_hex(16) if rank == 0 else "",
    )
    endpoints = [PeerEndpoint(**json.loads(text)) for text in gather_texts(json.dumps(asdict(own)))]
    assert len(endpoints) == ranks
    groups = PeerGroups(host_keys)
    key = world_key(job_key, endpoints[0].token)
    peers, calls, mates = groups.peers(rank), groups.calls(rank), groups.mates(rank)
    return PeerMesh(own, endpoints, listener, lost, key=key, peers=peers, calls=calls, quiet=mates), groups


def _check_job_keys(checks: Sequence[str]) -> None:
    """Raise on every rank if the ranks do not have the same job key, or some have none."""
    if len(set(checks)) == 1:
        return
    differing = [rank for rank, check in enumerate(checks) if check != checks[0]]
    raise MismatchError(
        f"rank 0 has {'a' if checks[0] else 'no'} job key; ranks {format_ranks(differing)} do not have the same",
        rank=differing[0],
        remedy=f"set the same {KEY_VARIABLE} or {KEY_FILE_VARIABLE} on all hosts, or on none",
    )


_open_watchdogs: weakref.WeakSet[Watchdog] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for watchdog in list(_open_watchdogs):
        watchdog.close()


def _detach_all_after_fork() -> None:
    for watchdog in list(_open_watchdogs):
        if watchdog._monitor is not None:
            watchdog._monitor.mesh.close(forked=True)
            watchdog._monitor = None


os.register_at_fork(after_in_child=_detach_all_after_fork)
