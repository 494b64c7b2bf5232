"""How a run ended: what every host of it is told, and the error that its user sees (pure)."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from paceline.errors import RankFailed
from paceline.launch.agent.rank_failure import RankFailure
from paceline.launch.agent.world_agreement import WorldAgreement

__all__ = ["JobOutcome", "exit_remedy", "exit_status", "failed_outcome"]

_FOLLOWERS = 4


@dataclass(frozen=True)
class JobOutcome:
    """The end of a run: its exit code, and for any but 0 what to tell."""

    code: int
    text: str = ""
    rank: int | None = None
    remedy: str = ""

    def error(self) -> RankFailed:
        """Return the error to raise on every host."""
        return RankFailed(self.text, rank=self.rank, remedy=self.remedy, exit_code=self.code)


def exit_status(code: int | None) -> int:
    """Return the exit status, as a shell has it, for a process that ended so; None: nobody knows.

    Example:
        >>> exit_status(3), exit_status(-9), exit_status(None)
        (3, 137, 1)
    """
    return 1 if code is None else code if code >= 0 else 128 - code


def failed_outcome(verdict: WorldAgreement) -> JobOutcome:
    """Return the end of a run that is not to go on."""
    first = verdict.first
    if first is None:
        return JobOutcome(1, verdict.decision.why, remedy="start it anew with more hosts")
    where = f" on {first.host}" if first.rank is not None and verdict.hosts_before > 1 else ""
    subject = first.host + " " if first.rank is None else ""
    after = [f"{_who(one)} ({one.how})" for one in verdict.after]
    more = f" and {len(after) - _FOLLOWERS} more" if len(after) > _FOLLOWERS else ""
    followed = f"; after it {', '.join(after[:_FOLLOWERS])}{more}" if after else ""
    lines = (
        "".join(f"\n  rank {first.rank} | {line}" for line in first.lines) if first.rank is not None else ""
    )
    text = f"{subject}{first.how}{where} after {first.seconds:.0f} s{followed}; {verdict.decision.why}{lines}"
    return JobOutcome(exit_status(first.exit_code), text, first.rank, _remedy(first))


def _who(one: RankFailure) -> str:
    return one.host if one.rank is None else f"rank {one.rank}"


def _remedy(first: RankFailure) -> str:
    if first.rank is None:
        return "look at that host: power, network, its own terminal; then start the same command again"
    return exit_remedy(first.exit_code)


def exit_remedy(exit_code: int | None) -> str:
    """Return what to do about a rank that ended so; −n: by signal n."""
    if exit_code == -signal.SIGKILL:
        return "a process killed from outside often was out of memory: try fewer ranks or a smaller batch"
    return "correct what its output says; the other ranks have been ended"
