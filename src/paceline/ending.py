"""How a process ended, in words."""

from __future__ import annotations

import signal

__all__ = ["how_ended", "signal_name"]


def signal_name(number: int) -> str:
    """Return what people call a signal; real-time signals have no names.

    Example:
        >>> signal_name(9), signal_name(40)
        ('SIGKILL', 'signal 40')
    """
    known = number in signal.Signals.__members__.values()
    return signal.Signals(number).name if known else f"signal {number}"


def how_ended(code: int) -> str:
    """Return how a process with this exit code ended; −n: by signal n.

    Example:
        >>> how_ended(3), how_ended(-9)
        ('ended with exit code 3', 'was ended by SIGKILL')
    """
    return f"ended with exit code {code}" if code >= 0 else f"was ended by {signal_name(-code)}"
