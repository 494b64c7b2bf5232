"""One rank's part in collecting summaries up the tree and distributing the world's down again.

    every second, a leader      →  its parent           summary of all that reports to it, its group's rows
    the first leader of all     →  children and group   summary of the world
    a leader that receives it   →  children and group   the same; to children also its group's rows

Rows of a group go one step up and down, so that somebody knows the last state of each rank of a host that is lost. A
leader that does not hear its parent for 2.5 s looks for another. Where a neighbour ends, the ranks of its group are
probed: whether their processes still listen. Nothing here knows sockets, threads or clocks: `PeerNetwork` does.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.health.aggregation.groups import PeerGroups
from paceline.health.aggregation.parent_search import ParentSearch, PeerNetwork
from paceline.health.aggregation.process_probes import ProcessProbes
from paceline.health.aggregation.summary import (
    Departures,
    Summary,
    Unheard,
    group_summary,
    merge,
    parse_row,
    row_record,
)
from paceline.health.attribution import RankObservation
from paceline.health.heartbeat import FailureNotice, MalformedFrame
from paceline.health.straggler import StepTimeSummary

__all__ = ["REPORT_SECONDS", "GroupState", "SummaryExchange"]

REPORT_SECONDS = 1.0
FRESH_SECONDS = 2.5 * REPORT_SECONDS
"""Age up to which a report counts as news of its groups."""

_MOST_SILENT = 64  # groups that are not heard, of which rows are made
_WHOLE_SILENT = 4  # of these, with rows of all ranks
_TAKEOVER_SECONDS = 1.0  # for another rank of the group to report, after its leader has left


@dataclass(frozen=True)
class GroupState:
    """What a rank knows of its own group.

    Attributes:
        rows: returns those of all its ranks.
        silent: returns the seconds since a rank of it was heard.
        left: departures that this rank knows from the ranks themselves.
        gone: ranks of any group that are known to have ended without announcing it.
        times: returns their working seconds per step.
    """

    rows: Callable[[], Sequence[RankObservation]]
    silent: Callable[[int], float]
    left: Departures
    gone: Collection[int]
    times: Callable[[], StepTimeSummary]


@dataclass
class _Report:
    """The latest message of a neighbour: its report, or only its group's rows if this rank reports to it."""

    summary: Summary
    rows: tuple[RankObservation, ...]
    at: float


class SummaryExchange:
    """Reports of one rank.

    Args:
        network: its connections.
        groups: of the world.
        limit: seconds after which the world's summary is too old.

    Attributes:
        search: finds the rank that this one reports to.
    """

    def __init__(self, network: PeerNetwork, groups: PeerGroups, limit: float) -> None:
        now = network.now()
        self._network, self._groups, self._limit = network, groups, limit
        self._own, self._group = network.own.rank, groups.group_of[network.own.rank]
        self._host_keys = groups.host_keys
        self.search = ParentSearch(network, groups)
        self._children: dict[int, _Report] = {}
        self._parents: dict[int, _Report] = {}
        self._rows: list[list[Any]] = []
        self._world, self._world_at = Summary(), now
        self._world_groups: set[int] = set()
        self._reported_at = self._sent_down_at = now
        self._heard_at: dict[
            int, float
        ] = {}  # of groups that were ever heard, where this rank reports to none
        self._began_at = now
        self._left = Departures()
        self._probes = ProcessProbes(network, groups)

    # ------------------------------------------------------------------ receiving

    def receive(self, source: int, message: dict[str, Any], now: float) -> None:
        """Take in a report of a child, or the world's summary.

        Raises:
            MalformedFrame: it is invalid.
        """
        if "up" in message and message["up"] is None:
            self._children.pop(source, None)
        elif "up" in message:
            summary = self._parsed(message["up"])
            self._children[source] = _Report(summary, self._parsed_rows(source, message), now)
        elif source == self.search.parent:
            self._adopt(self._parsed(message["world"]), now)
            self.search.heard(now)
            self._remember(self._world)
            if "rows" in message:
                self._parents[source] = _Report(Summary(), self._parsed_rows(source, message), now)
            self._send_down(self._world, now)

    def _parsed_rows(self, source: int, message: dict[str, Any]) -> tuple[RankObservation, ...]:
        rows, group_of = message.get("rows"), self._groups.group_of
        if not isinstance(rows, list) or len(rows) > len(self._groups.groups[group_of[source]]):
            raise MalformedFrame("no rows of the sender's group")
        parsed = tuple(parse_row(row, self._host_keys) for row in rows)
        if any(group_of[row.rank] != group_of[source] for row in parsed):
            raise MalformedFrame("rows of another group")
        return parsed

    def _parsed(self, record: object) -> Summary:
        return Summary.parse(record, self._host_keys, len(self._groups.groups))

    def _adopt(self, world: Summary, now: float) -> None:
        self._world, self._world_at, self._world_groups = world, now, world.group_numbers()

    def _remember(self, summary: Summary) -> None:
        self._left = self._left.merged(summary.left)

    def ignore_absence(self, seconds: float) -> None:
        """Shift all arrival times: for so long this rank could not receive."""
        self._world_at += seconds
        self.search.heard_at += seconds
        for report in (*self._children.values(), *self._parents.values()):
            report.at += seconds
        self._began_at += seconds
        self._heard_at = {group: at + seconds for group, at in self._heard_at.items()}

    # ------------------------------------------------------------------ reporting

    def turn(self, state: GroupState, now: float) -> None:
        """Report and distribute what is due.

        Args:
            state: of the own group. now: as `PeerNetwork.now`.
        """
        self._remember(Summary(left=state.left))
        self._probes.gone.update(state.gone)
        left = self._left.ranks("done") | self._left.ranks("leaves")
        previous = self.search.parent
        self.search.update(state.silent, left, now)
        self._left = self._probes.judge(self.search.refused, self._left)
        if previous is not None and previous != self.search.parent:
            self._network.send({"up": None}, to=[previous])
            if self.search.parent is None:
                self._continue_from(self._world, self._world_at)
        if now - self._reported_at >= REPORT_SECONDS:
            self._reported_at = now
            self._report(state, now)
        self._check_children(left, now)

    def _report(self, state: GroupState, now: float) -> None:
        leads = self.search.leads
        rows = state.rows() if leads else ()
        self._rows = [row_record(row) for row in rows]
        if not leads and not self._children:
            return
        parts = [group_summary(self._group, rows, state.times())] if leads else []
        part = merge([Summary(left=self._left), *parts, *self._neighbour_parts(now)], self._groups.group_of)
        former = set(self._parents) - {self.search.parent}
        self._network.send(
            {"up": None}, to=former
        )  # so that acknowledgements show whether their hosts answer
        if self.search.parent is not None:
            message = {"up": part.record(), "rows": self._rows}
            self._network.send(message, to=[self.search.parent], droppable=True)
            if (
                now - self._sent_down_at > 1.5 * REPORT_SECONDS
            ):  # the ranks below are not to take this one for lost
                self._send_down(merge([part, self._aged_world(now)], self._groups.group_of), now)
        elif leads:
            self._adopt(self._with_unheard(part, now), now)
            self._send_down(self._world, now)
            left = self._left.ranks("done") | self._left.ranks("leaves")
            self._probes.probe_unheard(self._world, left, FRESH_SECONDS + _TAKEOVER_SECONDS, now)

    def _aged_world(self, now: float) -> Summary:
        age = now - self._world_at
        world = self._world.aged(age)
        return world if age <= FRESH_SECONDS else replace(world, groups=(), rows=(), apart=())

    def _neighbour_parts(self, now: float) -> Iterator[Summary]:
        """Yield the summaries of what reports to this rank, and of neighbours' groups that are not heard any more."""
        for source, report in self._parents.items():
            if now - report.at > FRESH_SECONDS:
                rows = (self._with_evidence(source, row, now - report.at) for row in report.rows)
                yield Summary(lost=tuple(rows))
        for source, report in self._children.items():
            age = now - report.at
            if age <= FRESH_SECONDS:
                yield report.summary.aged(age)
            else:
                lost = tuple(self._with_evidence(source, row, age) for row in report.rows)
                yield Summary(lost=lost, left=report.summary.left)

    def _with_evidence(self, source: int, row: RankObservation, age: float) -> RankObservation:
        """Return a row of a child that is not heard, with what its connection shows of their host."""
        link = self._network.links.get(row.rank)
        via = self._network.links.get(source)
        silent = row.silent + age
        if link is not None:
            state, since = link.state, self._network.now() - link.since if link.state != "open" else 0.0
        else:
            state, since = "lost" if via is not None and via.state == "lost" else "none", 0.0
        unanswered = 0.0 if via is None or via.state != "open" else self._network.unanswered(source)
        if unanswered > FRESH_SECONDS:
            state = "open"  # and unanswered: their host is the same
        failure = self._network.call_failure(row.rank)
        if failure is not None and failure.kind == "unanswered" and state == "none":
            state, unanswered = "open", max(unanswered, silent)
        return replace(
            row,
            silent=silent,
            link=state,
            link_seconds=since,
            unanswered=unanswered if state == "open" else 0.0,
        )

    def _with_unheard(self, part: Summary, now: float) -> Summary:
        """Return the world's summary, made by the rank that reports to none."""
        self._heard_at.update(dict.fromkeys(part.group_numbers(), now))
        left, cut_off = self._left.ranks("done") | self._left.ranks("leaves"), self._is_cut_off()
        unheard: list[Unheard] = []
        for group, ranks in enumerate(self._groups.groups):
            age, ever = now - self._heard_at.get(group, self._began_at), group in self._heard_at
            if age <= (FRESH_SECONDS if ever else self._limit) or left.issuperset(ranks):
                continue
            first, last, known, same, _ = unheard[-1] if unheard else (0, -2, 0.0, ever, cut_off)
            if last == group - 1 and same == ever and abs(known - age) < 1.0:
                unheard[-1] = first, group, max(known, age), ever, cut_off
            else:
                unheard.append((group, group, age, ever, cut_off))
        return replace(part, unheard=tuple(unheard))

    def _is_cut_off(self) -> bool:
        """Return whether no other host answers on any connection that this rank has with one."""
        others = [
            rank
            for rank, link in self._network.links.items()
            if self._host_keys[rank] != self._host_keys[self._own] and link.state in ("open", "lost")
        ]
        return bool(others) and all(
            self._network.links[rank].state == "lost" or self._network.unanswered(rank) > FRESH_SECONDS
            for rank in others
        )

    def _continue_from(self, world: Summary, at: float) -> None:
        """Continue the times of a summary that another rank made."""
        self._heard_at = dict.fromkeys(world.group_numbers(), at)
        for first, last, age, ever, _ in world.unheard:
            if ever:
                self._heard_at.update(dict.fromkeys(range(first, last + 1), at - age))

    def _send_down(self, world: Summary, now: float) -> None:
        self._sent_down_at = now
        message = {"world": world.record()}
        mates = set(self._groups.mates(self._own))
        children = set(self._children) - {self.search.parent}
        if self.search.leads:
            self._network.send(message, to=mates, droppable=True)
            children -= mates
        self._network.send(message | {"rows": self._rows}, to=children, droppable=True)

    def _check_children(self, left: set[int], now: float) -> None:
        """Probe the group of a child that ended, unless another rank of it reports; forget those that are replaced."""
        for source, report in list(self._children.items()):
            link = self._network.links.get(source)
            group = self._groups.groups[self._groups.group_of[source]]
            replaced = any(
                other != source and other in group and each.at > report.at
                for other, each in self._children.items()
            )
            if replaced and now - report.at > FRESH_SECONDS:
                del self._children[source]
                continue
            wait = _TAKEOVER_SECONDS if source in left else 0.0
            ended = link is None or link.state == "closed"
            if ended and not replaced and now - report.at > wait:
                self._probes.probe(self._groups.group_of[source], left | {source}, now)

    # ------------------------------------------------------------------ what is known

    def is_unremarkable(self, longest: float, now: float) -> bool:
        """Return whether nothing of the world is to be attributed: all groups are heard, no rank waits longer."""
        world = self._world
        if now - self._world_at > self._limit or world.apart or world.lost or world.unheard:
            return False
        if self._left != Departures() or any(
            now - report.at > FRESH_SECONDS for report in self._children.values()
        ):
            return False
        waits = (
            row.heartbeat.age for row in world.rows if row.heartbeat is not None and row.heartbeat.waiting
        )
        return max(waits, default=0.0) <= longest

    @property
    def ended(self) -> set[int]:
        """Ranks whose processes were found to have ended, without another report of it."""
        return self._probes.ended

    def departures(self) -> list[FailureNotice]:
        """Return the departures of all ranks, as far as known."""
        return self._left.notices()

    def times(self) -> StepTimeSummary:
        """Return the working seconds per step in the whole world."""
        return self._world.times

    def observations(self, now: float) -> list[RankObservation]:
        """Return what is known of other groups: of ranks that are lost or remarkable, and of one that is heard."""
        age = now - self._world_at
        world, below = self._world.aged(age), merge(list(self._neighbour_parts(now)), self._groups.group_of)
        near = below.group_numbers() | {self._group}
        heard = (near, self._world_groups) if age <= self._limit else (near,)
        found: dict[int, RankObservation] = {}
        for row in (*below.rows, *below.apart, *world.rows, *world.apart):
            group = self._groups.group_of[row.rank]
            known = found.get(row.rank)
            if group != self._group and (known is None or row.silent < known.silent):
                found[row.rank] = row
        for row in (*below.lost, *world.lost):
            if not any(self._groups.group_of[row.rank] in each for each in heard):
                found[row.rank] = row
        for row in self._silent_rows(world, heard, age):
            found.setdefault(row.rank, row)
        self._add_ordinary(found, heard, min(age, self._limit))
        for rank, link in self._network.links.items():
            if link.state == "closed" and self._groups.group_of[rank] != self._group:
                row = found.get(rank) or RankObservation(rank, self._host_keys[rank])
                found[rank] = replace(row, link="closed", link_seconds=now - link.since)
        return [found[rank] for rank in sorted(found)]

    def _silent_rows(
        self, world: Summary, heard: Sequence[set[int]], age: float
    ) -> Iterator[RankObservation]:
        """Yield rows of groups that are not heard and of which no row is known.

        Attribution names a host that has been silent longest, so only of a few groups it needs more than one row.
        """
        outdated = (
            [(first, last, age, True, False) for first, last in world.groups] if len(heard) == 1 else []
        )
        silent = [
            (-seconds, group, ever, cut_off)
            for first, last, seconds, ever, cut_off in (*world.unheard, *outdated)
            for group in range(first, last + 1)
            if not any(group in each for each in heard)
        ]
        for number, (seconds, group, ever, cut_off) in enumerate(heapq.nsmallest(_MOST_SILENT, silent)):
            ranks = self._groups.groups[group]
            for rank in ranks if number < _WHOLE_SILENT else ranks[:1]:
                row = RankObservation(rank, self._host_keys[rank], None, -seconds, link="none", heard=ever)
                yield replace(row, link="open", unanswered=-seconds) if cut_off else row

    def _add_ordinary(
        self, found: dict[int, RankObservation], heard: Sequence[set[int]], silent: float
    ) -> None:
        """Add a rank of another host that is heard, and one of each host of which other ranks are silent.

        A host is lost only if none of its ranks is heard, and this one is cut off only if no other host is.
        """
        hosts = {row.host for row in found.values() if row.silent > FRESH_SECONDS}
        ranks = [self._groups.groups[each][0] for host in hosts for each in self._groups.groups_of_host[host]]
        other = (self._groups.groups[group][0] for part in heard for group in part)
        ranks += itertools.islice(
            (each for each in other if self._host_keys[each] != self._host_keys[self._own]), 1
        )
        for rank in ranks:
            if rank not in found and any(self._groups.group_of[rank] in part for part in heard):
                found[rank] = RankObservation(rank, self._host_keys[rank], None, silent, link="none")
