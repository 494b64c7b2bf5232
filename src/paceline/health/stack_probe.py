"""Where a thread stands: as text, as a number that changes when it moves, and told from outside Python's lock."""

from __future__ import annotations

import os
import re
import sys
import traceback
from types import FrameType, TracebackType

from paceline.health.heartbeat import clipped

__all__ = ["exception_text", "fingerprint", "frame_of", "in_collective", "section", "stack_of"]

_COLLECTIVES = tuple(
    os.path.join("", *path) + os.sep
    for path in (("torch", "distributed"), ("paceline", "backends"), ("paceline", "world"))
)
_TOP = 5
"""Frames in which a thread that waits in a collective shows that it does."""


def frame_of(ident: int) -> FrameType | None:
    """Return the innermost frame of a thread, None if it has ended."""
    return sys._current_frames().get(ident)


def fingerprint(frame: FrameType | None) -> int:
    """Return a number that is another one when the thread has moved, in all likelihood."""
    key = 0
    while frame is not None:
        key = hash((key, id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return key


def in_collective(frame: FrameType | None) -> bool:
    """Return whether a thread is inside a call of torch.distributed or of our backends."""
    for _ in range(_TOP):
        if frame is None:
            return False
        name = frame.f_code.co_filename
        if any(part in name for part in _COLLECTIVES):
            return True
        frame = frame.f_back
    return False


def stack_of(ident: int) -> str:
    """Return where a thread stands, as a traceback shows it; empty if it has ended."""
    frame = frame_of(ident)
    return "" if frame is None else clipped("".join(traceback.format_stack(frame)).rstrip())


def exception_text(error: BaseException, trace: TracebackType | None) -> str:
    """Return an exception with its traceback and its causes; only its name where there is no memory for more."""
    try:
        return clipped("".join(traceback.format_exception(type(error), error, trace)).rstrip())
    except Exception:  # noqa: BLE001 — its own __str__ may raise, and memory may have run out
        return type(error).__name__


def section(dump: str, ident: int) -> str:
    """Return the part on one thread of what `faulthandler` wrote, outermost frame first; empty if it is not whole.

    Example:
        >>> dump = 'Thread 0x0a (most recent call first):\\n  File "b.py", line 2 in f\\n  File "a.py", line 1 in g\\n'
        >>> print(section(dump, 10))
          File "a.py", line 1 in g
          File "b.py", line 2 in f
    """
    for head, body in re.findall(r"^(.*[Tt]hread 0x.*):\n((?:  .*\n)*)", dump, re.MULTILINE):
        found = re.search(r"0x([0-9a-f]+)", head)
        if found is not None and int(found[1], 16) == ident:
            return clipped("\n".join(reversed(body.splitlines())))
    return ""
