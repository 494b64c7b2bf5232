"""Become another program that dies with the process that started it.

    python leash.py PARENT_PID PROGRAM ARGUMENT …

Run as a script before the program itself: the kernel is asked to kill this process when its parent ends for
whatever reason (Linux: prctl(2), PR_SET_PDEATHSIG), and the wish outlives exec. Asking between fork
and exec instead (``preexec_fn``) is unsafe when the parent has threads. Elsewhere than on Linux the program
runs without a leash.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Put this process on the leash of `parent` and replace it by `command`."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the kernel knew of the wish
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
