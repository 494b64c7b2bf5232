"""Lab: a network of hosts emulated on this machine for the duration of a with-statement."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, groupby
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline._core.job_key import JobKey
from paceline.errors import UsageError
from paceline.testing.netlab import lab_network, lab_requirements
from paceline.testing.netlab.lab_host import LabHost
from paceline.testing.netlab.lab_job import LabJob, LabProgram, LabResult, lab_torchrun_command
from paceline.testing.netlab.lab_network import (
    INTERFACE,
    InterfaceBytes,
    host_address,
    host_name,
    hosts_file,
    parse_link_rate,
    parse_traffic,
    plan_network,
)
from paceline.testing.netlab.lab_requirements import check_lab_program, is_python, search_path

__all__ = ["Lab"]

_FIRST_PORT, _PORTS = 29500, 1000


class Lab:
    """Emulated hosts, each with its own network, host name, process table and shared memory.

    Each has one link of limited rate to a switch (a star). They share this machine's disk and cores. Everything is
    removed when the lab is closed or this process ends, even by SIGKILL.

    Args:
        hosts: number of hosts, 1 to 250; they are numbered from 0 and named host0, host1, …
        rate: of every link per direction, such as ``"1Gbit/s"``, or bytes per second; None: unlimited.
        slow: rates of links that differ from it, by host number.
        delay: added to every packet from host to host, such as ``"1ms"``; needs netem in the kernel.

    Attributes:
        hosts: number of hosts.
        rates: of each host's link, in bytes per second; None: unlimited.
        addresses: IP address of each host.

    Raises:
        UsageError: an invalid number, rate or delay, or this machine lacks a requirement.
        HostFailed: a host could not be created.

    Example:
        >>> with Lab(hosts=2, rate="200Mbit/s", slow={1: "50Mbit/s"}) as lab:  # doctest: +SKIP
        ...     lab.torchrun(["train.py", "--steps", "20"], ranks_per_host=2)
        ...     print(lab.bytes(1))
    """

    def __init__(
        self,
        hosts: int,
        rate: str | float | None = None,
        *,
        slow: Mapping[int, str | float] | None = None,
        delay: str | float = 0.0,
    ) -> None:
        network = plan_network(hosts, rate, slow, delay)
        lab_requirements.require_lab(delay=network.delay > 0)
        self.hosts, self.rates = network.hosts, list(network.rates)
        self.addresses = [host_address(host) for host in range(hosts)]
        self._delay = network.delay
        self._ports = count()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._jobs: list[LabJob] = []
        self._key = JobKey.generate()
        self._nodes: dict[int, LabHost] = {}
        try:
            for host in (lab_network.SWITCH, *range(hosts)):  # they start concurrently
                name = "switch" if host == lab_network.SWITCH else host_name(host)
                self._nodes[host] = LabHost(name, hosts_file(hosts))
            pids = {host: node.ready() for host, node in self._nodes.items()}
            ipv6 = Path("/proc/net/if_inet6").exists()
            self._apply(lab_network.build_network(network, [pids[host] for host in range(hosts)], ipv6=ipv6))
            for host in range(hosts):
                self._nodes[host].receive_on_one_core(INTERFACE, host)
                self._nodes[lab_network.SWITCH].receive_on_one_core(lab_network.switch_port(host), host)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes of all hosts and remove the network; further calls do nothing."""
        while self._nodes:
            self._nodes.popitem()[1].close()
        while self._processes:
            self._processes.pop().wait()
        while self._jobs:
            self._jobs.pop().close()

    def run(
        self,
        command: str | Sequence[str],
        *,
        on: int | Iterable[int] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout: float | None = None,
        check: bool = True,
    ) -> list[LabResult]:
        """Run a command on hosts until it has ended on all of them, and return the results.

        Args:
            command: a Python script (its name ends with .py), ``-m`` and a module, or any program, then its arguments;
                or a shell command line.
            on: a host or several; None: all.
            env: variables to set in addition to those of this process and GLOO_SOCKET_IFNAME.
            cwd: folder to run in; None: the current one.
            timeout: seconds after which it is ended; None: no limit.
            check: if it fails on a host, end it on the others and raise.

        Raises:
            HostFailed: with `check`, it failed on a host; or time was up.
            UsageError: no such program, folder or host.
        """
        return _finish(self.start(command, on=on, env=env, cwd=cwd), timeout, check)

    def start(
        self,
        command: str | Sequence[str],
        *,
        on: int | Iterable[int] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> LabJob:
        """Start a command on hosts, and return at once; arguments as for :meth:`run`."""
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        chosen = self._chosen(on)
        folder, variables = self._checked(argv, env or {}, cwd)
        if is_python(argv):
            argv = [sys.executable, *argv]
        return self._start(dict.fromkeys(chosen, argv), variables, folder)

    def torchrun(
        self,
        program: Sequence[str],
        *,
        ranks_per_host: int = 2,
        on: int | Iterable[int] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout: float | None = None,
        check: bool = True,
    ) -> list[LabResult]:
        """Run a program as the ranks of one world on hosts until all have ended, and return the results.

        torchrun runs on every host: each host is a node, and rank 0 is on the first one. OMP_NUM_THREADS is 1
        unless set.

        Args:
            program: a Python script (its name ends with .py), ``-m`` and a module, or any command; then its arguments.
            ranks_per_host: processes per host.
            on: as for :meth:`run`.
            env: as for :meth:`run`.
            cwd: as for :meth:`run`.
            timeout: as for :meth:`run`.
            check: as for :meth:`run`.

        Raises:
            HostFailed: with `check`, a rank failed; or time was up.
            UsageError: no such program, folder or host, or fewer than one rank.
        """
        job = self.start_torchrun(program, ranks_per_host=ranks_per_host, on=on, env=env, cwd=cwd)
        return _finish(job, timeout, check)

    def start_torchrun(
        self,
        program: Sequence[str],
        *,
        ranks_per_host: int = 2,
        on: int | Iterable[int] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> LabJob:
        """Start a program as ranks, and return at once; arguments as for :meth:`torchrun`."""
        chosen = self._chosen(on)
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        folder, variables = self._checked(program, threads | dict(env or {}), cwd)
        port = _FIRST_PORT + next(self._ports) % _PORTS
        command_of_host = {
            host: lab_torchrun_command(
                program,
                node=node,
                nodes=len(chosen),
                ranks_per_host=ranks_per_host,
                master=chosen[0],
                port=port,
            )
            for node, host in enumerate(chosen)
        }
        return self._start(command_of_host, variables, folder)

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start a command on one host as `subprocess.Popen` does, with pipes and passed files.

        The returned process represents the command: it ends as the command does, and the command ends with it.
        """
        (host,) = self._chosen(host)
        options = {"env": self._environment({})} | options
        process = self._nodes[host].popen(command, options.pop("cwd", None) or Path.cwd(), **options)
        self._processes.append(process)
        return process

    def bytes(self, host: int) -> InterfaceBytes:
        """Return the bytes `host` has sent and received so far; two values can be subtracted."""
        (host,) = self._chosen(host)
        return parse_traffic(self._nodes[host].read("dev"))

    def rate(self, host: int, rate: str | float | None) -> None:
        """Change the rate of a host's link, in both directions; None: unlimited."""
        (host,) = self._chosen(host)
        self.rates[host] = None if rate is None else parse_link_rate(rate)
        self._apply(lab_network.change_link_rate(host, self.rates[host], self._delay))

    def cut(self, host: int) -> None:
        """Cut a host's link at the switch: packets are lost in both directions, as if the cable were unplugged."""
        (host,) = self._chosen(host)
        self._apply(lab_network.set_link_state(host, "down"))

    def mend(self, host: int) -> None:
        """Reconnect a host's link."""
        (host,) = self._chosen(host)
        self._apply(lab_network.set_link_state(host, "up"))

    def kill(self, host: int) -> None:
        """Kill every process of a host at one instant (SIGKILL); the host remains and can run others."""
        self._signal(host, signal.SIGKILL)

    def stop(self, host: int) -> None:
        """Stop every process of a host at one instant (SIGSTOP), until :meth:`resume`."""
        self._signal(host, signal.SIGSTOP)

    def resume(self, host: int) -> None:
        """Continue the processes of a stopped host."""
        self._signal(host, signal.SIGCONT)

    def _signal(self, host: int, number: int) -> None:
        (host,) = self._chosen(host)
        self._nodes[host].signal_all(number)

    def _apply(self, commands: Iterable[lab_network.NetworkCommand]) -> None:
        for (host, tool), group in groupby(commands, lambda one: (one.host, one.tool)):
            self._nodes[host].network(tool, [one.line for one in group])

    def _chosen(self, on: int | Iterable[int] | None) -> list[int]:
        """Return the selected hosts, each once, in order."""
        if not self._nodes:
            raise UsageError("this lab is closed", remedy="use it inside its with-statement")
        chosen = range(self.hosts) if on is None else [on] if isinstance(on, int) else sorted(set(on))
        for host in chosen:
            if host not in range(self.hosts):
                raise UsageError(f"no host {host!r}", remedy=f"valid: 0 to {self.hosts - 1}")
        if not chosen:
            raise UsageError(
                "no host selected", remedy=f"name some of 0 to {self.hosts - 1}, or None for all"
            )
        return list(chosen)

    def _checked(
        self, program: Sequence[str], env: Mapping[str, str], cwd: str | Path | None
    ) -> tuple[Path, dict[str, str]]:
        """Return the folder and variables for a program; raise if it can't run."""
        folder, variables = Path(cwd or ".").absolute(), self._environment(env)
        if not folder.is_dir():
            raise UsageError(f"can't run in {folder}: no such folder", remedy="name one that exists")
        check_lab_program(program, folder, variables["PATH"])
        return folder, variables

    def _start(
        self, command_of_host: Mapping[int, list[str]], variables: Mapping[str, str], folder: Path
    ) -> LabJob:
        self._jobs = [job for job in self._jobs if job.running()]
        self._processes = [process for process in self._processes if process.poll() is None]
        programs = []
        try:
            for host, command in command_of_host.items():
                programs.append(self._start_one(host, command, variables, folder))
        except BaseException:
            LabJob(programs).end()
            raise
        self._jobs.append(LabJob(programs))
        return self._jobs[-1]

    def _start_one(
        self, host: int, command: Sequence[str], variables: Mapping[str, str], folder: Path
    ) -> LabProgram:
        # Unlike pipes, files need no reader; nameless ones leave nothing on disk.
        out, err = (tempfile.TemporaryFile("ab+") for _ in range(2))  # noqa: SIM115 — the program closes them
        process = self.popen(
            host, command, env=variables, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        return LabProgram(host, process, out, err)

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a command: its PATH begins with this Python; all hosts have one job key."""
        network = {"GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONUNBUFFERED": "1"}
        return {**self._key.environment(), **os.environ, "PATH": search_path(), **network, **env}


def _finish(job: LabJob, timeout: float | None, check: bool) -> list[LabResult]:
    try:
        return job.wait(timeout, check=check)
    except BaseException:
        job.end()
        raise
