"""How fast a run's gradients went through its network: bytes over the time in which they were under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.report.parts import Piece, merged
from paceline.report.steps import RankSteps, StepLine

__all__ = ["transfer_rate"]


def transfer_rate(timelines: Mapping[int, RankSteps]) -> float | None:
    """Return the bytes a second that a rank sent while calls were under way; None where nothing was, or nobody knows.

    A call is under way from the moment at which the last rank has launched it until it is through.

    Args:
        timelines: each rank's steps.
    """
    if len(timelines) < 2:
        return None
    lines_of_rank = [{line.step: line for line in each.warm} for each in timelines.values()]
    nbytes = seconds = 0.0
    for step in set.intersection(*(set(lines) for lines in lines_of_rank)):
        lines = [each[step] for each in lines_of_rank]
        nbytes, seconds = nbytes + sum(call.sent for call in lines[0].calls), seconds + _busy(lines)
    return nbytes / seconds if seconds else None


def _busy(lines: Sequence[StepLine]) -> float:
    """Return for how long calls of the first rank were under way in a step."""
    launched: dict[tuple[str, int], float] = {}
    for line in lines:
        for call in line.calls:
            key = (call.kind, call.bucket)
            launched[key] = max(launched.get(key, 0.0), line.start + call.launched)
    first, busy = lines[0], []
    for call in first.calls:
        begin = launched[call.kind, call.bucket] - first.start
        busy.append(Piece("call", begin, max(begin, call.end)))
    return sum(piece.end - piece.start for piece in merged(busy))
