"""Moves of a modelled elastic run in which its members change; see `elastic_model`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from elastic_run import NEWCOMER, UP, Move, Proc, RunModel, Scenario, State, Violation
from paceline.elastic.member import Member
from paceline.elastic.member_events import (
    CreateView,
    Died,
    End,
    Event,
    Finish,
    Leave,
    Overdue,
    ReportSeen,
    Stopped,
    Suspected,
    Unreachable,
    ViewSeen,
    WaitTimedOut,
    WriteReport,
)
from paceline.elastic.view import View


class ChangeModel(RunModel):
    """Stopping, reporting, composing views, adopting them, and the ends of processes."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.reported: dict[tuple, tuple[int, int]] = {}
        self.compositions: dict[tuple, tuple[CreateView | Leave, ...]] = {}

    def _stops(self, state: State, at: int, proc: Proc, member: Member) -> Iterator[Move]:
        """Stop and report, if there is a reason: a change under way, a death, or a peer that does not answer."""
        view = member.view
        needed = view.participants if member.phase == "forming" else view.members
        found = [each for each in needed if self._may_be_unreachable(state, member, each)]
        known = [each for each in found if self._is_split(state, member.me, each)] if proc.split else []
        found = [each for each in found if each not in known]
        events: list[tuple[Event, ...]] = []
        for count in range(not known, len(found) + 1):
            choices = itertools.combinations(found, count)
            events += [tuple(map(Unreachable, (*known, *some))) for some in choices]
        broken = found or any([state.procs[self.index[each]].status != UP for each in needed])
        changing = len(state.views) > view.epoch + 1 or any(
            report.epoch == view.epoch + 1 and not report.orderly for report in self.reports(state)
        )
        if changing or state.dead.intersection(needed) or (broken and member.phase == "training"):
            events.append((*map(Unreachable, known), Suspected()))
        for each in events:
            yield from self._reports(state, at, proc, "stop", each)

    def _reports(
        self, state: State, at: int, proc: Proc, label: str, events: tuple[Event, ...]
    ) -> Iterator[Move]:
        number, written = self._reported(proc, events)
        report = self.machines.known[written]
        if not set(report.holds) <= set(proc.data):
            raise Violation(f"{report.member} reports state that it does not hold")
        reported = self._with(state, at, proc._replace(machine=number))
        yield label, State(reported.procs, state.views, state.reports | {written}, *state[3:])

    def _reported(self, proc: Proc, events: tuple[Event, ...]) -> tuple[int, int]:
        """Return the numbers of a member that has stopped after some events, and of its report."""
        step, complete = len(proc.done), proc.gradients >= 0
        key = proc.machine, step, complete, events  # all that the result depends on
        found = self.reported.get(key)
        if found is None:
            stopped = Stopped(
                step,
                "complete" if complete else "computing",
                step == self.scenario.steps,
                0 if self.scenario.checkpoint else None,
            )
            number, actions = self.machines.feed(proc.machine, *events, stopped)
            report = next(each.report for each in actions if isinstance(each, WriteReport))
            # What it has composed at once it may compose later, see `_composes`.
            member = replace(
                self.machines.known[number], phase="reported", proposed=False, unreachable=frozenset()
            )
            found = self.reported[key] = self.machines.number(member), self.machines.number(report)
        return found

    def _composes(self, state: State, at: int, proc: Proc, member: Member) -> Iterator[Move]:
        """Compose the next view from everything that the member may have read by now."""
        blind = self.scenario.mutation == "set instead of compare_set"
        if len(state.views) != member.view.epoch + 1 and not blind:
            return
        for action in self._compositions(state, proc, member):
            if isinstance(action, Leave):
                yield "lose", self._gone(state, at, action.reason)
            elif self._is_written(state, action.view):
                yield "create view", self._created(state, action.view)

    def _compositions(self, state: State, proc: Proc, member: Member) -> tuple[CreateView | Leave, ...]:
        """Return what a member may do next, depending on what it has read: each view and each end once."""
        others = [each for each in member.view.participants if each != member.me]
        silent = tuple([self._is_silent(state, member, each) for each in others])
        key = proc.machine, state.reports, state.dead, state.joiners, silent  # all that the result depends on
        found = self.compositions.get(key)
        if found is not None:
            return found
        reports = {each.member: each for each in self.reports(state) if each.epoch == member.view.epoch + 1}
        options: list[list[Event]] = []
        for other, is_silent in zip(others, silent, strict=True):
            seen: list[Event] = [ReportSeen(reports[other])] if other in reports else []
            seen += [Died(other)] if other in state.dead else []
            seen += [Unreachable(other)] if is_silent else []
            options.append(seen)
        newcomers = self._joiners_seen(state, member)
        first = [(Overdue(),)] + ([(Overdue(), *newcomers)] if newcomers else [])
        if NEWCOMER in state.dead:
            first += [(Overdue(), Died(NEWCOMER), *newcomers)]
        composed: list[CreateView | Leave] = []
        for begin, known in itertools.product(first, itertools.product(*options)):
            _, actions = self.machines.feed(proc.machine, *begin, *known)
            if not any(isinstance(each, CreateView | Leave) for each in actions):
                _, actions = self.machines.feed(proc.machine, *begin, *known, WaitTimedOut())
            composed += [each for each in actions if isinstance(each, CreateView | Leave)]
        found = self.compositions[key] = tuple(dict.fromkeys(composed))
        return found

    def _is_written(self, state: State, view: View) -> bool:
        """Return whether a store without compare_set takes a view; once in each order, so that this ends."""
        if len(state.views) == view.epoch:
            return True
        written = state.views[view.epoch]
        return not self.machines.known[written].ends and self.machines.number(view) > written

    def _created(self, state: State, view: View) -> State:
        self._check_view(state, view)
        views = (*state.views[: view.epoch], self.machines.number(view))
        if view.epoch > 2 + 2 * len(self.names):
            raise Violation("epochs without end")
        blind = self.scenario.mutation == "set instead of compare_set"
        reports = state.reports if blind else frozenset()
        return state._replace(views=views, reports=reports, formed=frozenset())

    def _adopts(self, state: State, at: int, proc: Proc, member: Member) -> list[Move]:
        view = self.machines.known[state.views[member.view.epoch + 1]]
        if member.phase == "joining" and member.me not in view.members and not view.ends:
            number, _ = self.machines.feed(proc.machine, ViewSeen(view))
            return [("follow", self._with(state, at, proc._replace(machine=number)))]
        if view.ends or member.me not in view.participants:
            return list(self._ends(state, at, ViewSeen(view)))
        for other in state.procs:
            known = self.member(other).view
            if known.epoch == view.epoch and known != view:
                raise Violation(f"two worlds in epoch {view.epoch}")
        number, _ = self.machines.feed(proc.machine, ViewSeen(view))
        recovery = view.recovery
        if recovery.origin == "checkpoint":
            data: tuple[int, ...] = ()
        else:
            data = tuple(each for each in proc.data if not self.sharded or each == recovery.base)
        gradients = proc.gradients if member.me in recovery.applying else -1
        adopted = proc._replace(
            machine=number, data=data, gradients=gradients, entered=-1, wish=False, split=bool(state.frozen)
        )
        suspicions = frozenset(each for each in state.suspicions if each[0] != member.me)
        return [("adopt", self._with(state, at, adopted)._replace(suspicions=suspicions))]

    def _ends(self, state: State, at: int, *events: Event) -> Iterator[Move]:
        _, actions = self.machines.feed(state.procs[at].machine, *events)
        for action in actions:
            if isinstance(action, Finish):
                yield "finish", self._finish(state, at)
            elif isinstance(action, Leave):
                yield "leave", self._gone(state, at, action.reason)
            elif isinstance(action, End):
                yield "end", self._gone(state, at, f"end: {action.reason}")

    def _finish(self, state: State, at: int) -> State:
        if len(state.procs[at].done) != self.scenario.steps:
            raise Violation(f"{self.names[at]} ends before the last step")
        return self._gone(state, at, "finished")

    def _gone(self, state: State, at: int, how: str) -> State:
        dead = state.dead if how == "vanished" or state.procs[at].cut else state.dead | {self.names[at]}
        return self._with(state, at, state.procs[at]._replace(status=how))._replace(dead=dead)
