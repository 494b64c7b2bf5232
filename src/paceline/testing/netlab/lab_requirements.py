"""Requirements of a lab: tools, privileges and kernel features of this machine, and the programs its hosts run."""

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
# Tried in temporary namespaces, to find the features that the kernel refuses.
_TRIALS = {
    "bridge": "ip link add name trial0 type bridge",
    "veth": "ip link add name trial1 type veth peer name trial2",
    "sch_tbf": "tc qdisc add dev lo root tbf rate 1mbit burst 16kb latency 100ms",
    "sch_netem": "tc qdisc replace dev lo root netem delay 1ms",
}
_TRIAL_SECONDS = 30.0


def require_lab(*, delay: bool = False) -> None:
    """Raise if no lab can run here.

    Args:
        delay: whether links have a delay.

    Raises:
        UsageError: a requirement is missing; the message names it and how to get it.
    """
    problem = missing(delay=delay)
    if problem is not None:
        raise problem


def missing(*, delay: bool = False) -> UsageError | None:
    """Return the error that :func:`require_lab` would raise; None if nothing is missing."""
    tools = [name for name in _TOOLS if _find(name) is None]
    problem = missing_facility(sys.platform, tools, _capabilities())
    if problem is None:
        problem = _kernel_problem(delay=delay)
    return problem


def missing_facility(platform: str, absent_tools: list[str], capabilities: int) -> UsageError | None:
    """Return the error for a machine with these properties; None if it can run a lab.

    Args:
        platform: `sys.platform`.
        absent_tools: required tools that were not found.
        capabilities: effective capabilities of this process, as a bit mask.
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
        names = " and ".join(without)
        return UsageError(f"a lab creates network namespaces: this process lacks {names}", remedy=_ELEVATE)
    return None


def tool_path(name: str) -> str:
    """Return the path of a tool; its name if it is not found."""
    return _find(name) or name


def _find(name: str) -> str | None:
    # administrators' tools are not on every user's PATH
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def _capabilities() -> int:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)


def _kernel_problem(*, delay: bool) -> UsageError | None:
    """Try a lab's operations in temporary namespaces, and return the error for those that the kernel refuses."""
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
    stderr = " ".join(tried.stderr.split())
    if tried.returncode:
        return UsageError(f"namespaces can't be created here: {stderr}", remedy=_ELEVATE)
    refused = tried.stdout.split()
    if refused == ["sch_netem"]:
        return UsageError(
            f"this kernel can't delay packets: it has no netem ({stderr})",
            remedy="load it (modprobe sch_netem), or omit the delay: rates only need tbf",
        )
    if refused:
        return UsageError(
            f"this kernel lacks features that a lab needs: {', '.join(refused)} ({stderr})",
            remedy=f"load it: modprobe -a {' '.join(refused)}",
        )
    return None


def search_path() -> str:
    """Return the PATH of programs on hosts: first this Python and its scripts."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


def is_python(program: Sequence[str]) -> bool:
    """Return whether `program` is run by Python: a script (its name ends with .py), or ``-m`` and a module."""
    return program[0] == "-m" or _is_script(program[0])


def check_lab_program(program: Sequence[str], folder: str | Path = ".", path: str | None = None) -> None:
    """Raise if a program does not exist, before it is started on several hosts.

    Args:
        program: a Python script (its name ends with .py), ``-m`` and a module, or any command; then its arguments.
        folder: working directory.
        path: PATH of the hosts; None: :func:`search_path`.

    Raises:
        UsageError: no such file or command.
    """
    if not program:
        raise UsageError("no program to run", remedy='pass its arguments, such as ["train.py"]')
    name = program[0]
    if _is_script(name):
        if not Path(folder, name).is_file():
            raise UsageError(
                f"no such script: {name}", remedy="check its path, which is relative to the folder to run in"
            )
    elif name != "-m":
        known = shutil.which(Path(folder, name) if os.sep in name else name, path=path or search_path())
        if known is None:
            raise UsageError(f"no such program: {name}", remedy="give a Python script (.py) or a command")


def _is_script(name: str) -> bool:
    return name.endswith(".py")
