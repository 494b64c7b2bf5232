"""Sentences about a simulated cluster: scaling, bottleneck, recoveries, checkpoint interval, cost."""

from __future__ import annotations

from collections.abc import Sequence

from paceline._core.format import (
    format_count,
    format_duration,
    format_percent,
    format_ratio,
    format_seconds,
    plural,
)
from paceline.tools.simulate.cluster.cluster_simulation import LOSSES, ClusterRow

__all__ = ["cluster_findings"]

_GOOD = 0.8
_NEVER = 1000 * 365 * 86400.0
"""Mean seconds between losses of state from which they are not worth a sentence."""
_DESCRIPTION = {
    "uneven machines": "waiting for the slowest machine",
    "varying steps": "waiting for the step that happens to be longest",
    "communication": "communication that computing does not hide",
    "checkpoints": "writing checkpoints",
    "lost work": "work undone by failures",
    "restarts": "restarts",
    "recoveries": "pauses for live recovery",
    "missing ranks": "training with fewer ranks until replacements join",
}
_REMEDY = {
    "uneven machines": "Distribute work by speed (--balance speed), or remove the slowest machines.",
    "varying steps": "Synchronise less often (--every), or find the cause of the variation.",
    "communication": "Send less (16 bits, --every), give each rank more samples, or use a faster link.",
    "checkpoints": "Write them during training, or to a faster disk.",
    "lost work": "Write checkpoints faster, so that they can be more frequent.",
    "restarts": "Keep spare nodes, and detect failures sooner.",
    "recoveries": "Notice lost nodes sooner (--notice-time), or use a faster link.",
    "missing ranks": "Keep spare nodes (--replacement-time), or use more virtual ranks per rank.",
}
_WAY = {"restart": "Recovery by restart", "live": "Live recovery"}


def cluster_findings(rows: Sequence[ClusterRow]) -> list[str]:
    """Return sentences about the rows.

    Args:
        rows: one or more, in order of nodes, for each of them one or both ways of recovery.
    """
    ways = list(dict.fromkeys(row.recovery for row in rows))
    findings: list[str] = []
    if len(ways) > 1:
        findings.append(_comparison([row for row in rows if row.nodes == rows[-1].nodes]))
    for way in ways:
        found = _findings_of_way([row for row in rows if row.recovery == way])
        if way is not None and len(ways) > 1:
            found[0] = f"{_WAY[way]}: {found[0]}"
        findings += found
    return findings


def _findings_of_way(rows: Sequence[ClusterRow]) -> list[str]:
    """Return sentences about rows of one way of recovery."""
    last = rows[-1]
    findings = [_scaling(rows), _bottleneck(last)]
    fastest = max(rows, key=lambda row: row.speedup)
    if fastest is not last:
        findings.append(f"Beyond {_nodes(fastest)} it gets slower; they do {_speedup(fastest)}.")
    if last.recovery == "live":
        findings.append(_rollbacks(last))
    if last.intervals is not None and last.intervals.daly is not None and _rolls_back(last):
        findings.append(_checkpoints(last))
    if last.cost is not None and len(rows) > 1:
        findings.append(_cheapest(rows))
    return findings


def _comparison(rows: Sequence[ClusterRow]) -> str:
    """Compare the ways of recovery on the same number of nodes."""
    restart, live = sorted(rows, key=lambda row: row.recovery == "live")
    if restart.stuck or live.stuck:
        ending = [_WAY[row.recovery or ""].lower() for row in (restart, live) if not row.stuck]
        only = f"only with {ending[0]}" if ending else "with neither way of recovery"
        return f"On {_nodes(live)} the job ends {only}."
    ratio = live.speedup / restart.speedup - 1
    change = f"{format_percent(abs(ratio))} {'more' if ratio >= 0 else 'less'}"
    costs = (format_seconds(sum(row.failure_cost.values())) for row in (live, restart))
    return (
        f"On {_nodes(live)} live recovery does {change} work in the same time than restarts: a failure costs "
        f"{' instead of '.join(costs)}."
    )


def _rolls_back(row: ClusterRow) -> bool:
    """Return whether work since a checkpoint is ever lost."""
    return row.rollback_seconds is not None and row.rollback_seconds < _NEVER


def _rollbacks(row: ClusterRow) -> str:
    """Say how often live recovery needs a checkpoint."""
    if row.mtbf_seconds is None or row.rollback_seconds is None or not _rolls_back(row):
        return (
            "No failure loses state, as other ranks have all of it. Checkpoints, one a day unless you set "
            "the interval, are for what is not simulated."
        )
    share = row.mtbf_seconds / row.rollback_seconds
    return (
        f"{format_percent(share)} of the failures lose state, one every "
        f"{format_duration(row.rollback_seconds)}: then all ranks start again from a checkpoint."
    )


def _scaling(rows: Sequence[ClusterRow]) -> str:
    good = [row for row in rows if row.efficiency.mean >= _GOOD]
    last = rows[-1]
    text = f"{_nodes(last)} reach {format_percent(last.efficiency.mean)} efficiency: {_speedup(last)}"
    if last in good:
        return f"{text}."
    if last.stuck:
        text = f"On {_nodes(last)} the job never ends: it fails again before it has a checkpoint"
    if not good:
        return f"{text}; none of these numbers reaches {format_percent(_GOOD)}."
    return f"{text}; {format_percent(_GOOD)} is reached up to {_nodes(good[-1])}."


def _bottleneck(row: ClusterRow) -> str:
    lost = 1.0 - row.ledger["useful"]
    if lost < 1e-9:
        return f"Nothing is lost on {_nodes(row)}."
    share = format_percent(row.ledger[row.worst] / lost)
    rest = [name for name in LOSSES if name != row.worst and row.ledger[name] >= 0.2 * lost]
    also = f", then {' and '.join(_DESCRIPTION[name] for name in rest)}" if rest else ""
    return (
        f"Bottleneck of {_nodes(row)}: {_DESCRIPTION[row.worst]}, {share} of the losses{also}. "
        f"{_REMEDY[row.worst]}"
    )


def _checkpoints(row: ClusterRow) -> str:
    at = row.intervals
    assert at is not None
    assert row.mtbf_seconds is not None
    best = [
        f"{format_duration(value)} by {source}"
        for source, value in (("Young", at.young), ("Daly", at.daly), ("simulation", at.simulated))
        if value is not None
    ]
    often = (
        ""
        if row.recovery == "live"
        else f"{_nodes(row)} fail every {format_duration(row.mtbf_seconds)} on average. "
    )
    return f"{often}The best checkpoint interval is {', '.join(best)}; {format_duration(at.used)} is used."


def _cheapest(rows: Sequence[ClusterRow]) -> str:
    costs = [(row.cost.mean, row.job_seconds.mean, row) for row in rows if row.cost and row.job_seconds]
    cost, seconds, row = min(costs, key=lambda each: each[0])
    return f"Cheapest: {_nodes(row)}, {format_count(cost)} for {format_duration(seconds)}."


def _speedup(row: ClusterRow) -> str:
    return f"{format_ratio(row.speedup)} the work of one rank"


def _nodes(row: ClusterRow) -> str:
    return plural(row.nodes, "node")
