"""What a launcher is to place on a cluster: a program, where it runs, how many ranks, what each needs (pure).

Every launcher is a function from this description to a command or the text of a file. It reads nothing and starts
nothing, so what will happen can be looked at first.

The command that a launcher places once on every host: ``paceline run`` with its ranks (pure).

Slurm and Ray place processes; which of them failed first, and that all start again from the newest checkpoint, within
a second and without losing the place on the cluster, is what `paceline run` is there for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.errors import UsageError

__all__ = ["ClusterJob", "run_command"]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,52}[a-z0-9])?")


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


_HOST = re.compile(r"[A-Za-z0-9_.:-]+")


_NUMBERS = ("hosts", "ranks_per_host", "cpus_per_rank", "gpus_per_rank", "max_restarts")


@dataclass(frozen=True)
class ClusterJob:
    """A program to be run as ranks on the hosts of a cluster.

    Attributes:
        program: a Python script, or ``-m`` and a module; then its own arguments.
        name: of the job: small letters, digits and hyphens, as Kubernetes has it.
        hosts: how many.
        host_names: their names, where a launcher has to be told; the ranks meet on the first.
        min_hosts: the least number to go on with after a loss, where the launcher can; None: all.
        ranks_per_host: processes on each host.
        cpus_per_rank, gpus_per_rank: what each rank is given.
        memory: bytes on each host; None: what the cluster gives.
        seconds: the time limit; None: what the cluster gives.
        env: variables to set.
        folder: where the program runs, under the same path on every host; paths in its arguments, that of its
            checkpoints too, start here, so it is to be on a disk that all hosts share. Empty: where the launcher
            itself is started.
        max_restarts: failures after which the ranks are started again.
        port: where the ranks meet, on the first host.
        python: the interpreter on the hosts.

    Raises:
        UsageError: a number or name that can't be.

    Example:
        >>> ClusterJob(("train.py", "--epochs", "3"), hosts=2, ranks_per_host=4).ranks
        8
    """

    program: tuple[str, ...]
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
        for name in _NUMBERS:
            least = 0 if name in ("gpus_per_rank", "max_restarts") else 1
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)}", remedy=f"give {least} or more")
        if not 0 < self.port < 65536:
            raise UsageError(
                f"port={self.port} is no port", remedy="give 1 to 65535; above 1023 needs no right"
            )
        if not 1 <= self.fewest_hosts <= self.hosts:
            raise UsageError(
                f"min_hosts={self.min_hosts}, of {self.hosts}", remedy=f"valid: 1 to {self.hosts}"
            )
        self._check_amounts()
        self._check_texts()

    @property
    def ranks(self) -> int:
        """The world size, with all hosts."""
        return self.hosts * self.ranks_per_host

    @property
    def fewest_hosts(self) -> int:
        """The least number of hosts that it goes on with."""
        return self.hosts if self.min_hosts is None else self.min_hosts

    @property
    def cpus_per_host(self) -> int:
        """The cores that it needs on each host."""
        return self.ranks_per_host * self.cpus_per_rank

    @property
    def gpus_per_host(self) -> int:
        """The GPUs that it needs on each host."""
        return self.ranks_per_host * self.gpus_per_rank

    @property
    def first_host(self) -> str:
        """The name of the host where the ranks meet.

        Raises:
            UsageError: there are several, and they have no names.
        """
        if self.host_names:
            return self.host_names[0]
        if self.hosts > 1:
            raise UsageError(
                f"{self.hosts} hosts, but no names: the ranks can't know where to meet",
                remedy="name each of them, the one where the ranks meet first (--host)",
            )
        return "127.0.0.1"

    def variables(self) -> dict[str, str]:
        """Return the variables to set, with a rank's threads, unless they are among them."""
        return {"OMP_NUM_THREADS": str(self.cpus_per_rank), **self.env}

    def _check_amounts(self) -> None:
        if self.memory is not None and self.memory < 1 << 20:
            raise UsageError(f"memory={self.memory} bytes a host", remedy="give 1MiB or more, such as 64GiB")
        if self.seconds is not None and not 60 <= self.seconds < math.inf:
            raise UsageError(
                f"a time limit of {self.seconds:g} s", remedy="give a minute or more, such as 8h"
            )

    def _check_texts(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UsageError(
                f"{self.name!r} is no name of a job",
                remedy="small letters, digits and hyphens, 54 at most, no hyphen at either end",
            )
        if self.host_names and len(set(self.host_names)) != self.hosts:
            told = ", ".join(self.host_names)
            raise UsageError(f"{self.hosts} hosts, but these names: {told}", remedy="name each of them once")
        for host in self.host_names:
            if not _HOST.fullmatch(host) or host.startswith("-"):
                raise UsageError(
                    f"{host!r} is no name of a host", remedy="for example pc1, pc1.lab or 10.0.0.1"
                )
        for name in self.env:
            if not _VARIABLE.fullmatch(name):
                raise UsageError(f"{name!r} is no name of a variable", remedy="letters, digits and _")
        for what, text in {"folder": self.folder, "python": self.python, **self.env}.items():
            _check_text(what, text)
        if "\n" in self.folder or (self.folder and not self.folder.startswith("/")):
            raise UsageError(
                f"folder {self.folder!r} is not the same everywhere",
                remedy="give an absolute path, without line breaks, that means the same on all hosts",
            )


def _check_program(program: tuple[str, ...]) -> None:
    if not program or not program[0] or program == ("-m",):
        raise UsageError("there is no program to run", remedy="name a script, such as train.py")
    if program[0].startswith("-") and program[0] != "-m":
        raise UsageError(
            f"{program[0]!r} is no script",
            remedy="options of the launcher go before the script, its own after",
        )
    for word in program:
        _check_text("an argument", word)


def _check_text(what: str, text: str) -> None:
    if "\0" in text:
        raise UsageError(f"{what} has a zero byte: {text!r}", remedy="no program can be given that")


def run_command(work: ClusterJob, rendezvous: str = "") -> list[str]:
    """Return the command that runs the ranks of one host, the same on each.

    Args:
        work: what is to be run.
        rendezvous: HOST:PORT where several hosts meet.

    Example:
        >>> " ".join(run_command(ClusterJob(("train.py", "--lr", "1"), ranks_per_host=2)))
        'python3 -m paceline run --ranks 2 --max-restarts 3 train.py --lr 1'
    """
    options = ["--ranks", str(work.ranks_per_host), "--max-restarts", str(work.max_restarts)]
    if work.hosts > 1:
        options += ["--hosts", str(work.hosts), "--rendezvous", rendezvous, "--name", work.name]
        options += ["--min-ranks", str(work.fewest_hosts * work.ranks_per_host)]
    program = ["--module", *work.program[1:]] if work.program[0] == "-m" else list(work.program)
    return [work.python, "-m", "paceline", "run", *options, *program]
