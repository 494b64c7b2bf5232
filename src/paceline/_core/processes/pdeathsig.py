"""Script that runs another program, which is killed when the process that started it ends.

    python pdeathsig.py PARENT_PID PROGRAM ARGUMENT …

Before exec it makes the kernel kill this process when its parent ends for whatever reason (Linux: prctl(2),
PR_SET_PDEATHSIG), a setting that outlives exec. Doing so between fork and exec (``preexec_fn``) is unsafe when the
parent has threads. On other systems than Linux the program outlives its parent.
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Make this process end with `parent`, and replace it by `command`."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the setting took effect
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
