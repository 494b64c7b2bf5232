"""Whose fault it is: a function from what is known of the ranks to a verdict.

Evidence, from certain to weak:

    raised        a rank announced its own exception
    gone          its process is no more: told by its host, or by its connections
    stopped       its process is stopped, or does nothing though its host answers, and others wait for it
    unreachable   its host does not answer; where no other host answers, this rank's own is cut off
    held          one of its threads holds Python's lock, so that it can't answer, and others wait for it
    finished      it left its loop, and others wait for it
    stalled       it is behind, stands still, and others wait for it
    elsewhere     all were heard of just now and wait, but not for the same thing: the one that is least advanced

A connection error is none of them: it is what the others see of one. And silence of a rank for which nobody waits is no
fault: a long call may hold Python's lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline._core.step_state import PHASES
from paceline.health.heartbeat import FailureNotice, Heartbeat

__all__ = [
    "CERTAIN",
    "Attribution",
    "RankObservation",
    "StallLimits",
    "attribute_failure",
    "late",
    "position",
    "waited",
]

CERTAIN = ("raised", "gone")
"""Verdicts that need no waiting."""


_AT_ONCE_SECONDS = 0.5
"""An exception that came so soon after a process had ended may be what its rank saw of that."""


_TOGETHER_SECONDS = 0.3
"""Processes that end within this time end together, as a host's do: all ranks are to name the same one of them."""


_ABORTED = -6
"""Ended by SIGABRT: C++ gave up, perhaps because of another rank."""


_HURRIED_SECONDS = 1.5
"""How long is too long for a rank whose connection has failed already."""


_LEAST_BEATS = 1.75
"""So long all ranks of a lost host are silent, and not only some; see `StallLimits.sooner`."""


_LONG_TASKS = ("checkpoint", "eval")
"""Tasks that one rank may well do alone while the others wait, and that take as long as they take."""


@dataclass(frozen=True)
class RankObservation:
    """What this rank knows of a rank.

    Attributes:
        rank, host: who; hosts may have one name, so this is what tells them apart.
        row: the latest that came; None: none yet.
        silent: seconds since it came, 0 for this rank itself.
        link: ``"open"``, ``"closed"`` (its end is gone), ``"lost"`` (its host does not answer), ``"none"`` (others
            tell of it).
        link_seconds: since the link is closed or lost.
        unanswered: seconds since its host acknowledged what was sent, as far as that can be told.
        dumped: it has told where it stands since it fell silent, by the thread that needs no lock of Python's.
    """

    rank: int
    host: str
    row: Heartbeat | None = None
    silent: float = 0.0
    link: str = "open"
    link_seconds: float = 0.0
    unanswered: float = 0.0
    dumped: bool = False


@dataclass(frozen=True)
class StallLimits:
    """How long is too long.

    Attributes:
        stall: seconds for which ranks may wait for one that stands still.
        lost: seconds without a sign of life of a stopped process or an unreachable host.
        beat: seconds between two rows, with what may delay them.
    """

    stall: float = 60.0
    lost: float = 15.0
    beat: float = 1.0

    def sooner(self, seconds: float, beat: float) -> StallLimits:
        """Return when to suspect a rank that is to be named within these limits, if naming takes `seconds` more.

        Short limits stay: a suspicion needs some beats, to tell apart who is silent.
        """
        least = _LEAST_BEATS * beat
        return StallLimits(
            max(self.stall - seconds, min(self.stall, least)),
            max(self.lost - seconds, min(self.lost, least)),
            beat,
        )


@dataclass(frozen=True)
class Attribution:
    """Who is to blame.

    Attributes:
        kind: as listed above, or ``"cut off"``: this rank's own host.
        rank: who; None: no single rank.
        seconds: for how long, or how long ago.
        others: ranks that share its fate.
        waiting: a rank that waits for it, None if none does.
    """

    kind: str
    rank: int | None
    seconds: float = 0.0
    others: tuple[int, ...] = ()
    waiting: int | None = None

    @property
    def certain(self) -> bool:
        """Whether more evidence can't change it."""
        return self.kind in CERTAIN


def attribute_failure(
    me: int,
    seen: Sequence[RankObservation],
    notices: Sequence[FailureNotice],
    limits: StallLimits,
    *,
    hurried: bool = False,
) -> Attribution | None:
    """Return who is to blame, None if nobody is.

    Args:
        me: the rank that judges.
        seen: of all ranks, by rank.
        notices: what is known to have happened.
        limits: how long is too long.
        hurried: this rank has seen a connection fail: whatever speaks against a rank now is worth saying.
    """
    if (certain := _certain(seen, notices, limits)) is not None:
        return certain
    told = [notice for notice in notices if notice.kind == "verdict"]
    if told:
        return _shared(min(told, key=lambda each: (each.rank, each.by)))
    patience = limits
    if hurried:
        patience = StallLimits(
            min(limits.stall, _HURRIED_SECONDS), min(limits.lost, _HURRIED_SECONDS), limits.beat
        )
    out = _out(notices)
    there = [each for each in seen if each.rank not in out]
    for evidence in (_stopped, _unreachable):
        if (verdict := evidence(me, there, patience)) is not None:
            return verdict
    return _behind(there, notices, patience)


def late(
    seen: Sequence[RankObservation],
    notices: Sequence[FailureNotice],
    seconds: float,
    beat: float = StallLimits.beat,
) -> Attribution | None:
    """Return for whom others have waited `seconds`, whether or not it is at work: worth a word."""
    out = _out(notices)
    there = [each for each in seen if each.rank not in out]
    return _behind(there, notices, StallLimits(seconds, seconds, beat), at_work=True)


def waited(seen: RankObservation, limits: StallLimits) -> float:
    """Return for how long a rank has waited for others, 0 if it does not, or was not heard of late."""
    if seen.row is None or not seen.row.waiting or _is_silent(seen, limits):
        return 0.0
    return seen.row.age + seen.silent


def _is_silent(seen: RankObservation, limits: StallLimits) -> bool:
    """Return whether a rank is silent for so long that its stack would have come, if it can tell it."""
    return seen.silent > 2 * limits.beat


def position(row: Heartbeat | None) -> tuple[int, int, int]:
    """Return how far a rank has come: step, phase, bucket; one that was never heard of, not at all."""
    if row is None:
        return -1, 0, -1
    return row.step, PHASES.index(row.phase) if row.phase in PHASES else len(PHASES), row.bucket


def _out(notices: Sequence[FailureNotice]) -> set[int]:
    """Return the ranks that left in order, or because of another one."""
    return {notice.rank for notice in notices if notice.kind in ("done", "leaves")}


def _shared(notice: FailureNotice) -> Attribution:
    rank = notice.rank if notice.rank >= 0 else None
    return Attribution(notice.name, rank, notice.ago, notice.others, notice.by)


def _certain(
    seen: Sequence[RankObservation], notices: Sequence[FailureNotice], limits: StallLimits
) -> Attribution | None:
    """Return the first failure that somebody knows of for certain."""
    out = _out(notices)
    raised = {notice.rank: notice.ago for notice in notices if notice.kind == "raised"}
    gone: dict[int, float] = {}
    for notice in notices:
        if notice.kind == "gone" and notice.rank not in raised:
            gone[notice.rank] = max(notice.ago, gone.get(notice.rank, 0.0))
    for each in seen:
        if each.link == "closed" and each.rank not in raised and each.rank not in out:
            gone[each.rank] = max(each.link_seconds, gone.get(each.rank, 0.0))
    waiting = _longest(seen, limits)  # who left in order may end, unless somebody still needs it
    needed = waiting is not None and waited(waiting, limits) > limits.beat
    gone = {rank: ago for rank, ago in gone.items() if rank not in out or (needed and _done(notices, rank))}
    if not raised and not gone:
        return None
    began = raised | {rank: ago + _AT_ONCE_SECONDS for rank, ago in gone.items()}
    codes = {notice.rank: notice.code for notice in notices if notice.kind == "gone"}
    by_itself = [rank for rank in began if not _was_asked(codes.get(rank))] or list(began)
    first = max(by_itself, key=lambda rank: (began[rank], -rank))
    if first in raised:
        return Attribution("raised", first, raised[first])
    together = [rank for rank in by_itself if rank in gone and gone[first] - gone[rank] < _TOGETHER_SECONDS]
    first = min(together, key=lambda rank: (codes.get(rank) == _ABORTED, rank))
    return Attribution("gone", first, gone[first], tuple(sorted(rank for rank in gone if rank != first)))


def _was_asked(code: int | None) -> bool:
    """Return whether a process was asked to end (SIGINT, SIGTERM), as launchers do with those that remain."""
    return code in (-2, -15)


def _done(notices: Sequence[FailureNotice], rank: int) -> bool:
    return any(notice.kind == "done" and notice.rank == rank for notice in notices)


def _longest(seen: Sequence[RankObservation], limits: StallLimits) -> RankObservation | None:
    """Return the rank that has waited longest, None if none waits."""
    waiting = [each for each in seen if waited(each, limits) > 0.0]
    return max(waiting, key=lambda each: (waited(each, limits), -each.rank)) if waiting else None


def _stopped(me: int, seen: Sequence[RankObservation], limits: StallLimits) -> Attribution | None:
    """Return a rank whose process is stopped, where others wait for it."""
    found = {rank for each in seen if each.row is not None for rank in each.row.stopped}
    silent = {each.rank: each.silent for each in seen if each.rank in found and each.silent > limits.beat}
    if not silent:
        return None
    waiting = _longest([each for each in seen if each.rank not in silent], limits)
    rank = max(silent, key=lambda each: (silent[each], -each))
    if waiting is None or min(silent[rank], waited(waiting, limits)) < limits.lost:
        return None
    others = tuple(sorted(each for each in silent if each != rank))
    return Attribution("stopped", rank, silent[rank], others, waiting.rank)


def _unreachable(me: int, seen: Sequence[RankObservation], limits: StallLimits) -> Attribution | None:
    """Return a rank whose host does not answer; nobody of it must have been heard."""
    mine = next((each.host for each in seen if each.rank == me), "")
    by_host: dict[str, list[RankObservation]] = {}
    for each in seen:
        if each.host != mine:
            by_host.setdefault(each.host, []).append(each)
    lost = {host: ranks for host, ranks in by_host.items() if all(_is_lost(each, limits) for each in ranks)}
    if not lost:
        return None
    doubtful = [host for host, ranks in by_host.items() if all(each.silent > limits.beat for each in ranks)]
    if len(doubtful) == len(by_host) > 1:  # no other host is heard: is it this one?
        if len(lost) < len(by_host):
            return None
        seconds = min(each.silent for ranks in lost.values() for each in ranks)
        return Attribution("cut off", None, seconds, tuple(each.rank for each in seen if each.host == mine))
    ranks = max(lost.values(), key=lambda ranks: (max(each.silent for each in ranks), -ranks[0].rank))
    first = ranks[0]
    return Attribution("unreachable", first.rank, first.silent, tuple(each.rank for each in ranks[1:]))


def _is_lost(each: RankObservation, limits: StallLimits) -> bool:
    if each.link == "lost" or _is_unanswered(each, limits):
        return each.silent >= limits.lost
    return each.link == "none" and each.row is not None and each.silent >= limits.lost + 2 * limits.beat


def _is_unanswered(each: RankObservation, limits: StallLimits) -> bool:
    return each.link == "open" and each.unanswered > limits.beat


def _behind(
    seen: Sequence[RankObservation],
    notices: Sequence[FailureNotice],
    limits: StallLimits,
    *,
    at_work: bool = False,
) -> Attribution | None:
    """Return the rank that others have waited for too long."""
    rows: Mapping[int, Heartbeat] = {each.rank: each.row for each in seen if each.row is not None}
    waiting = _longest(seen, limits)
    if waiting is None:
        return None
    seconds = waited(waiting, limits)
    busy = [
        each for each in seen if _is_silent(each, limits) or (each.row is not None and not each.row.waiting)
    ]
    if busy:
        first = min(busy, key=lambda each: (not _is_silent(each, limits), position(each.row), each.rank))
        return _of_busy(first, seconds, waiting.rank, limits, at_work=at_work)
    if seconds < limits.stall:
        return None
    done = [notice for notice in notices if notice.kind == "done"]
    if done:
        earliest = min(done, key=lambda notice: (notice.step, notice.rank))
        others = tuple(sorted(notice.rank for notice in done if notice is not earliest))
        return Attribution("finished", earliest.rank, seconds, others, waiting.rank)
    first = min(rows, key=lambda rank: (_place(rows[rank]), rank))
    if all(_place(row) == _place(rows[first]) for row in rows.values()):
        return None
    if any(each.silent > limits.beat for each in seen):
        return None  # it may have moved on since it was heard, and be silent for another reason: a moment will show
    ahead = max(rows, key=lambda rank: (_place(rows[rank]), -rank))
    return Attribution("elsewhere", first, seconds, (), ahead)


def _place(row: Heartbeat) -> tuple[int, str, int, int]:
    """Return what a rank waits for, comparable with what another one waits for."""
    step, phase, bucket = position(row)
    return step, row.task, phase, bucket


def _of_busy(
    each: RankObservation, seconds: float, waiting: int, limits: StallLimits, *, at_work: bool
) -> Attribution | None:
    """Return the verdict on a rank that others wait for, and that does not wait itself."""
    if _is_silent(each, limits):
        if _is_unanswered(each, limits) or each.link == "lost":
            return None  # whether it is its host's fault, its host's silence will show
        if min(seconds, each.silent) < (limits.stall if each.dumped else limits.lost):
            return None
        return Attribution("held" if each.dumped else "stopped", each.rank, each.silent, (), waiting)
    if each.silent > limits.beat:
        return None  # whether it is, a moment will show
    assert each.row is not None, "who is not silent was heard of"
    stands = seconds if at_work else min(seconds, each.row.still + each.silent)
    if stands < limits.stall or (each.row.task in _LONG_TASKS and not at_work):
        return None
    return Attribution("stalled", each.rank, stands, (), waiting)
