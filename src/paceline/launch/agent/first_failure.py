"""Failures of ranks and hosts, and which of several was the first (pure).

[Note: secondary failures] When a rank ends, the others see its connections close, raise, and end too, some of them
sooner than the process that closed them; and the clocks of hosts differ. So the first failure is not the earliest one:
failures whose own last lines report a lost peer are secondary, and rank after all others. Among the others the order
counts in which the hosts reported them at the rendezvous.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from paceline._core.processes.process_exit import describe_exit
from paceline.world.live_file import LEFT_EXIT_CODE

__all__ = ["RankFailure", "first_failure", "is_secondary"]

_PEER_LOST = re.compile(
    r"\b(PeerLost|PeerFailed|BackwardFailed|MissingRanks)\b|Connection (reset|closed|refused) by peer|Connection reset|"
    r"Connection closed|Connection refused|Broken pipe|remote process exited|DistNetworkError|failed to recv"
)
_QUOTED = "| "  # starts lines in which `paceline.Watchdog` cites another rank
_REASON_LINES = 5  # the last lines say why a process ended
_USAGE_EXIT_CODE = 2  # of argparse, typer, and Paceline's own commands
_USAGE_ERROR = re.compile(r"^(paceline\.errors\.)?UsageError: ")


@dataclass(frozen=True)
class RankFailure:
    """A rank that ended with an error, or a host that was lost.

    Attributes:
        host: host name.
        member: id of the agent on that host.
        rank: number in the world; None for a whole host.
        local_rank: number on the host; None for a whole host.
        exit_code: of the process, −n for signal n; None for a host.
        seconds: how long the ranks had been running.
        lines: last lines of output; for a host, how it was lost.
    """

    host: str
    member: str
    _: KW_ONLY
    rank: int | None = None
    local_rank: int | None = None
    exit_code: int | None = None
    seconds: float = 0.0
    lines: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where it failed: a host, or a rank of a host."""
        return self.host if self.rank is None else f"{self.host}/{self.local_rank}"

    @property
    def how(self) -> str:
        """How it ended."""
        if self.left:
            return f"left in order (exit code {LEFT_EXIT_CODE})"
        return "was lost" if self.exit_code is None else describe_exit(self.exit_code)

    @property
    def left(self) -> bool:
        """Whether it left in order, after a warning."""
        return self.exit_code == LEFT_EXIT_CODE

    @property
    def why(self) -> str:
        """The last line of output, without remedies; empty for a process that was ended by a signal."""
        lines = [line for line in self.last_lines() if not line.startswith("→")]
        return lines[-1] if lines and (self.exit_code or 0) >= 0 and not self.left else ""

    @property
    def refused(self) -> bool:
        """Whether the program was called wrongly or misuses Paceline, so that it would fail again."""
        usage_error = any(_USAGE_ERROR.match(line) for line in self.last_lines())
        return self.exit_code == _USAGE_EXIT_CODE or usage_error

    def last_lines(self) -> list[str]:
        """Return the last lines of output without torch's prefixes, one for each world that the process was in."""
        return [re.sub(r"^(\[rank\d+\]: ?)+", "", line).strip() for line in self.lines[-_REASON_LINES:]]

    def __str__(self) -> str:
        name = self.host if self.rank is None else f"rank {self.rank} on {self.host}"
        return f"{name} {self.how} after {self.seconds:.0f} s" + (f" ({self.why})" if self.why else "")


def is_secondary(failure: RankFailure) -> bool:
    """Return whether a rank ended because it lost a peer, by its own output; see [Note: secondary failures].

    Example:
        >>> lines = ("RuntimeError: Connection closed by peer [10.0.0.2]:4711",)
        >>> is_secondary(RankFailure("pc1", "a", rank=0, local_rank=0, exit_code=1, lines=lines))
        True
    """
    return any(_PEER_LOST.search(line) or line.startswith(_QUOTED) for line in failure.last_lines())


def first_failure(failures: Sequence[RankFailure]) -> RankFailure | None:
    """Return the failure that caused the others, None if there is none.

    Args:
        failures: all failures of one world, in the order in which they were reported.
    """
    return min(failures, key=is_secondary, default=None)
