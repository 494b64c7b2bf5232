"""State of the training thread: its stack as text, whether it moves, and the heartbeat that reports it."""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from types import FrameType, TracebackType

from paceline._core.step_state import step_state
from paceline.health.heartbeat import Heartbeat, clip_text

__all__ = [
    "TrainingThreadProbe",
    "current_frame",
    "format_exception",
    "format_stack",
    "in_collective",
    "stack_fingerprint",
    "stack_in_dump",
]

_COLLECTIVE_PATHS = tuple(
    os.path.join("", *path) + os.sep
    for path in (("torch", "distributed"), ("paceline", "backends"), ("paceline", "world"))
)
_TOP_FRAMES = 5
"""A thread that waits in a collective has a frame of it among this many innermost ones."""


def current_frame(ident: int) -> FrameType | None:
    """Return the innermost frame of a thread, None if it has ended."""
    return sys._current_frames().get(ident)


def stack_fingerprint(frame: FrameType | None) -> int:
    """Return a hash of the stack that changes, in all likelihood, when the thread moves."""
    key = 0
    while frame is not None:
        key = hash((key, id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return key


def in_collective(frame: FrameType | None) -> bool:
    """Return whether a thread is inside a call of torch.distributed or of Paceline's backends."""
    for _ in range(_TOP_FRAMES):
        if frame is None:
            return False
        name = frame.f_code.co_filename
        if any(path in name for path in _COLLECTIVE_PATHS):
            return True
        frame = frame.f_back
    return False


def format_stack(ident: int) -> str:
    """Return the stack of a thread in the form of a traceback; empty if it has ended."""
    frame = current_frame(ident)
    return "" if frame is None else clip_text("".join(traceback.format_stack(frame)).rstrip())


def format_exception(error: BaseException, trace: TracebackType | None) -> str:
    """Return an exception with its traceback and causes; only its type if there is no memory for more."""
    try:
        return clip_text("".join(traceback.format_exception(type(error), error, trace)).rstrip())
    except Exception:  # noqa: BLE001 — its own __str__ may raise, and memory may have run out
        return type(error).__name__


def stack_in_dump(dump: str, ident: int) -> str:
    """Return a thread's part of `faulthandler` output, outermost frame first; empty if it is missing.

    Example:
        >>> dump = 'Thread 0x0a (most recent call first):\\n  File "b.py", line 2 in f\\n  File "a.py", line 1 in g\\n'
        >>> print(stack_in_dump(dump, 10))
          File "a.py", line 1 in g
          File "b.py", line 2 in f
    """
    for head, body in re.findall(r"^(.*[Tt]hread 0x.*):\n((?:  .*\n)*)", dump, re.MULTILINE):
        found = re.search(r"0x([0-9a-f]+)", head)
        if found is not None and int(found[1], 16) == ident:
            return clip_text("\n".join(reversed(body.splitlines())))
    return ""


class TrainingThreadProbe:
    """Observes the training thread.

    Args:
        ident: of the thread.

    Attributes:
        fingerprint: of its stack at the latest observation.
        moved_at: ``time.monotonic()`` when the fingerprint last changed.
    """

    def __init__(self, ident: int) -> None:
        self._ident = ident
        self.fingerprint, self.moved_at = 0, time.monotonic()
        self._collective_since = 0.0  # in a collective that `step_state` doesn't know of

    def heartbeat(self, rank: int, sequence: int, stopped: tuple[int, ...]) -> Heartbeat:
        """Observe the thread and return the heartbeat that reports it."""
        now, frame = time.monotonic(), current_frame(self._ident)
        fingerprint = stack_fingerprint(frame)
        if fingerprint != self.fingerprint:
            self.fingerprint, self.moved_at = fingerprint, now
        waiting, age = step_state.waiting, time.perf_counter() - step_state.since
        if waiting or not in_collective(frame):
            self._collective_since = 0.0
        else:
            self._collective_since = self._collective_since or now
            waiting, age = True, now - self._collective_since
        return Heartbeat(
            rank,
            sequence,
            step=step_state.step,
            phase=step_state.phase,
            task=step_state.task,
            bucket=step_state.bucket,
            waiting=waiting,
            age=max(0.0, age),
            still=now - self.moved_at,
            rounds=step_state.rounds,
            busy_seconds=step_state.busy_seconds,
            sees_waiting=step_state.sees_waiting,
            stopped=stopped,
        )
