"""Specification of a job for `paceline run`: program, ranks, hosts and time-outs, checked before anything starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Literal

from paceline._core.format import plural
from paceline.errors import UsageError, unknown
from paceline.launch.agent.rendezvous_address import RendezvousAddress

__all__ = ["JobSpec", "JobTimeouts", "check_script"]


@dataclass(frozen=True, kw_only=True)
class JobTimeouts:
    """Time-outs of a job, in seconds.

    Attributes:
        last_call: that a world which could begin waits for missing hosts (torch's term).
        first_call: the same at the start of a job, when people start commands by hand.
        join: until enough hosts have joined, at the start and after a loss.
        graceful: for ranks that listen to shut down by themselves, before SIGTERM
            (`paceline._core.processes.graceful_shutdown`).
        end: between SIGTERM and SIGKILL.
        follow: for the rank that failed first to end, if all failed ranks report a lost peer.
        leave: for ranks to save and leave after a warning to the launcher, before SIGKILL; where the platform gives
            less (Kubernetes 30 s, spot machines 120 s), it ends the launcher too.
    """

    last_call: float = 3.0
    first_call: float = 30.0
    join: float = 300.0
    graceful: float = 2.0
    end: float = 3.0
    follow: float = 1.0
    leave: float = 600.0


@dataclass(frozen=True)
class JobSpec:
    """A program to be run as ranks, and restarted after failures.

    Attributes:
        argv: arguments to this Python, such as ``["train.py", "--epochs", "3"]``.
        ranks: processes on this host.
        min_ranks: minimum world size.
        hosts: maximum number of hosts.
        max_restarts: number of failures after which it is restarted.
        address: of the rendezvous; None: a single host needs none.
        name: of the job, where one server serves several.
        rejoin: restart the world when a host joins, rather than at the next failure; a live world admits it at once.
        recovery: ``"live"``: ranks that can recover in place go on when others end; ``"restart"``: all end and restart.
        env: variables to set in addition to those of this process.
        insecure: several hosts go without a job key.
        log_dir: folder for logs and ``restarts.jsonl``; None: logs are kept only to explain a failure.
        progress: returns whether the ranks made progress since the last call; None: they did if they ran for a minute.
        timeouts: see `JobTimeouts`.

    Raises:
        UsageError: values are out of range or contradict each other.
    """

    argv: Sequence[str]
    ranks: int
    min_ranks: int
    _: KW_ONLY
    hosts: int = 1
    max_restarts: int = 3
    address: RendezvousAddress | None = None
    name: str = "run"
    rejoin: bool = True
    recovery: Literal["live", "restart"] = "live"
    env: Mapping[str, str] = field(default_factory=dict)
    insecure: bool = False
    log_dir: Path | None = None
    progress: Callable[[], bool] | None = None
    timeouts: JobTimeouts = field(default_factory=JobTimeouts)

    def __post_init__(self) -> None:
        if self.recovery not in ("live", "restart"):
            raise unknown("recovery", self.recovery, ("live", "restart"))
        most = self.ranks * self.hosts
        for name, least in (("ranks", 1), ("hosts", 1), ("max_restarts", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)}", remedy=f"give {least} or more")
        if not 1 <= self.min_ranks <= most:
            each = f" ({self.hosts} hosts × {self.ranks})" if self.hosts > 1 else ""
            raise UsageError(
                f"min_ranks={self.min_ranks}, of {plural(most, 'rank')}{each}", remedy=f"valid: 1 to {most}"
            )
        if self.hosts > 1 and self.address is None:
            raise UsageError(
                f"{self.hosts} hosts, but no rendezvous",
                remedy="give an address that all can reach: --rendezvous HOST:PORT, the same on every host",
            )
        if self.hosts == 1 and self.address is not None:
            raise UsageError(
                f"a rendezvous at {self.address}, but only one host", remedy="give their number: --nnodes N"
            )

    @property
    def min_hosts(self) -> int:
        """Minimum number of hosts for `min_ranks`."""
        return math.ceil(self.min_ranks / self.ranks)

    def shared(self) -> dict[str, object]:
        """Return the settings that must be equal on every host."""
        return {"hosts": self.hosts, "min_ranks": self.min_ranks, "max_restarts": self.max_restarts}


def check_script(argv: Sequence[str]) -> None:
    """Raise UsageError if no program is given, or the script does not exist."""
    if not argv:
        raise UsageError("no program to run", remedy="name a script, such as train.py")
    if not argv[0].startswith("-") and not Path(argv[0]).is_file():
        raise UsageError(f"no such script: {argv[0]}", remedy="check its path; a module is run with -m")
