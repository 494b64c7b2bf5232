"""A host or the switch of a lab, as the process that owns it sees it: held, changed, entered, ended.

[Note: packets in order] What is sent over a veth pair is taken in by the core that sends it. A sender that moves to
another core would let packets overtake each other; TCP takes that for a loss and halves its rate. So one core takes
in all that comes to a device (receive packet steering, rps_cpus), as a network card does with the packets of a flow.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from paceline.errors import HostFailed
from paceline.testing.netlab import namespace_main
from paceline.testing.netlab.lab_requirements import tool_path

__all__ = ["LabHost"]

_END_SECONDS = 10.0
_MASK_CORES = 32  # a mask of more is written in groups


class LabHost:
    """Namespaces that live as long as this object is not closed and this process lives.

    Starting takes place in the background: call `ready` before anything else.

    Args:
        name: host name there.
        hosts: text of /etc/hosts there.
    """

    def __init__(self, name: str, hosts: str) -> None:
        self.name, self._pid = name, 0
        owner = os.pidfd_open(os.getpid())
        try:
            self._holder = subprocess.Popen(
                [*_script("hold"), name, str(owner)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[owner],
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for us
            )
        finally:
            os.close(owner)
        assert self._holder.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ready() tells why
            self._holder.stdin.write(hosts.encode() + b"\0")

    def ready(self) -> int:
        """Wait until the namespaces are there, and return the id of process number 1 there.

        Raises:
            HostFailed: they can't be made.
        """
        assert self._holder.stdout is not None
        if not self._pid:
            word, _, rest = self._holder.stdout.readline().decode().strip().partition(" ")
            if word != "ready":
                raise HostFailed(f"{self.name} can't be made: {rest or 'its first process ended'}")
            self._pid = int(rest)
        return self._pid

    def network(self, tool: str, lines: Sequence[str]) -> None:
        """Have ``ip`` or ``tc`` do `lines` in this place's network.

        Raises:
            HostFailed: a line was refused; the message quotes it.
        """
        network = f"--net=/proc/{self.ready()}/ns/net"
        done = subprocess.run(
            [tool_path("nsenter"), network, tool_path(tool), "-batch", "-"],
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = " ".join(done.stderr.split())
            raise HostFailed(
                f"{self.name}: {tool} -batch with {len(lines)} lines from {lines[0]!r} said: {said}"
            )

    def keep_order(self, device: str, number: int) -> None:
        """Have one core take in all that comes to a device, see [Note: packets in order].

        Args:
            device: its name.
            number: spreads devices over the cores.
        """
        cores = [core for core in sorted(os.sched_getaffinity(0)) if core < _MASK_CORES] or [0]
        inside = Path("/proc") / str(self.ready()) / "root"  # its files, as its first process sees them
        queues = inside / "sys/class/net" / device / "queues"
        with contextlib.suppress(OSError):
            for queue in queues.glob("rx-*/rps_cpus"):
                queue.write_text(f"{1 << cores[number % len(cores)]:x}")

    def popen(self, command: Sequence[str], folder: str | Path, **options: Any) -> subprocess.Popen[bytes]:
        """Start `command` here in `folder`; `options` are those of `subprocess.Popen`."""
        entry = [*_script("enter"), str(self.ready()), str(folder)]
        process = subprocess.Popen([*entry, *command], start_new_session=True, **options)
        return cast("subprocess.Popen[bytes]", process)

    def signal_all(self, number: int) -> None:
        """Send a signal to all processes here but number 1, at one instant.

        Raises:
            HostFailed: there is no such host any more.
        """
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self.ready()
        with contextlib.suppress(BrokenPipeError):
            self._holder.stdin.write(bytes([number]))
            if self._holder.stdout.read(1):
                return
        raise HostFailed(f"{self.name} is no more: its first process ended")

    def read(self, path: str) -> str:
        """Return a file below /proc/net of this place."""
        return Path(f"/proc/{self.ready()}/net/{path}").read_text()

    def close(self) -> None:
        """End every process here and return when they are gone; the kernel then removes the network."""
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        try:
            self._holder.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()
        self._holder.stdout.close()


def _script(role: str) -> list[str]:
    return [sys.executable, "-I", "-S", namespace_main.__file__, role]
