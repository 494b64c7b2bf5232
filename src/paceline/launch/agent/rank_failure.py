"""What went wrong with a rank or a host, and which of several failures was the first one (pure).

[Note: echoes] When a rank ends, the others see its connections close, raise, and end too: some of them sooner than the
process that closed them. And the clocks of hosts differ. So the first failure is not the one with the least time: those
that say themselves that a peer was lost are echoes of another one, and come after all that do not. Among the rest the
order counts in which the hosts told of them at the rendezvous.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline._core.process_exit import describe_exit

__all__ = ["RankFailure", "first_failure", "is_secondary"]

_PEER_LOST = re.compile(
    r"\b(PeerLost|PeerFailed|BackwardFailed|MissingRanks)\b|Connection (reset|closed|refused) by peer|Connection reset|"
    r"Connection closed|Connection refused|Broken pipe|remote process exited|DistNetworkError|failed to recv"
)
_QUOTED = "| "  # before lines that `paceline.Watchdog` cites of another rank
_OF_THE_END = 5  # the last lines tell why a process ended
_REFUSED = (
    2  # exit code of a program that was called wrongly: of argparse, of typer, of Paceline's own commands
)
_USED_WRONGLY = re.compile(r"^(paceline\.errors\.)?UsageError: ")


@dataclass(frozen=True)
class RankFailure:
    """A rank that ended with an error, or a host that was lost.

    Attributes:
        host: its name.
        member: the agent on that host, unlike any other.
        rank: number in the world, None for a whole host.
        local_rank: number on its host, None for a whole host.
        exit_code: of the process, −n if signal n ended it; None for a host.
        seconds: how long the ranks had run.
        lines: the last that it wrote; for a host, how it was lost.
    """

    host: str
    member: str
    rank: int | None = None
    local_rank: int | None = None
    exit_code: int | None = None
    seconds: float = 0.0
    lines: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> RankFailure:
        """Return the failure that `dataclasses.asdict` made `record` of."""
        return cls(**{**record, "lines": tuple(record["lines"])})

    @property
    def place(self) -> str:
        """Where it failed: a host, or a rank of a host."""
        return self.host if self.rank is None else f"{self.host}/{self.local_rank}"

    @property
    def how(self) -> str:
        """What became of it."""
        return "was lost" if self.exit_code is None else describe_exit(self.exit_code)

    @property
    def why(self) -> str:
        """The last line that it wrote, where that tells a reason: not of one that a signal ended; no remedy."""
        told = [line for line in self.last_words() if not line.startswith("→")]
        return told[-1] if told and (self.exit_code or 0) >= 0 else ""

    @property
    def refused(self) -> bool:
        """Whether the program was called or uses Paceline wrongly, so that it would fail again."""
        return self.exit_code == _REFUSED or any(_USED_WRONGLY.match(line) for line in self.last_words())

    def last_words(self) -> list[str]:
        """Return its last lines, without what torch puts before them."""
        return [re.sub(r"^\[rank\d+\]: ?", "", line).strip() for line in self.lines[-_OF_THE_END:]]

    def __str__(self) -> str:
        who = self.host if self.rank is None else f"rank {self.rank} on {self.host}"
        return f"{who} {self.how} after {self.seconds:.0f} s" + (f" ({self.why})" if self.why else "")


def is_secondary(failure: RankFailure) -> bool:
    """Return whether a rank ended because it lost another one, by its own last lines; see [Note: echoes].

    Example:
        >>> last_words = ("RuntimeError: Connection closed by peer [10.0.0.2]:4711",)
        >>> is_echo(RankFailure("pc1", "a", 0, 0, 1, lines=last_words))
        True
    """
    return any(_PEER_LOST.search(line) or line.startswith(_QUOTED) for line in failure.last_words())


def first_failure(told: Sequence[RankFailure]) -> RankFailure | None:
    """Return the failure that caused the others, None of none; see [Note: echoes].

    Args:
        told: all failures of one world, in the order in which hosts told of them.
    """
    return min(told, key=is_secondary, default=None)
