"""Host or switch of a lab, seen from the process that owns it: start, network set-up, programs, signals, end.

[Note: packets in order] Packets sent over a veth pair are received on the sender's core. A sender that moves to another
core would let packets overtake each other; TCP takes that for a loss and halves its rate. So one core receives all
packets of a device (receive packet steering, rps_cpus), as a network card does with the packets of a flow.
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
_MASK_CORES = 32  # masks of more cores are written in groups


class LabHost:
    """Namespaces of one host, until this object is closed or this process ends.

    They start in the background; the other methods wait until they are ready.

    Args:
        name: host name inside.
        hosts: text of /etc/hosts inside.
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
                start_new_session=True,  # Ctrl-C is for this process
            )
        finally:
            os.close(owner)
        assert self._holder.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ready() raises with the reason
            self._holder.stdin.write(hosts.encode() + b"\0")

    def ready(self) -> int:
        """Wait until the namespaces are ready, and return the id of their process number 1, as seen from outside.

        Raises:
            HostFailed: they can't be created.
        """
        assert self._holder.stdout is not None
        if not self._pid:
            word, _, rest = self._holder.stdout.readline().decode().strip().partition(" ")
            if word != "ready":
                raise HostFailed(f"{self.name} can't be created: {rest or 'its first process ended'}")
            self._pid = int(rest)
        return self._pid

    def network(self, tool: str, lines: Sequence[str]) -> None:
        """Run `lines` of ``ip`` or ``tc`` in this host's network namespace.

        Raises:
            HostFailed: a line failed; the message contains the tool's error.
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
            stderr = " ".join(done.stderr.split())
            raise HostFailed(
                f"{self.name}: {tool} -batch failed, with {len(lines)} lines from {lines[0]!r}: {stderr}"
            )

    def receive_on_one_core(self, device: str, number: int) -> None:
        """Receive all packets of a device on one core, see [Note: packets in order].

        Args:
            device: name of the network device.
            number: selects the core, to spread devices over the cores.
        """
        cores = [core for core in sorted(os.sched_getaffinity(0)) if core < _MASK_CORES] or [0]
        inside = Path("/proc") / str(self.ready()) / "root"  # its files, as seen by its first process
        queues = inside / "sys/class/net" / device / "queues"
        with contextlib.suppress(OSError):
            for queue in queues.glob("rx-*/rps_cpus"):
                queue.write_text(f"{1 << cores[number % len(cores)]:x}")

    def popen(self, command: Sequence[str], folder: str | Path, **options: Any) -> subprocess.Popen[bytes]:
        """Start `command` on this host in `folder`; `options` are those of `subprocess.Popen`."""
        entry = [*_script("enter"), str(self.ready()), str(folder)]
        process = subprocess.Popen([*entry, *command], start_new_session=True, **options)
        return cast("subprocess.Popen[bytes]", process)

    def signal_all(self, number: int) -> None:
        """Send a signal to all processes of this host except number 1, at one instant.

        Raises:
            HostFailed: the host has ended.
        """
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self.ready()
        with contextlib.suppress(BrokenPipeError):
            self._holder.stdin.write(bytes([number]))
            if self._holder.stdout.read(1):
                return
        raise HostFailed(f"{self.name} has ended: its first process ended")

    def read(self, path: str) -> str:
        """Return a file below /proc/net of this host."""
        return Path(f"/proc/{self.ready()}/net/{path}").read_text()

    def close(self) -> None:
        """End every process of this host, and wait for their end; the kernel then removes the network."""
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
