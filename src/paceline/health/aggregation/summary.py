"""Summary of a part of the world: as little of it as attribution needs, and mergeable.

Attribution looks for extremes: the rank that has waited longest, the least advanced of those that work, the least and
the most advanced of those that wait. The extremes of the world are among the extremes of its parts. So a part is
represented by the rows of these few ranks, the rows of all ranks that are silent, stopped, or ended, and the numbers of
the groups that are heard. Everything else is ordinary and leaves nothing. Times are ages, so clocks need not agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from paceline._core.json_codec import Meta, NonNegative, decode
from paceline.errors import UsageError
from paceline.health.aggregation.groups import ranges
from paceline.health.attribution import RankObservation, awaited_by, progress_of
from paceline.health.heartbeat import FailureNotice, Heartbeat, Integer, MalformedFrame, Name
from paceline.health.straggler import StepTimeSummary

__all__ = [
    "Departures",
    "Summary",
    "Unheard",
    "group_summary",
    "merge",
    "parse_row",
    "representatives",
    "row_record",
]

HEARD_SECONDS = 1.0
"""Silence after which a rank gets a row of its own: five heartbeats."""

_MOST_ROWS = 32
_MOST_APART = 64
_ROW_FIELDS = ("rank", "silent", "link", "link_seconds", "unanswered", "dumped")

Ranges = tuple[tuple[Integer, Integer], ...]
Unheard = tuple[Integer, Integer, NonNegative, bool, bool]
"""First and last group, seconds of silence, whether they were ever heard, whether their hosts do not answer either."""


@dataclass(frozen=True)
class Departures:
    """Ranks that left without a failure, as far as known.

    Attributes:
        done, leaves: ranges of ranks that left their loop, and that left because of others.
        first: rank, step, phase and bucket of the one that left its loop in the earliest step.
    """

    done: Ranges = ()
    leaves: Ranges = ()
    first: tuple[Integer, Integer, Name, Integer] | None = None

    def ranks(self, kind: str) -> set[int]:
        """Return the ranks that left in this way, ``"done"`` or ``"leaves"``."""
        return {rank for first, last in getattr(self, kind) for rank in range(first, last + 1)}

    def notices(self) -> list[FailureNotice]:
        """Return the departures as notices, of which only the first has its step."""
        found = [FailureNotice("leaves", rank, rank) for rank in self.ranks("leaves")]
        if self.first is not None:
            first, step, phase, bucket = self.first
            found.append(FailureNotice("done", first, first, step=step, phase=phase, bucket=bucket))
            others = self.ranks("done") - {first}
            found += [FailureNotice("done", rank, rank, step=step + 1) for rank in others]
        return found

    def merged(self, other: Departures) -> Departures:
        """Return the departures of both."""
        if other == Departures() or other == self:
            return self
        firsts = [each for each in (self.first, other.first) if each is not None]
        return Departures(
            _union(self.done, other.done),
            _union(self.leaves, other.leaves),
            min(firsts, key=lambda each: (each[1], each[0]), default=None),
        )


@dataclass(frozen=True)
class Summary:
    """What is known of a part of the world.

    Attributes:
        groups: ranges of the groups that are heard.
        rows: of ranks that represent the ordinary ones of these groups, see `representatives`.
        apart: of ranks of these groups that are not ordinary.
        lost: of ranks of groups that are not heard, as known to the rank that heard them last.
        unheard: ranges of groups that are not heard, see `Unheard`.
        left: departures.
        times: working seconds per step.
    """

    groups: Ranges = ()
    rows: tuple[RankObservation, ...] = ()
    apart: tuple[RankObservation, ...] = ()
    lost: tuple[RankObservation, ...] = ()
    unheard: tuple[Unheard, ...] = ()
    left: Departures = Departures()
    times: StepTimeSummary = field(default_factory=StepTimeSummary)

    def aged(self, seconds: float) -> Summary:
        """Return this summary as it is to be understood so many seconds later."""
        return replace(
            self,
            rows=tuple(_aged(row, seconds) for row in self.rows),
            apart=tuple(_aged(row, seconds) for row in self.apart),
            lost=tuple(_aged(row, seconds) for row in self.lost),
            unheard=tuple((first, last, age + seconds, *rest) for first, last, age, *rest in self.unheard),
        )

    def group_numbers(self) -> set[int]:
        """Return the groups that are heard."""
        return {group for first, last in self.groups for group in range(first, last + 1)}

    # ------------------------------------------------------------------ as a message

    def record(self) -> dict[str, Any]:
        """Return this summary as JSON; what is empty is left out."""
        record: dict[str, Any] = {
            "groups": self.groups,
            "rows": [row_record(row) for row in self.rows],
            "apart": [row_record(row) for row in self.apart],
            "lost": [row_record(row) for row in self.lost],
            "unheard": [(first, last, round(age, 2), *rest) for first, last, age, *rest in self.unheard],
            "done": self.left.done,
            "leaves": self.left.leaves,
            "first": self.left.first,
            "times": self.times.record(),
        }
        return {name: value for name, value in record.items() if value}

    @classmethod
    def parse(cls, record: object, host_keys: Sequence[str], groups: int) -> Summary:
        """Return the summary in a message.

        Args:
            record: the message.
            host_keys: of every rank. groups: their number.

        Raises:
            MalformedFrame: a field is invalid, or names a rank or group that there is not.
        """
        found = _decoded(record, _Record)
        ranks = len(host_keys)
        numbers = [each for pair in (*found.groups, *(entry[:2] for entry in found.unheard)) for each in pair]
        _check(numbers, groups, "group")
        _check([each for pair in (*found.done, *found.leaves) for each in pair], ranks, "rank")
        _check(() if found.first is None else found.first[:1], ranks, "rank")
        return cls(
            found.groups,
            tuple(parse_row(row, host_keys) for row in found.rows),
            tuple(parse_row(row, host_keys) for row in found.apart),
            tuple(parse_row(row, host_keys) for row in found.lost),
            found.unheard,
            Departures(found.done, found.leaves, found.first),
            StepTimeSummary.parse(found.times, ranks),
        )


@dataclass(frozen=True)
class _Record:
    groups: Ranges = ()
    rows: Annotated[list[list[Any]], Meta(max_length=_MOST_ROWS)] = field(default_factory=list)
    apart: Annotated[list[list[Any]], Meta(max_length=_MOST_APART)] = field(default_factory=list)
    lost: Annotated[list[list[Any]], Meta(max_length=_MOST_APART)] = field(default_factory=list)
    unheard: tuple[Unheard, ...] = ()
    done: Ranges = ()
    leaves: Ranges = ()
    first: tuple[Integer, Integer, Name, Integer] | None = None
    times: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class _RowRecord:
    rank: Integer
    silent: NonNegative
    link: Annotated[str, Meta(pattern="^(open|closed|lost|none)$")]
    link_seconds: NonNegative
    unanswered: NonNegative
    dumped: bool


def row_record(row: RankObservation) -> list[Any]:
    """Return a row as JSON: its fields without the host, then its heartbeat."""
    values = [getattr(row, name) for name in _ROW_FIELDS]
    rounded = [round(value, 3) if isinstance(value, float) else value for value in values]
    return [*rounded, None if row.heartbeat is None else row.heartbeat.message()["row"]]


def parse_row(values: list[Any], host_keys: Sequence[str]) -> RankObservation:
    """Return the row in a message.

    Raises:
        MalformedFrame: a field is invalid.
    """
    if len(values) != len(_ROW_FIELDS) + 1:
        raise MalformedFrame(f"a row has {len(_ROW_FIELDS) + 1} values")
    found = _decoded(dict(zip(_ROW_FIELDS, values, strict=False)), _RowRecord)
    _check([found.rank], len(host_keys), "rank")
    heartbeat = None if values[-1] is None else Heartbeat.parse(values[-1], len(host_keys))
    if heartbeat is not None and heartbeat.rank != found.rank:
        raise MalformedFrame(f"a heartbeat of rank {heartbeat.rank} in a row of rank {found.rank}")
    return RankObservation(
        found.rank,
        str(host_keys[found.rank]),
        heartbeat,
        found.silent,
        link=found.link,
        link_seconds=found.link_seconds,
        unanswered=found.unanswered,
        dumped=found.dumped,
    )


def _decoded(record: object, kind: type[Any]) -> Any:
    try:
        return decode(record, kind, kind.__name__)
    except UsageError as error:
        raise MalformedFrame(str(error).partition("\n")[0]) from None


def _check(numbers: Iterable[int], limit: int, name: str) -> None:
    for number in numbers:
        if not 0 <= number < limit:
            raise MalformedFrame(f"{name} {number} of {limit}")


# ------------------------------------------------------------------ selecting and merging


def group_summary(group: int, rows: Iterable[RankObservation], times: StepTimeSummary) -> Summary:
    """Return the summary of one group from what one of its ranks observes of it."""
    apart: list[RankObservation] = []
    ordinary: list[RankObservation] = []
    for row in rows:
        silent = row.silent > HEARD_SECONDS or row.link in ("closed", "lost") or row.dumped
        (apart if silent or row.heartbeat is None else ordinary).append(row)
    return Summary(((group, group),), tuple(representatives(ordinary)), tuple(apart), times=times)


def representatives(rows: Iterable[RankObservation]) -> list[RankObservation]:
    """Return the rows of ordinary ranks that attribution may choose, at most 32.

    These are the ranks that have waited longest, work and are least advanced, wait and are least or most advanced, are
    in the latest step; and one that reports each stopped process.
    """
    found: dict[int, RankObservation] = {}
    reported: set[int] = set()
    ordinary = [(row, row.heartbeat) for row in rows if row.heartbeat is not None]
    waiting = [each for each in ordinary if each[1].waiting]
    working = [each for each in ordinary if not each[1].waiting]
    keys: list[tuple[list[tuple[RankObservation, Heartbeat]], Callable[[Heartbeat], Any], int]] = [
        (waiting, awaited_by, 1),
        (waiting, awaited_by, -1),
        (working, progress_of, 1),
        (ordinary, lambda heartbeat: heartbeat.step, -1),
    ]
    for group, key, sign in keys:
        if group:
            row = _extreme(group, key, sign)
            found[row.rank] = row
    if waiting:
        row, _ = max(waiting, key=lambda each: (each[1].age + each[0].silent, -each[0].rank))
        found[row.rank] = row
    for row, heartbeat in ordinary:
        if len(found) < _MOST_ROWS and not reported.issuperset(heartbeat.stopped):
            reported.update(heartbeat.stopped)
            found[row.rank] = row
    return list(found.values())


def _extreme(
    rows: list[tuple[RankObservation, Heartbeat]], key: Callable[[Heartbeat], Any], sign: int
) -> RankObservation:
    """Return the row with the least (`sign` 1) or greatest key, of these that of the lowest rank."""
    keys = [key(heartbeat) for _, heartbeat in rows]
    best = min(keys) if sign > 0 else max(keys)
    return min(
        (row for (row, _), each in zip(rows, keys, strict=True) if each == best), key=lambda row: row.rank
    )


def _earliest(rows: Sequence[RankObservation]) -> list[RankObservation]:
    """Return at most 64 rows: those that have been silent longest."""
    if len(rows) <= _MOST_APART:
        return list(rows)
    return sorted(rows, key=lambda row: (-row.silent, row.rank))[:_MOST_APART]


def merge(parts: Sequence[Summary], group_of: Sequence[int]) -> Summary:
    """Return the summary of several parts, which may overlap: what was heard more recently counts."""
    heard: set[int] = set()
    rows: dict[int, RankObservation] = {}
    apart: dict[int, RankObservation] = {}
    left, times = Departures(), StepTimeSummary()
    for part in parts:
        heard |= part.group_numbers()
        left, times = left.merged(part.left), times.merged(part.times)
        _add_fresher(rows, part.rows)
        _add_fresher(apart, part.apart)
    gone = left.ranks("done") | left.ranks("leaves")
    lost: dict[int, RankObservation] = {}
    for part in parts:
        absent = [row for row in part.lost if group_of[row.rank] not in heard and row.rank not in gone]
        _add_fresher(lost, absent)
    return Summary(
        tuple((first, last) for first, last in ranges(heard)),
        tuple(representatives(rows.values())),
        tuple(_earliest([row for row in apart.values() if row.rank not in gone])),
        tuple(_earliest(list(lost.values()))),
        (),
        left,
        times,
    )


def _add_fresher(known: dict[int, RankObservation], rows: Iterable[RankObservation]) -> None:
    for row in rows:
        if row.rank not in known or row.silent < known[row.rank].silent:
            known[row.rank] = row


def _aged(row: RankObservation, seconds: float) -> RankObservation:
    open_link = row.link == "open"
    return dataclasses.replace(
        row,
        silent=row.silent + seconds,
        link_seconds=row.link_seconds if open_link else row.link_seconds + seconds,
        unanswered=row.unanswered + seconds if row.unanswered else 0.0,
    )


def _union(one: Ranges, other: Ranges) -> Ranges:
    ranks = {rank for first, last in (*one, *other) for rank in range(first, last + 1)}
    return tuple((first, last) for first, last in ranges(ranks))
