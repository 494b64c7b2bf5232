"""Description of a job for a cluster's launcher: program, hosts, ranks and resources (pure).

Every launcher is a function from this description to a command or the text of a file. It reads nothing and starts
nothing, so the result can be inspected first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from paceline._core.job_key import KEY_VARIABLE
from paceline.errors import UsageError

__all__ = ["DRAW_JOB_KEY", "ClusterJob", "run_command"]

DRAW_JOB_KEY = f"export {KEY_VARIABLE}=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
"""Line of a shell script that draws a job key; it is on no command line and in no file."""

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,52}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOST = re.compile(r"[A-Za-z0-9_.:-]+")


@dataclass(frozen=True)
class ClusterJob:
    """A program to be run as ranks on the hosts of a cluster.

    Attributes:
        program: a Python script, or ``-m`` and a module; then its own arguments.
        name: of the job: lower-case letters, digits and hyphens, as Kubernetes requires.
        hosts: number of hosts.
        host_names: their names, for launchers that need them; the rendezvous is on the first one.
        min_hosts: minimum number of hosts to continue with after a loss, where the launcher can; None: all.
        ranks_per_host: processes per host.
        cpus_per_rank: cores per rank.
        gpus_per_rank: GPUs per rank.
        memory: bytes per host; None: the cluster's default.
        seconds: time limit; None: the cluster's default.
        env: variables to set.
        folder: working directory, under the same path on every host; relative paths in the program's arguments start
            here, those of checkpoints too, so it should be on a shared disk. Empty: where the launcher is started.
        max_restarts: number of failures after which the ranks are restarted.
        port: of the rendezvous, on the first host.
        python: interpreter on the hosts.

    Raises:
        UsageError: a number or text is invalid.

    Example:
        >>> ClusterJob(("train.py", "--epochs", "3"), hosts=2, ranks_per_host=4).ranks
        8
    """

    program: tuple[str, ...]
    _: KW_ONLY
    name: str = "train"
    hosts: int = 1
    host_names: tuple[str, ...] = ()
    min_hosts: int | None = None
    ranks_per_host: int = 1
    cpus_per_rank: int = 1
    gpus_per_rank: int = 0
    memory: int | None = None
    seconds: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    max_restarts: int = 3
    port: int = 29400
    python: str = "python3"

    def __post_init__(self) -> None:
        _check_program(self.program)
        self._check_numbers()
        self._check_texts()

    @property
    def ranks(self) -> int:
        """World size with all hosts."""
        return self.hosts * self.ranks_per_host

    @property
    def fewest_hosts(self) -> int:
        """Minimum number of hosts to continue with."""
        return self.hosts if self.min_hosts is None else self.min_hosts

    @property
    def cpus_per_host(self) -> int:
        """Cores per host."""
        return self.ranks_per_host * self.cpus_per_rank

    @property
    def gpus_per_host(self) -> int:
        """GPUs per host."""
        return self.ranks_per_host * self.gpus_per_rank

    @property
    def first_host(self) -> str:
        """Name of the rendezvous host.

        Raises:
            UsageError: there are several hosts without names.
        """
        if self.host_names:
            return self.host_names[0]
        if self.hosts > 1:
            raise UsageError(
                f"{self.hosts} hosts, but no names, so the ranks have no rendezvous",
                remedy="name each of them, the rendezvous host first (--host)",
            )
        return "127.0.0.1"

    def variables(self) -> dict[str, str]:
        """Return the variables to set, with OMP_NUM_THREADS by default."""
        return {"OMP_NUM_THREADS": str(self.cpus_per_rank), **self.env}

    def _check_numbers(self) -> None:
        minimum = dict.fromkeys(("hosts", "ranks_per_host", "cpus_per_rank"), 1)
        minimum |= dict.fromkeys(("gpus_per_rank", "max_restarts"), 0)
        for name, least in minimum.items():
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)}", remedy=f"give {least} or more")
        if not 0 < self.port < 65536:
            raise UsageError(
                f"port={self.port} is not a port", remedy="give 1 to 65535; above 1023 needs no privileges"
            )
        if not 1 <= self.fewest_hosts <= self.hosts:
            raise UsageError(
                f"min_hosts={self.min_hosts}, of {self.hosts}", remedy=f"valid: 1 to {self.hosts}"
            )
        if self.memory is not None and self.memory < 1 << 20:
            raise UsageError(f"memory={self.memory} bytes a host", remedy="give 1MiB or more, such as 64GiB")
        if self.seconds is not None and not 60 <= self.seconds < math.inf:
            raise UsageError(
                f"a time limit of {self.seconds:g} s", remedy="give a minute or more, such as 8h"
            )

    def _check_texts(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"{self.name!r} is not a valid job name",
                remedy="lower-case letters, digits and hyphens, 54 at most, no hyphen at either end",
            )
        if self.host_names and len(set(self.host_names)) != self.hosts:
            names = ", ".join(self.host_names)
            raise UsageError(f"{self.hosts} hosts, but these names: {names}", remedy="name each of them once")
        for host in self.host_names:
            if not _HOST.fullmatch(host) or host.startswith("-"):
                raise UsageError(
                    f"{host!r} is not a host name", remedy="for example pc1, pc1.lab or 10.0.0.1"
                )
        for name in self.env:
            if not _VARIABLE.fullmatch(name):
                raise UsageError(f"{name!r} is not a variable name", remedy="letters, digits and _")
        for what, text in {"folder": self.folder, "python": self.python, **self.env}.items():
            _check_text(what, text)
        if "\n" in self.folder or (self.folder and not self.folder.startswith("/")):
            raise UsageError(
                f"folder {self.folder!r} is not the same everywhere",
                remedy="give an absolute path, without line breaks, that is valid on all hosts",
            )


def _check_program(program: tuple[str, ...]) -> None:
    if not program or not program[0] or program == ("-m",):
        raise UsageError("no program to run", remedy="name a script, such as train.py")
    if program[0].startswith("-") and program[0] != "-m":
        raise UsageError(
            f"{program[0]!r} is not a script",
            remedy="options of the launcher go before the script, its own after",
        )
    for word in program:
        _check_text("an argument", word)


def _check_text(what: str, text: str) -> None:
    if "\0" in text:
        raise UsageError(f"{what} has a zero byte: {text!r}", remedy="remove it: programs can't receive it")


def run_command(job: ClusterJob, rendezvous: str = "") -> list[str]:
    """Return the ``paceline run`` command that Slurm or Ray starts once on every host, the same on each.

    It names the rank that failed first, and restarts all from the newest checkpoint within a second, without losing
    the allocation.

    Args:
        job: to run.
        rendezvous: HOST:PORT of several hosts' rendezvous.

    Example:
        >>> " ".join(run_command(ClusterJob(("train.py", "--lr", "1"), ranks_per_host=2)))
        'python3 -m paceline run --nproc-per-node 2 --max-restarts 3 train.py --lr 1'
    """
    options = ["--nproc-per-node", str(job.ranks_per_host), "--max-restarts", str(job.max_restarts)]
    if job.hosts > 1:
        options += ["--nnodes", str(job.hosts), "--rendezvous", rendezvous, "--name", job.name]
        options += ["--min-ranks", str(job.fewest_hosts * job.ranks_per_host)]
    program = ["--module", *job.program[1:]] if job.program[0] == "-m" else list(job.program)
    return [job.python, "-m", "paceline", "run", *options, *program]
