"""Table of the starvation benchmark, from outcomes as `CaseOutcome.to_json` returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline._core.format import format_seconds

__all__ = [
    "STARVATION_COLUMNS",
    "STARVATION_FOOTER",
    "is_exact",
    "row_cells",
    "summary_line",
    "table_title",
]

Outcome = Mapping[str, Any]

STARVATION_COLUMNS = (
    *("training", "a rank without batches", "the others", "that rank", "after"),
    *("error, a rank dry", "error, unequal", "samples lost"),
)
"""The first four hold text."""

STARVATION_FOOTER = (
    "After: from the start of the step that failed until the others noticed.\n"
    "Error: of the gradient that a step applied, relative to one process on all ranks' batches of that step,\n"
    "‖g − true‖ / ‖true‖, the largest of the steps in which a rank has no batch, or batches are unequal.\n"
    "Samples lost: of the epoch, used by no step."
)

_EXACT = 1e-12


def row_cells(outcome: Outcome) -> list[str]:
    """Return the cells of an outcome; see `STARVATION_COLUMNS`."""
    lost = outcome["samples_lost"]
    return [
        outcome["under"],
        outcome["does"],
        _describe(_ranks(outcome, dry=False), outcome["finished"]),
        _describe(_ranks(outcome, dry=True), outcome["finished"]),
        _after(outcome),
        _error(outcome["gradient_error_with_a_dry_rank"]),
        _error(outcome["gradient_error_with_unequal_batches"]),
        f"{lost} ({lost / outcome['samples']:.1%})" if lost else "0",
    ]


def is_exact(outcome: Outcome) -> bool:
    """Return whether all ranks finished, and every sample was used with the right weight."""
    error = outcome["gradient_error"]
    return outcome["finished"] and not outcome["samples_lost"] and error is not None and error <= _EXACT


def summary_line(outcome: Outcome) -> str:
    """Return an outcome as one line of progress."""
    after = _after(outcome)
    others = _describe(_ranks(outcome, dry=False), outcome["finished"])
    line = f"{outcome['under']}, {outcome['does']} → the others: {others}"
    return line + f" ({after})" * bool(after)


def table_title(settings: Mapping[str, Any]) -> str:
    """Return the title of the table, from `StarvationSettings.summary`."""
    batches = ", ".join(map(str, settings["batches_of_rank"]))
    return (
        f"{settings['ranks']} ranks, {settings['samples']} samples in blocks of {settings['block']}, "
        f"batches of {settings['batch_size']}: {batches} batches; "
        f"{settings['backend']}, time-out {settings['timeout_s']:g} s"
    )


def _ranks(outcome: Outcome, *, dry: bool) -> list[Mapping[str, Any]]:
    """Return the outcomes of the ranks that run dry, or of the others."""
    return [one for one in outcome["ranks"] if (one["rank"] in outcome["dry_ranks"]) == dry]


def _after(outcome: Outcome) -> str:
    """Return the longest time until one of the others noticed; empty if all finished."""
    waited = [one["seconds"] for one in _ranks(outcome, dry=False)]
    known = [seconds for seconds in waited if seconds is not None]
    return format_seconds(max(known)) if known else ""


def _describe(ranks: Sequence[Mapping[str, Any]], finished: bool) -> str:
    return "; ".join(dict.fromkeys(_describe_rank(one, finished) for one in ranks))


def _describe_rank(one: Mapping[str, Any], finished: bool) -> str:
    """Return a rank's outcome as text; `finished`: whether all ranks finished."""
    kind, error, message = one["kind"], one["error"], one["message"]
    if kind == "finished":
        return "finish" if finished else "notices nothing"
    if kind == "hung":
        return "hang for ever"
    if kind == "signal":
        return f"{error}: {message.partition(': ')[0]}"
    short = message.partition(" waiting ")[0]  # Timed out | waiting 10000ms for recv operation to complete
    return "hang, then " * (kind == "time-out") + f"{error}: {short}"


def _error(error: float | None) -> str:
    if error is None:
        return ""
    return f"{error:.1%}" if error >= 1e-4 else f"{error:.0e}"
