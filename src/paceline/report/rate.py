"""How fast a run's gradients went through its network: bytes over the time in which they were under way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.report.parts import Piece, merged
from paceline.report.steps import RankSteps, StepLine

__all__ = ["transfer_rate"]


def transfer_rate(timelines: Mapping[int, RankSteps], ranks: int) -> float | None:
    """Return the bytes a second that a rank sent while calls were under way; None where nothing was, or nobody knows.

    A call is under way from the moment at which the last rank has launched it until it is through. A rank of N sends
    2(N−1)/N of what is all-reduced, (N−1)/N of what is reduce-scattered or gathered.

    Args:
        timelines: each rank's steps. ranks: N.
    """
    if ranks < 2 or len(timelines) < ranks:
        return None
    lines_of_rank = [{line.step: line for line in each.warm} for each in timelines.values()]
    nbytes = seconds = 0.0
    for step in set.intersection(*(set(lines) for lines in lines_of_rank)):
        lines = [each[step] for each in lines_of_rank]
        all_reduced = any(
            bucket.call == "all-reduce" for bucket in next(iter(timelines.values())).buckets_at(step)
        )
        sent, busy = _step(lines, ranks, 2 if all_reduced else 1)
        nbytes, seconds = nbytes + sent, seconds + busy
    return nbytes / seconds if seconds else None


def _step(lines: Sequence[StepLine], ranks: int, ways: int) -> tuple[float, float]:
    """Return the bytes that the first rank sent in a step, and how long calls were under way."""
    launched: dict[tuple[str, int], float] = {}
    for line in lines:
        for call in line.calls:
            key = (call.kind, call.bucket)
            launched[key] = max(launched.get(key, 0.0), line.start + call.launched)
    first, nbytes, busy = lines[0], 0.0, []
    for call in first.calls:
        begin = launched[call.kind, call.bucket] - first.start
        busy.append(Piece("call", begin, max(begin, call.end)))
        nbytes += (ways if call.kind == "reduce" else 1) * (ranks - 1) / ranks * call.nbytes
    return nbytes, sum(piece.end - piece.start for piece in merged(busy))
