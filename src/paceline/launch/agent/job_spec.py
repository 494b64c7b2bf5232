"""What is to be run, on how many ranks, and how patiently: checked before anything is started (pure but for files)."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import UsageError
from paceline.launch.agent.rendezvous_address import RendezvousAddress

__all__ = ["JobSpec", "JobTimeouts", "check_log_dir", "check_program"]


@dataclass(frozen=True)
class JobTimeouts:
    """How long things may take, in seconds.

    Attributes:
        beat: between two signs of life of a host.
        lost: without a sign of life after which a host counts as lost. The clocks of hosts may differ by half of it.
        last_call: that a world which could begin waits for missing hosts; torch's word.
        first_call: the same at the start of a run, when people start commands by hand.
        join: for enough hosts to be there, at the start and after a loss.
        leave: for ranks that listen to leave by themselves (`paceline._core.graceful_shutdown`), before they are
        asked by a signal.
        end: between asking a rank to end and killing it.
        follow: for the rank that failed first to end, when only ranks have that lost a peer.
    """

    heartbeat: float = 1.0
    lost: float = 4.0
    last_call: float = 3.0
    first_call: float = 30.0
    join: float = 300.0
    leave: float = 2.0
    end: float = 3.0
    follow: float = 1.0


@dataclass(frozen=True)
class JobSpec:
    """A program to be run as ranks, restarted after failures.

    Attributes:
        argv: arguments to this Python, such as ``["train.py", "--epochs", "3"]``.
        ranks: processes on this host.
        min_ranks: the least size of the world.
        hosts: how many there are at most.
        max_restarts: failures after which it goes on.
        address: of the rendezvous; None: one host, which needs none.
        name: of the run, where one server serves several.
        rejoin: whether hosts that come (back) have the world restarted, rather than wait for the next failure.
        env: variables to set besides those of this process.
        log_dir: folder for logs and ``restarts.jsonl``; None: kept only to explain a failure.
        progress: returns whether the ranks got on since it was asked last; None: after a minute they did.
        patience: how long things may take.

    Raises:
        UsageError: numbers that can't be, or contradict each other.
    """

    argv: Sequence[str]
    ranks: int
    min_ranks: int
    hosts: int = 1
    max_restarts: int = 3
    address: RendezvousAddress | None = None
    name: str = "run"
    rejoin: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    log_dir: Path | None = None
    progress: Callable[[], bool] | None = None
    timeouts: JobTimeouts = field(default_factory=JobTimeouts)

    def __post_init__(self) -> None:
        most = self.ranks * self.hosts
        if self.ranks < 1:
            raise UsageError(f"ranks={self.ranks}: a host runs at least one", remedy="ask for 1 or more")
        if self.hosts < 1:
            raise UsageError(f"hosts={self.hosts}: there is at least one", remedy="ask for 1 or more")
        if not 1 <= self.min_ranks <= most:
            each = f" ({self.hosts} hosts × {self.ranks})" if self.hosts > 1 else ""
            raise UsageError(
                f"min_ranks={self.min_ranks}, of {most} rank{'s' * (most != 1)}{each}",
                remedy=f"valid: 1 to {most}",
            )
        if self.max_restarts < 0:
            raise UsageError(f"max_restarts={self.max_restarts}", remedy="valid: 0 or more")
        if self.hosts > 1 and self.address is None:
            raise UsageError(
                f"{self.hosts} hosts, but no place where they meet",
                remedy="name one that all can reach: --rendezvous HOST:PORT, the same on every host",
            )
        if self.hosts == 1 and self.address is not None:
            raise UsageError(
                f"a rendezvous at {self.address}, but only one host",
                remedy="say how many there are: --hosts N",
            )

    @property
    def min_hosts(self) -> int:
        """The least number of hosts on which `min_ranks` find room."""
        return math.ceil(self.min_ranks / self.ranks)

    def shared(self) -> dict[str, object]:
        """Return what has to be the same on every host."""
        return {"hosts": self.hosts, "min_ranks": self.min_ranks, "max_restarts": self.max_restarts}


def check_program(argv: Sequence[str]) -> None:
    """Refuse a program that is not there.

    Raises:
        UsageError: nothing to run, or no such script.
    """
    if not argv:
        raise UsageError("there is no program to run", remedy="name a script, such as train.py")
    if not argv[0].startswith("-") and not Path(argv[0]).is_file():
        raise UsageError(f"no such script: {argv[0]}", remedy="check its path; a module is run with -m")


def check_log_dir(folder: Path | None) -> None:
    """Make the folder for logs, and refuse one that can't be written.

    Raises:
        UsageError: it can't be made or written.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UsageError(
            f"log_dir {folder} can't be written: {error.strerror}",
            remedy="name a folder that you may write to",
        ) from error
