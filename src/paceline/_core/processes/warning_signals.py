"""SIGTERM and SIGUSR1 as warnings that the machine, or the time of the job, is about to end.

A scheduler may signal every process of a job, and a launcher passes the signal on to its ranks, so that a process gets
it twice. So signals within `SAME_SECONDS` of the first one are the same warning; a later one ends the process at once.
A process that learns of the warning in another way, such as from another host, takes its first signal for the same.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

__all__ = [
    "SAME_SECONDS",
    "WARNING_SIGNALS",
    "WarnedExit",
    "WarningSignals",
    "act_by_default",
    "warnings_raise",
]

WARNING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

SAME_SECONDS = 2.0
"""How long after the first signal further ones are the same warning."""


class WarningSignals:
    """Handlers of this process that take the first signal as a warning; a later one has its default action.

    Args:
        take: called in the main thread with the number of the first signal.
        again: called with the number of a later one; None: it ends the process.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        take: Callable[[int], None],
        again: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._take, self._again, self._clock = take, again or act_by_default, clock
        self._first: float | None = None
        self._warned_otherwise = False
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}

    @property
    def taken(self) -> bool:
        """Whether a warning has come, by a signal or in another way."""
        return self._warned_otherwise or self._first is not None

    def note_warning(self) -> None:
        """Note that a warning has come in another way: the first signal, whenever it comes, is the same."""
        self._warned_otherwise = True

    def install(self, numbers: Sequence[int] = WARNING_SIGNALS, *, replace: bool = False) -> list[int]:
        """Install the handlers, in the main thread only, and return the numbers that have them now.

        Args:
            numbers: of the signals.
            replace: replace handlers of others too; else only the default action.
        """
        if threading.current_thread() is not threading.main_thread():
            return []
        if not self._before or self._pid != os.getpid():
            self._first, self._warned_otherwise, self._pid = None, False, os.getpid()
        for number in numbers:
            if number not in self._before and (replace or _has_default_action(number)):
                self._before[number] = signal.signal(number, self._handle)
        return list(self._before)

    def restore(self) -> None:
        """Restore the handlers before, unless others have been installed since; in the main thread only."""
        if threading.current_thread() is threading.main_thread():
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, before)
            self._before.clear()

    def ignore_at_exit(self) -> None:
        """Ignore the signals while the interpreter ends: it resets handlers, so a repetition would end this process."""
        numbers, pid = list(self._before), os.getpid()

        def ignore() -> None:
            for number in numbers if os.getpid() == pid else ():
                if signal.getsignal(number) in (self._handle, signal.SIG_DFL):
                    signal.signal(number, signal.SIG_IGN)

        atexit.register(ignore)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child: it is warned of nothing, but may be ended by SIGTERM
            if number == signal.SIGTERM:
                act_by_default(number)
            return
        now = self._clock()
        if self._first is None:
            self._first = now
            if not self._warned_otherwise:
                self._take(number)
        elif now - self._first >= SAME_SECONDS:
            self._again(number)


def act_by_default(number: int) -> None:
    """Let a signal have its default action on this process; in the main thread only."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _has_default_action(number: int) -> bool:
    """Return whether neither Python nor C code (such as ``faulthandler.register``) handles or ignores a signal."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            caught = next(int(line[7:], 16) for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return True
    return not caught >> (number - 1) & 1


class WarnedExit(SystemExit):
    """Raised by the first signal in `warnings_raise`; ``code`` is 128 + its number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


@contextlib.contextmanager
def warnings_raise() -> Iterator[WarningSignals]:
    """Turn the first SIGTERM or SIGUSR1 into `WarnedExit`, a later one and SIGHUP into SystemExit; in the main thread.

    A signal that this process ignores (SIGHUP under nohup) stays ignored. After ``note_warning()`` of the yielded
    object the first signal does nothing.
    """

    def warned(number: int) -> None:
        raise WarnedExit(number)

    def ends(number: int, frame: FrameType | None = None) -> None:
        raise SystemExit(128 + number)

    heard = [number for number in WARNING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    signals = WarningSignals(warned, ends)
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    hangup = signal.getsignal(signal.SIGHUP)
    signals.install(heard, replace=True)
    if hangup is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, ends)
    try:
        yield signals
    finally:
        if signals.taken:
            signals.ignore_at_exit()
        signal.signal(signal.SIGHUP, hangup)
        signals.restore()
