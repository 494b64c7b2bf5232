"""A network of hosts on this machine, as long as a with-statement lasts: `Lab`."""

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
    """Hosts on this machine, each with a network, host name, process table and shared memory of its own.

    They are the points of a star: one link each, of limited rate, to a switch. They share this machine's disk and
    cores. Everything is gone when the lab is closed or this process ends, whatever ends it.

    Args:
        hosts: how many, 1 to 250; they are numbered from 0 and called host0, host1, …
        rate: of every link in each direction, such as ``"1Gbit/s"``, or bytes per second; None: unlimited.
        slow: the rates of those hosts whose link has another, by number of host.
        delay: what a packet takes longer from host to host, such as ``"1ms"``; needs netem in the kernel.

    Attributes:
        hosts: how many there are.
        rates: of each host's link, in bytes per second; None: unlimited.
        addresses: IP address of each host.

    Raises:
        UsageError: a number, rate or delay that can't be, or this machine lacks what a lab needs.
        HostFailed: a host could not be made.

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
        asked = plan_network(hosts, rate, slow, delay)
        lab_requirements.require_lab(delay=asked.delay > 0)
        self.hosts, self.rates = asked.hosts, list(asked.rates)
        self.addresses = [host_address(host) for host in range(hosts)]
        self._delay = asked.delay
        self._ports = count()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._jobs: list[LabJob] = []
        self._places: dict[int, LabHost] = {}
        try:
            for host in (lab_network.SWITCH, *range(hosts)):  # they start side by side
                name = "switch" if host == lab_network.SWITCH else host_name(host)
                self._places[host] = LabHost(name, hosts_file(hosts))
            pids = {host: place.ready() for host, place in self._places.items()}
            ipv6 = Path("/proc/net/if_inet6").exists()
            self._carry_out(
                lab_network.build_network(asked, [pids[host] for host in range(hosts)], ipv6=ipv6)
            )
            for host in range(hosts):
                self._places[host].keep_order(INTERFACE, host)
                self._places[lab_network.SWITCH].keep_order(lab_network.switch_port(host), host)
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
        """Kill all processes of all hosts and remove the network; closing twice is closing once."""
        while self._places:
            self._places.popitem()[1].close()
        while self._processes:
            self._processes.pop().wait()
        while self._jobs:
            self._jobs.pop().settle()

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
        """Run a command on hosts, and return the results when it has ended on all of them.

        Args:
            command: a Python script (its name ends with .py), ``-m`` and a module, or any program, then its arguments;
                or a line for the shell.
            on: a host or several; None: all.
            env: variables to set besides those of this process and GLOO_SOCKET_IFNAME.
            cwd: folder to run in; None: the present one.
            timeout: seconds until it counts as hung; None: no limit.
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
        """Start a command on hosts and return at once; the arguments are those of :meth:`run`."""
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
        """Run a program as the ranks of one world on hosts, and return the results when all have ended.

        torchrun runs on every host: rank 0 is on the first one, and each host is a node. OMP_NUM_THREADS is 1
        unless set.

        Args:
            program: a Python script (its name ends with .py), ``-m`` and a module, or any command; then its arguments.
            ranks_per_host: processes on each host.
            on, env, cwd, timeout, check: as for :meth:`run`.

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
        """Start a program as ranks and return at once; the arguments are those of :meth:`torchrun`."""
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
        """Start a command on one host as `subprocess.Popen` does: for pipes, and files passed on.

        The process that is returned stands for the command: it ends as the command ends, and the command dies with it.
        """
        (host,) = self._chosen(host)
        options = {"env": self._environment({})} | options
        process = self._places[host].popen(command, options.pop("cwd", None) or Path.cwd(), **options)
        self._processes.append(process)
        return process

    def bytes(self, host: int) -> InterfaceBytes:
        """Return what `host` has sent and received so far; the difference of two is what went between."""
        (host,) = self._chosen(host)
        return parse_traffic(self._places[host].read("dev"))

    def rate(self, host: int, rate: str | float | None) -> None:
        """Change the rate of a host's link, in both directions; None: unlimited."""
        (host,) = self._chosen(host)
        self.rates[host] = None if rate is None else parse_link_rate(rate)
        self._carry_out(lab_network.change_link_rate(host, self.rates[host], self._delay))

    def cut(self, host: int) -> None:
        """Cut a host's link at the switch: packets are lost in both directions, as if the cable were pulled."""
        (host,) = self._chosen(host)
        self._carry_out(lab_network.set_link_state(host, "down"))

    def mend(self, host: int) -> None:
        """Connect a host's link again."""
        (host,) = self._chosen(host)
        self._carry_out(lab_network.set_link_state(host, "up"))

    def kill(self, host: int) -> None:
        """Kill every process of a host at one instant (SIGKILL); the host stays and can run others."""
        self._signal(host, signal.SIGKILL)

    def stop(self, host: int) -> None:
        """Stop every process of a host at one instant (SIGSTOP), until :meth:`resume`."""
        self._signal(host, signal.SIGSTOP)

    def resume(self, host: int) -> None:
        """Let the processes of a stopped host go on."""
        self._signal(host, signal.SIGCONT)

    def _signal(self, host: int, number: int) -> None:
        (host,) = self._chosen(host)
        self._places[host].signal_all(number)

    def _carry_out(self, steps: Iterable[lab_network.NetworkCommand]) -> None:
        for (host, tool), group in groupby(steps, lambda step: (step.host, step.tool)):
            self._places[host].network(tool, [step.line for step in group])

    def _chosen(self, on: int | Iterable[int] | None) -> list[int]:
        """Return the hosts that are meant, each once, in order."""
        if not self._places:
            raise UsageError("this lab is closed", remedy="use it inside its with-statement")
        chosen = range(self.hosts) if on is None else [on] if isinstance(on, int) else sorted(set(on))
        for host in chosen:
            if host not in range(self.hosts):
                raise UsageError(f"there is no host {host!r}", remedy=f"valid: 0 to {self.hosts - 1}")
        if not chosen:
            raise UsageError(
                "no host was named", remedy=f"name some of 0 to {self.hosts - 1}, or None for all"
            )
        return list(chosen)

    def _checked(
        self, program: Sequence[str], env: Mapping[str, str], cwd: str | Path | None
    ) -> tuple[Path, dict[str, str]]:
        """Return where a program runs and with which variables, once it is clear that it can."""
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
        # A file takes whatever comes while a pipe has to be emptied; a nameless one leaves nothing behind.
        out, err = (tempfile.TemporaryFile("ab+") for _ in range(2))  # noqa: SIM115 — the program closes them
        process = self.popen(
            host, command, env=variables, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
        return LabProgram(host, process, out, err)

    def _environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a command: this Python and its scripts are found first."""
        network = {"GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONUNBUFFERED": "1"}
        return {**os.environ, "PATH": search_path(), **network, **env}


def _finish(job: LabJob, timeout: float | None, check: bool) -> list[LabResult]:
    try:
        return job.wait(timeout, check=check)
    except BaseException:
        job.end()
        raise
