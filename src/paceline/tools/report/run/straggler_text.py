"""Why the others wait for a rank, and what to do about it, in words.

Who comes when to the exchange of a step, as a table.
"""

from __future__ import annotations

from paceline._core.format import format_seconds
from paceline.tools.report.html_page import PageTable
from paceline.tools.report.run.rank_arrivals import Straggler
from paceline.tools.report.run.run_summary import RunSummary

__all__ = ["arrivals_table", "straggler_cause", "straggler_remedy"]

_COMPUTING = ("forward", "backward", "optimizer")


_MORE = 1.15  # times as many of something: beyond it, it is told as a difference


def straggler_cause(straggler: Straggler) -> str:
    """Return one sentence: what of its step takes longer than on the other ranks, and what that comes from."""
    part = max(straggler.excess, key=lambda name: straggler.excess[name])
    mine, theirs = straggler.parts[part], straggler.other_parts[part]
    beside = f"{format_seconds(mine)} a step, {format_seconds(theirs)} on the others"
    if _more_samples(straggler):
        return f"It has more to do: {straggler.samples:g} samples a step, the others {straggler.others_samples:g}."
    match part:
        case "data":
            return f"It waits for its data: {beside}."
        case "between":
            return f"It does more between steps (held-out losses, checkpoints): {beside}."
        case "other":
            return f"Its own code around the step takes longer: {beside}."
    computing = f"Its {part} takes {_times(mine, theirs)} as long ({beside})"
    if straggler.cpu >= _MORE * straggler.others_cpu:
        return f"{computing}, and as much more processor time: its processor is slower, or it computes more."
    if straggler.preempted >= 5 + 2 * straggler.others_preempted:
        return (
            f"{computing}, with the same processor time: other programs take its processors, "
            f"{straggler.preempted:.0f} times a step."
        )
    return (
        f"{computing}, with no more processor time: it stands still there, asleep or waiting for a disk, a lock or "
        "another process."
    )


def straggler_remedy(straggler: Straggler) -> tuple[str, str]:
    """Return what to do and how."""
    part = max(straggler.excess, key=lambda name: straggler.excess[name])
    rank = straggler.rank
    if _more_samples(straggler):
        return (
            "Deal the samples evenly",
            'paceline.Loader(…, uneven="rebalance"), or shares that fit the ranks\' speeds',
        )
    match part:
        case "data":
            return (
                f"Make rank {rank}'s data come sooner",
                "more num_workers in paceline.Loader, a local copy of the data",
            )
        case "between":
            return (
                "Do the same on every rank",
                "paceline.evaluate and paceline.Checkpoint share such work among ranks",
            )
        case "other":
            return (
                f"Look at what the loop does on rank {rank} only",
                "logging, printing, saving: less often, or later",
            )
    if straggler.cpu >= _MORE * straggler.others_cpu:
        return (
            f"Give rank {rank} less to do",
            'paceline.Loader(…, shares="measured") deals by speed; or paceline.AsyncDataParallel',
        )
    return (
        f"Free rank {rank}'s host of what else runs there",
        'paceline doctor and top on that host; paceline.Loader(…, shares="measured") if it stays so',
    )


def _more_samples(straggler: Straggler) -> bool:
    computing = sum(straggler.excess[part] for part in _COMPUTING)
    return computing > 0 and straggler.samples > _MORE * straggler.others_samples > 0


def _times(mine: float, theirs: float) -> str:
    return f"{mine / theirs:.1f} times" if theirs > 0 else "many times"


_RANKS_SHOWN = 16


def arrivals_table(summary: RunSummary) -> list[PageTable]:
    """Return the table of arrivals; none for fewer than two ranks that have recorded their steps."""
    arrivals = summary.arrivals
    if not arrivals.ranks:
        return []
    shown = sorted(arrivals.ranks, key=lambda each: -each.lateness)[:_RANKS_SHOWN]
    slowed = {rank.rank: rank.slowed for rank in summary.ranks}
    head = [
        "rank",
        "comes last in",
        "after the others' median",
        "worst twentieth",
        "waits for ranks",
        "waits for the network",
        "slowed by it",
    ]
    rows = [
        [
            str(each.rank),
            f"{100 * each.last:.0f}\u00a0%",
            _signed(each.lateness),
            _signed(each.lateness_p95),
            format_seconds(each.imbalance),
            format_seconds(each.transfer),
            format_seconds(slowed.get(each.rank, 0.0)),
        ]
        for each in shown
    ]
    caption = (
        f"When each rank comes to the last exchange of a step, over {arrivals.steps} steps. Exposed communication is "
        "waiting until the last rank is there, waiting for the network after that, and backward that goes slower "
        "while calls are under way; per step, mean."
    )
    if arrivals.clock_error:
        caption += f" Clocks of hosts are known to {format_seconds(arrivals.clock_error)}."
    if len(arrivals.ranks) > len(shown):
        caption += f" The latest {len(shown)} of {len(arrivals.ranks)} ranks."
    return [PageTable("Who waits for whom", [head, *rows], caption)]


def _signed(seconds: float) -> str:
    return f"{'−' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"
