"""What a simulated cluster means, in sentences: how far it scales, what limits it, when to write checkpoints (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from paceline._core.format import format_count, format_seconds
from paceline.tools.simulate.cluster.cluster_simulation import LOSSES, ClusterRow

__all__ = ["cluster_findings", "duration", "percent", "times"]

_GOOD = 0.8
_OF = {
    "uneven machines": "waiting for the slowest machine",
    "varying steps": "waiting for the step that happens to be longest",
    "communication": "communication that computing does not hide",
    "checkpoints": "writing checkpoints",
    "lost work": "work that failures undo",
    "restarts": "restarts",
}
_REMEDY = {
    "uneven machines": "Deal the work by speed (--shares speed), or take the slowest machines out.",
    "varying steps": "Let ranks meet less often (--every), or find what disturbs them.",
    "communication": "Send less (16 bits, --every), give each rank more samples, or take a faster link.",
    "checkpoints": "Write them beside training, or to a faster disk.",
    "lost work": "Write checkpoints quicker, so that they can be more frequent.",
    "restarts": "Keep spare nodes, and detect failures sooner.",
}


def cluster_findings(rows: Sequence[ClusterRow]) -> list[str]:
    """Return what follows from the rows, the ones with fewer nodes first.

    Args:
        rows: one or more, by nodes.
    """
    last = rows[-1]
    findings = [_reach(rows), _limit(last)]
    fastest = max(rows, key=lambda row: row.speedup)
    if fastest is not last:
        findings.append(
            f"Beyond {_nodes(fastest)} it gets slower: there it is {times(fastest.speedup)} × one rank."
        )
    if last.intervals is not None and last.intervals.daly is not None:
        findings.append(_checkpoints(last))
    if last.cost is not None and len(rows) > 1:
        findings.append(_cheapest(rows))
    return findings


def duration(seconds: float) -> str:
    """Return a time for people, in days where there are two or more.

    Example:
        >>> duration(5400.0), duration(200_000.0), duration(1e8)
        ('1 h 30 min', '2.3 d', '1,157 d')
    """
    days = seconds / 86400.0
    if days < 2:
        return format_seconds(seconds)
    return f"{days:,.0f} d" if days >= 99.5 else f"{days:.2g} d"


def times(ratio: float) -> str:
    """Return how many times, for people.

    Example:
        >>> times(0.15361), times(61198.2)
        ('0.154', '61,198')
    """
    return f"{ratio:,.0f}" if ratio >= 999.5 else f"{ratio:.3g}"


def percent(share: float) -> str:
    """Return a share of a whole for people.

    Example:
        >>> percent(0.0123), percent(0.5), percent(0.0), percent(0.99991)
        ('1.2 %', '50 %', '0 %', '99.99 %')
    """
    hundredths = 100 * share
    if 99 < hundredths < 100:
        return f"{hundredths:.4g} %"
    return f"{hundredths:.2g} %" if abs(hundredths) < 9.95 else f"{hundredths:.0f} %"


def _reach(rows: Sequence[ClusterRow]) -> str:
    good = [row for row in rows if row.efficiency.mean >= _GOOD]
    last = rows[-1]
    if last in good:
        return (
            f"{_nodes(last)} are used to {percent(last.efficiency.mean)}: {times(last.speedup)} × one rank."
        )
    text = f"{_nodes(last)} are used to {percent(last.efficiency.mean)}: {times(last.speedup)} × one rank"
    if last.stuck:
        text = f"On {_nodes(last)} the job never ends: it fails again before it has a checkpoint"
    if not good:
        return f"{text}; none of these numbers reaches {percent(_GOOD)}."
    return f"{text}; {percent(_GOOD)} is reached up to {_nodes(good[-1])}."


def _limit(row: ClusterRow) -> str:
    lost = 1.0 - row.ledger["useful"]
    if lost < 1e-9:
        return f"Nothing is lost on {_nodes(row)}."
    share = row.ledger[row.worst] / lost
    rest = [name for name in LOSSES if name != row.worst and row.ledger[name] >= 0.2 * lost]
    also = f", then {' and '.join(_OF[name] for name in rest)}" if rest else ""
    return f"What limits {_nodes(row)}: {_OF[row.worst]}, {percent(share)} of what is lost{also}. {_REMEDY[row.worst]}"


def _checkpoints(row: ClusterRow) -> str:
    at = row.intervals
    assert at is not None
    assert row.mtbf_seconds is not None
    best = [
        f"{duration(value)} by {who}"
        for who, value in (("Young", at.young), ("Daly", at.daly), ("simulation", at.simulated))
        if value is not None
    ]
    return (
        f"{_nodes(row)} fail every {duration(row.mtbf_seconds)} on average. The best time between checkpoints is "
        f"{', '.join(best)}; {duration(at.used)} is used."
    )


def _cheapest(rows: Sequence[ClusterRow]) -> str:
    costs = [(row.cost.mean, row.job_seconds.mean, row) for row in rows if row.cost and row.job_seconds]
    cost, seconds, row = min(costs, key=lambda each: each[0])
    return f"Cheapest: {_nodes(row)}, {format_count(cost)} for {duration(seconds)}."


def _nodes(row: ClusterRow) -> str:
    return f"{row.nodes:,} node{'s' * (row.nodes > 1)}"
