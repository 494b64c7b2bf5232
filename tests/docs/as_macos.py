"""Runs a script on two ranks without the system calls that macOS lacks: as_macos.py SCRIPT.

It hides Linux's calls from `os`, `select`, `mmap` and `socket`, and its /proc and /dev/shm from the paths that Python
opens, after torch is imported and before Paceline is. What it can't show: macOS's own torch, psutil and file system.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import mmap
import os
import platform
import runpy
import select
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import psutil  # noqa: F401 — before the platform changes, like torch
import torch
import torch._dynamo
import torch.distributed.fsdp

_LINUX_ONLY = {
    os: ("eventfd", "memfd_create", "pidfd_open", "sched_getaffinity", "sched_setaffinity", "posix_fadvise"),
    select: ("epoll",),
    mmap: ("MADV_HUGEPAGE", "MADV_REMOVE"),
    socket: ("SO_PEERCRED", "AF_NETLINK", "SOCK_CLOEXEC", "SOCK_NONBLOCK"),
}
_FOLDERS = ("/proc", "/sys", "/dev/shm")


def become_macos() -> None:
    """Hide what only Linux has from this process, except from psutil, which has another implementation there."""
    for module, names in _LINUX_ONLY.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    builtins.open = io.open = _without_folders(open)
    os.stat = _without_folders(os.stat)
    sys.platform = "darwin"
    platform.system, platform.machine = lambda: "Darwin", lambda: "arm64"


def _without_folders(call: Callable[..., Any]) -> Callable[..., Any]:
    def checked(path: Any, *args: Any, **options: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if (
            isinstance(path, str | os.PathLike)
            and str(path).startswith(_FOLDERS)
            and not caller.startswith("psutil")
        ):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return call(path, *args, **options)

    return checked


def run_rank(rank: int, script: str, folder: str) -> None:
    """Run the script as a rank of two, in a forked child."""
    code = 1
    try:
        os.environ |= {"PACELINE_INIT_METHOD": f"file://{folder}/meet", "RANK": str(rank), "WORLD_SIZE": "2"}
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            runpy.run_path(script, run_name="__main__")
        os.write(1, printed.getvalue().encode())  # in one piece, whatever the other rank prints
        code = 0
    except BaseException:  # noqa: BLE001 — a forked child must not continue as its parent
        traceback.print_exc()
    os._exit(code)


def main(script: str) -> int:
    """Return the worse exit code of the two ranks."""
    torch.set_num_threads(1)
    become_macos()
    import paceline.parallel.data_parallel  # noqa: F401 — once, for both

    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(2):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                run_rank(rank, script, folder)
        return max(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) for pid in ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
