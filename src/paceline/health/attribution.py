"""Failure attribution: a pure function from what is known of all ranks to the rank that failed, and how.

Evidence, from certain to weak:

    raised        the rank announced its own exception
    gone          its process has ended: reported by its host, or by the end of its connections
    stopped       its process is stopped, or does nothing although its host answers, and others wait for it
    unreachable   its host does not answer; if no other host answers either, this rank's own is cut off
    held          one of its threads holds Python's lock, so that it can't answer, and others wait for it
    finished      it left its loop, and others wait for it
    stalled       it is behind, stands still, and others wait for it
    elsewhere     all ranks sent heartbeats just now and wait, but not for the same thing: the least advanced one

A connection error is no evidence: it is how other ranks see one of these. Nor is the silence of a rank that nobody
waits for: a long call may hold Python's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from paceline._core.step_state import PHASES
from paceline.health.heartbeat import FailureNotice, Heartbeat

__all__ = [
    "CERTAIN",
    "Attribution",
    "RankObservation",
    "StallLimits",
    "attribute_failure",
    "awaited_by",
    "find_late_rank",
    "progress_of",
    "waited_seconds",
]

CERTAIN = ("raised", "gone")
"""Kinds that more evidence can't change."""

_CONSEQUENCE_SECONDS = 0.5
"""An exception this soon after the end of another process may be a consequence of it."""

_TOGETHER_SECONDS = 0.3
"""Processes that end within this time end together, as a host's do: all ranks are to name the same one."""

_ABORTED = -6
"""Ended by SIGABRT: C++ gave up, perhaps because of another rank."""

_URGENT_SECONDS = 1.5
"""Limit for waits and silence once a connection of this rank has failed."""

_LEAST_HEARTBEATS = 1.75
"""After this many intervals all ranks of a lost host are silent, not only some; see `StallLimits.minus`."""

_LEAST_DUMP_SECONDS = 1.5
"""A watchdog may get no turn this long on a loaded machine."""

_LONG_TASKS = ("checkpoint", "eval")
"""Tasks that one rank may do alone while others wait, for as long as it takes."""


@dataclass(frozen=True)
class RankObservation:
    """Evidence about a rank.

    Attributes:
        rank: its number.
        host: key of its host; names of hosts need not be unique.
        heartbeat: the latest; None: none yet.
        silent: seconds since it arrived; 0 for this rank itself.
        link: ``"open"``, ``"closed"`` (by the other end), ``"lost"`` (its host does not answer), or ``"none"``
            (heartbeats come through other ranks).
        link_seconds: since the link is closed or lost.
        unanswered: seconds since its host acknowledged sent bytes, as far as known.
        dumped: since it fell silent, it wrote its stack by the thread that needs no lock of Python's.
        heard: heartbeats of it were received by some rank; needed only where `heartbeat` is None.
    """

    rank: int
    host: str
    heartbeat: Heartbeat | None = None
    silent: float = 0.0
    _: KW_ONLY
    link: str = "open"
    link_seconds: float = 0.0
    unanswered: float = 0.0
    dumped: bool = False
    heard: bool = False


Observations = Sequence[RankObservation]
Notices = Sequence[FailureNotice]


@dataclass(frozen=True)
class StallLimits:
    """Time limits.

    Attributes:
        stall: seconds for which ranks may wait for one that stands still.
        lost: seconds without a sign of life of a stopped process or an unreachable host.
        interval: seconds between two heartbeats, with usual delays.
        urgent: a connection of this rank failed, so it names whom it can.
    """

    stall: float = 60.0
    lost: float = 15.0
    interval: float = 1.0
    urgent: bool = False

    @property
    def dump(self) -> float:
        """Seconds after which a process whose watchdog gets no turn dumps its stacks without Python's lock."""
        return max(_LEAST_DUMP_SECONDS, min(5.0, self.stall / 3, self.lost / 3))

    @property
    def unseen(self) -> float:
        """As `lost`, for a process that no other of its host has seen stopped: the stacks that it dumps come first."""
        return self.lost if self.urgent else max(self.lost, 3 * self.dump)

    def minus(self, seconds: float, interval: float) -> StallLimits:
        """Return when to suspect a rank so that it is named within these limits if naming takes `seconds` more.

        Short limits stay: telling which ranks are silent takes some heartbeats.
        """
        least = _LEAST_HEARTBEATS * interval
        return StallLimits(
            max(self.stall - seconds, min(self.stall, least)),
            max(self.lost - seconds, min(self.lost, least)),
            interval,
        )


@dataclass(frozen=True)
class Attribution:
    """A failure and the rank that caused it.

    Attributes:
        kind: one of those listed above, or ``"cut off"``: this rank's own host.
        rank: the rank at fault; None: no single one.
        seconds: how long it has lasted, or how long ago it happened.
        others: ranks with the same failure.
        waiting: a rank that waits for it, None if none does.
    """

    kind: str
    rank: int | None
    seconds: float = 0.0
    others: tuple[int, ...] = ()
    waiting: int | None = None

    @property
    def certain(self) -> bool:
        """True if more evidence can't change it."""
        return self.kind in CERTAIN


def attribute_failure(
    rank: int,
    observations: Observations,
    notices: Notices,
    limits: StallLimits,
    *,
    urgent: bool = False,
) -> Attribution | None:
    """Return the failure that the evidence shows, None if it shows none.

    Args:
        rank: this rank.
        observations: of all ranks, in rank order; of those without evidence it needs only the extremes, see
            `aggregation.summary`.
        notices: known events.
        limits: time limits.
        urgent: a connection of this rank has failed, so weaker evidence counts.
    """
    if (certain := _certain(observations, notices, limits)) is not None:
        return certain
    shared = [notice for notice in notices if notice.kind == "verdict"]
    if shared:
        first = min(shared, key=lambda each: (each.rank, each.by))
        # A rank may find out itself that others wait for it.
        waiting = first.by if first.by != first.rank else None
        return Attribution(
            first.name, first.rank if first.rank >= 0 else None, first.ago, first.others, waiting
        )
    if urgent:
        limits = StallLimits(
            min(limits.stall, _URGENT_SECONDS),
            min(limits.lost, _URGENT_SECONDS),
            limits.interval,
            urgent=True,
        )
    present = _present(observations, notices)
    return (
        _stopped(present, limits) or _unreachable(rank, present, limits) or _stalled(present, notices, limits)
    )


def find_late_rank(
    observations: Observations,
    notices: Notices,
    seconds: float,
    interval: float = StallLimits.interval,
) -> Attribution | None:
    """Return the rank that others have waited `seconds` for, even if it is working; a reason for a warning."""
    limits = StallLimits(seconds, seconds, interval)
    return _stalled(_present(observations, notices), notices, limits, working_counts=True)


def waited_seconds(observed: RankObservation, limits: StallLimits) -> float:
    """Return how long a rank has waited for others; 0 if it does not, or is silent."""
    heartbeat = observed.heartbeat
    if heartbeat is None or not heartbeat.waiting or _is_silent(observed, limits):
        return 0.0
    return heartbeat.age + observed.silent


def progress_of(heartbeat: Heartbeat | None) -> tuple[int, int, int]:
    """Return how far a rank is, comparable: step, phase, bucket; a rank without heartbeat comes first."""
    if heartbeat is None:
        return -1, 0, -1
    phase = PHASES.index(heartbeat.phase) if heartbeat.phase in PHASES else len(PHASES)
    return heartbeat.step, phase, heartbeat.bucket


def awaited_by(heartbeat: Heartbeat) -> tuple[int, str, int, int]:
    """Return what a rank waits for, comparable between ranks."""
    step, phase, bucket = progress_of(heartbeat)
    return step, heartbeat.task, phase, bucket


def _is_silent(observed: RankObservation, limits: StallLimits) -> bool:
    """Return whether a rank has been silent so long that its stack dump would have arrived, if it can write one."""
    return observed.silent > 2 * limits.interval


def _ranks_with(notices: Notices, *kinds: str) -> set[int]:
    return {notice.rank for notice in notices if notice.kind in kinds}


def _present(observations: Observations, notices: Notices) -> list[RankObservation]:
    """Return the ranks that have not left, in order or because of another rank."""
    left = _ranks_with(notices, "done", "leaves")
    return [each for each in observations if each.rank not in left]


def _certain(observations: Observations, notices: Notices, limits: StallLimits) -> Attribution | None:
    """Return the earliest failure that some rank knows for certain."""
    left, done = _ranks_with(notices, "done", "leaves"), _ranks_with(notices, "done")
    raised = {notice.rank: notice.ago for notice in notices if notice.kind == "raised"}
    ends = [(notice.rank, notice.ago) for notice in notices if notice.kind == "gone"]
    ends += [
        (each.rank, each.link_seconds)
        for each in observations
        if each.link == "closed" and each.rank not in left
    ]
    gone: dict[int, float] = {}
    for rank, ago in ends:
        if rank not in raised:
            gone[rank] = max(ago, gone.get(rank, 0.0))
    longest = _longest_waiting(observations, limits)
    needed = longest is not None and waited_seconds(longest, limits) > limits.interval
    may_end = left - done if needed else left
    gone = {rank: ago for rank, ago in gone.items() if rank not in may_end}
    if not raised and not gone:
        return None
    began = raised | {rank: ago + _CONSEQUENCE_SECONDS for rank, ago in gone.items()}
    codes = {notice.rank: notice.code for notice in notices if notice.kind == "gone"}
    spontaneous = [rank for rank in began if not _was_terminated(codes.get(rank))] or list(began)
    first = max(spontaneous, key=lambda rank: (began[rank], -rank))
    if first in raised:
        return Attribution("raised", first, raised[first])
    together = [rank for rank in spontaneous if rank in gone and gone[first] - gone[rank] < _TOGETHER_SECONDS]
    first = min(together, key=lambda rank: (codes.get(rank) == _ABORTED, rank))
    return Attribution("gone", first, gone[first], tuple(sorted(rank for rank in gone if rank != first)))


def _was_terminated(code: int | None) -> bool:
    """Return whether SIGINT or SIGTERM ended a process: launchers end remaining ranks so."""
    return code in (-2, -15)


def _longest_waiting(observations: Observations, limits: StallLimits) -> RankObservation | None:
    waiting = [each for each in observations if waited_seconds(each, limits) > 0.0]
    return max(waiting, key=lambda each: (waited_seconds(each, limits), -each.rank), default=None)


def _stopped(observations: Observations, limits: StallLimits) -> Attribution | None:
    """Return a rank whose process is stopped while others wait for it."""
    stopped = {rank for each in observations if each.heartbeat for rank in each.heartbeat.stopped}
    silent = {
        each.rank: each for each in observations if each.rank in stopped and each.silent > limits.interval
    }
    waiting = _longest_waiting([each for each in observations if each.rank not in silent], limits)
    if not silent or waiting is None:
        return None
    first = max(silent.values(), key=lambda each: (each.silent, -each.rank))
    if min(first.silent, waited_seconds(waiting, limits)) < limits.lost:
        return None
    return Attribution(
        "stopped", first.rank, first.silent, tuple(sorted({*silent} - {first.rank})), waiting.rank
    )


def _unreachable(rank: int, observations: Observations, limits: StallLimits) -> Attribution | None:
    """Return the first rank of a host that does not answer and of which all ranks are silent."""
    own_host = next((each.host for each in observations if each.rank == rank), "")
    by_host: dict[str, list[RankObservation]] = {}
    for each in observations:
        if each.host != own_host:
            by_host.setdefault(each.host, []).append(each)
    lost = [ranks for ranks in by_host.values() if all(_is_lost(each, limits) for each in ranks)]
    if not lost:
        return None
    silent = [ranks for ranks in by_host.values() if all(each.silent > limits.interval for each in ranks)]
    if len(silent) == len(by_host) > 1:  # no other host is heard, so this one may be cut off
        if len(lost) < len(by_host):
            return None
        seconds = min(each.silent for ranks in lost for each in ranks)
        own = tuple(each.rank for each in observations if each.host == own_host)
        return Attribution("cut off", None, seconds, own)
    first, *others = max(lost, key=lambda ranks: (max(each.silent for each in ranks), -ranks[0].rank))
    return Attribution("unreachable", first.rank, first.silent, tuple(each.rank for each in others))


def _is_lost(observed: RankObservation, limits: StallLimits) -> bool:
    if observed.link == "lost" or _is_unanswered(observed, limits):
        return observed.silent >= limits.lost
    relayed = observed.link == "none" and (observed.heartbeat is not None or observed.heard)
    return relayed and observed.silent >= limits.lost + 2 * limits.interval


def _is_unanswered(observed: RankObservation, limits: StallLimits) -> bool:
    return observed.link == "open" and observed.unanswered > limits.interval


def _stalled(
    observations: Observations,
    notices: Notices,
    limits: StallLimits,
    *,
    working_counts: bool = False,
) -> Attribution | None:
    """Return the rank that others have waited for too long."""
    waiting = _longest_waiting(observations, limits)
    if waiting is None:
        return None
    seconds = waited_seconds(waiting, limits)
    busy = [
        each
        for each in observations
        if _is_silent(each, limits) or (each.heartbeat is not None and not each.heartbeat.waiting)
    ]
    if busy:
        first = min(
            busy, key=lambda each: (not _is_silent(each, limits), progress_of(each.heartbeat), each.rank)
        )
        return _busy(first, seconds, waiting.rank, limits, working_counts=working_counts)
    if seconds < limits.stall:
        return None
    done = [notice for notice in notices if notice.kind == "done"]
    if done:
        earliest = min(done, key=lambda notice: (notice.step, notice.rank))
        others = tuple(sorted({notice.rank for notice in done} - {earliest.rank}))
        return Attribution("finished", earliest.rank, seconds, others, waiting.rank)
    awaited = {each.rank: awaited_by(each.heartbeat) for each in observations if each.heartbeat is not None}
    first = min(awaited, key=lambda rank: (awaited[rank], rank))
    if all(each == awaited[first] for each in awaited.values()):
        return None
    if any(each.silent > limits.interval for each in observations):
        return None  # it may have moved on since its latest heartbeat; more time will show
    ahead = max(awaited, key=lambda rank: (awaited[rank], -rank))
    return Attribution("elsewhere", first, seconds, (), ahead)


def _busy(
    observed: RankObservation, seconds: float, waiting: int, limits: StallLimits, *, working_counts: bool
) -> Attribution | None:
    """Return the attribution to a rank that others wait for and that does not wait itself."""
    if _is_silent(observed, limits):
        if _is_unanswered(observed, limits) or observed.link == "lost":
            return None  # the silence of its host will show whether that is the cause
        if min(seconds, observed.silent) < (limits.stall if observed.dumped else limits.unseen):
            return None
        kind = "held" if observed.dumped else "stopped"
        return Attribution(kind, observed.rank, observed.silent, (), waiting)
    if observed.silent > limits.interval:
        return None  # more time will show whether it is silent
    assert observed.heartbeat is not None, "a rank that is not silent has sent one"
    still = seconds if working_counts else min(seconds, observed.heartbeat.still + observed.silent)
    if still < limits.stall or (observed.heartbeat.task in _LONG_TASKS and not working_counts):
        return None
    return Attribution("stalled", observed.rank, still, (), waiting)
