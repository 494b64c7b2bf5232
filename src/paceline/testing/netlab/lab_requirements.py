"""What a lab needs of this machine, and what of it is missing.

Programs that hosts shall run: where they are looked for, and that they are there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.errors import UsageError

__all__ = [
    "check_lab_program",
    "is_python",
    "missing",
    "missing_facility",
    "require_lab",
    "search_path",
    "tool_path",
]

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}


_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21  # <linux/capability.h>


_ELEVATE = (
    'run it as root: sudo "$(command -v paceline)" lab …; or, where users may make namespaces: '
    "unshare --user --map-root-user paceline lab …; in a container: docker run --privileged"
)


# Tried in namespaces that end with the shell; prints the name of each thing that the kernel refuses.
_TRIALS = {
    "bridge": "ip link add name trial0 type bridge",
    "veth": "ip link add name trial1 type veth peer name trial2",
    "sch_tbf": "tc qdisc add dev lo root tbf rate 1mbit burst 16kb latency 100ms",
    "sch_netem": "tc qdisc replace dev lo root netem delay 1ms",
}


_TRIAL_SECONDS = 30.0


def require_lab(*, delay: bool = False) -> None:
    """Raise if no lab can be made here.

    Args:
        delay: whether links shall have a delay.

    Raises:
        UsageError: something is missing; the message says what, and how to get it.
    """
    problem = missing(delay=delay)
    if problem is not None:
        raise problem


def missing(*, delay: bool = False) -> UsageError | None:
    """Return the error that :func:`require_lab` would raise, None if nothing is missing."""
    tools = [name for name in _TOOLS if _find(name) is None]
    problem = missing_facility(sys.platform, tools, _capabilities())
    if problem is None:
        problem = _kernel_problem(delay=delay)
    return problem


def missing_facility(platform: str, absent_tools: list[str], capabilities: int) -> UsageError | None:
    """Return what facts about this machine make impossible, None if nothing.

    Args:
        platform: as `sys.platform` tells it.
        absent_tools: those that were not found.
        capabilities: the effective ones of this process, a bit each.
    """
    if platform != "linux":
        return UsageError(
            f"a lab needs Linux; this is {platform}", remedy="try it in a Linux virtual machine"
        )
    if absent_tools:
        packages = " ".join(sorted({_TOOLS[name] for name in absent_tools}))
        return UsageError(
            f"a lab needs {', '.join(absent_tools)}: not found",
            remedy=f"install the package {packages} (apt-get install {packages}, dnf install {packages})",
        )
    wanted = {"CAP_NET_ADMIN": _CAP_NET_ADMIN, "CAP_SYS_ADMIN": _CAP_SYS_ADMIN}
    without = [name for name, bit in wanted.items() if not capabilities >> bit & 1]
    if without:
        told = " and ".join(without)
        return UsageError(f"a lab makes network namespaces: this process lacks {told}", remedy=_ELEVATE)
    return None


def tool_path(name: str) -> str:
    """Return where a tool is."""
    return _find(name) or name


def _find(name: str) -> str | None:
    """Return where a tool is; those of the administrator are not on everyone's path."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def _capabilities() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)


def _kernel_problem(*, delay: bool) -> UsageError | None:
    """Try what a lab does in namespaces that nobody keeps, and return what the kernel refused."""
    trials = {name: line for name, line in _TRIALS.items() if delay or name != "sch_netem"}
    lines = [f"{_find(line[:2])}{line[2:]} || echo {name}" for name, line in trials.items()]
    spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--mount-proc", "--fork"]
    tried = subprocess.run(
        [tool_path("unshare"), *spaces, "sh", "-c", "\n".join([*lines, "true"])],
        capture_output=True,
        text=True,
        check=False,
        timeout=_TRIAL_SECONDS,
    )
    said = " ".join(tried.stderr.split())
    if tried.returncode:
        return UsageError(f"no namespaces can be made here: {said}", remedy=_ELEVATE)
    refused = tried.stdout.split()
    if refused == ["sch_netem"]:
        return UsageError(
            f"this kernel can't delay packets: it has no netem ({said})",
            remedy="load it (modprobe sch_netem), or leave the delay out: rates need tbf alone",
        )
    if refused:
        return UsageError(
            f"this kernel lacks what a lab is made of: {', '.join(refused)} ({said})",
            remedy=f"load it: modprobe -a {' '.join(refused)}",
        )
    return None


def search_path() -> str:
    """Return the PATH of programs on hosts: this Python and its scripts come first."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def is_python(program: Sequence[str]) -> bool:
    """Return whether Python runs `program`: a script, by its name, or ``-m`` and a module."""
    return program[0] == "-m" or _is_script(program[0])


def check_lab_program(program: Sequence[str], folder: str | Path = ".", path: str | None = None) -> None:
    """Refuse a program that is not there, before it is started on several hosts.

    Args:
        program: a Python script (its name ends with .py), ``-m`` and a module, or any command; then its arguments.
        folder: where it will run.
        path: the PATH of the hosts; None: as :func:`search_path` has it.

    Raises:
        UsageError: no such file or command.
    """
    if not program:
        raise UsageError("there is no program to run", remedy='pass its arguments, such as ["train.py"]')
    name = program[0]
    if _is_script(name):
        if not Path(folder, name).is_file():
            raise UsageError(
                f"no such script: {name}", remedy="check its path, which starts at the folder to run in"
            )
    elif name != "-m":
        known = shutil.which(Path(folder, name) if os.sep in name else name, path=path or search_path())
        if known is None:
            raise UsageError(f"no such program: {name}", remedy="give a Python script (.py) or a command")


def _is_script(name: str) -> bool:
    return name.endswith(".py")
