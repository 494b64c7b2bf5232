"""State machine of one member of an elastic world (pure).

    joining → forming → formed → training
                 ↑         ↓         ↓
                 └─── reported ←── stopping
                         ↓
                       gone

Whatever goes wrong has one consequence: the member stops, reports for the next epoch, and waits for the next view. From
that view on everything starts anew: a failure during recovery is one more change, and so is the end of the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from paceline.elastic.member_events import (
    Abort,
    Action,
    ChangeSeen,
    CreateView,
    Died,
    End,
    Event,
    Finish,
    Formed,
    FormedSeen,
    FormWorld,
    JoinerSeen,
    Leave,
    LeaveRequested,
    Overdue,
    Replacing,
    ReportSeen,
    Stopped,
    StoreLost,
    Suspected,
    Train,
    Unreachable,
    ViewSeen,
    WaitTimedOut,
    WriteChange,
    WriteFormed,
    WriteReport,
)
from paceline.elastic.next_view import next_view
from paceline.elastic.view import Evidence, Report, Rules, View

__all__ = ["ALL_TRAINED", "AS_REQUESTED", "Member", "Phase", "Step"]

AS_REQUESTED = "left as requested"
"""Why a member leaves that was requested to."""

ALL_TRAINED = "the run is over: all steps are trained"
"""Why a newcomer leaves that comes too late."""

Phase = Literal["joining", "forming", "formed", "training", "stopping", "reported", "gone"]

Step = tuple["Member", tuple[Action, ...]]
"""The state after an event, and what is to be done."""

_NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Member:
    """State of a member; events return the next one, and the actions to carry out in their order.

    Attributes:
        me: own id, unique per incarnation of a process.
        rules: of the run.
        view: the latest that this member is in; of a newcomer, the latest that it has seen.
        phase: what it does.
        holds: layouts of state that it holds, see `Report.holds`.
        leaving: whether it shall leave.
        trained: whether the world of this view has formed.
        dead: processes that have ended, for certain.
        joiners: newcomers that are ready and in no view yet, see `Report.joiners`.
        unreachable: members that were unreachable in this view.
        reports: for the next view.
        formed: members that have formed this view's world.
        overdue: whether the next view is late.
        waited: whether joiners have been waited for long enough.
        proposed: whether it has proposed the next view.

    Example:
        >>> from paceline.elastic.next_view import first_view
        >>> member = Member.starting("b", Rules("replicated"), first_view(["a", "b"]))
        >>> member, actions = member.handle(Died("a"))
        >>> actions
        (Abort(),)
        >>> member, actions = member.handle(Stopped(step=5))
        >>> actions[-1].view.members, actions[-1].view.recovery.step
        (('b',), 5)
    """

    me: str
    rules: Rules
    view: View
    phase: Phase
    holds: tuple[int, ...] = ()
    leaving: bool = False
    trained: bool = False
    dead: frozenset[str] = _NOBODY
    joiners: tuple[str, ...] = ()
    unreachable: frozenset[str] = _NOBODY
    reports: frozenset[Report] = frozenset()
    formed: frozenset[str] = _NOBODY
    overdue: bool = False
    waited: bool = False
    proposed: bool = False

    @classmethod
    def starting(cls, me: str, rules: Rules, view: View) -> Member:
        """Return a member of the first view, which trains."""
        return cls(me, rules, view, "training", holds=(view.epoch,), trained=True)

    @classmethod
    def joining(cls, me: str, rules: Rules, view: View) -> Member:
        """Return a newcomer that has announced itself; `view` is the latest."""
        return cls(me, rules, view, "joining")

    @property
    def slots(self) -> int:
        """Number of the first slot of the list of joiners that it has not seen."""
        return self.view.slots + len(self.joiners)

    @property
    def wants_change(self) -> bool:
        """Whether all members shall stop after this step; each sends its own wish with the step's exchange."""
        return self.leaving or not self.dead.issuperset(self.joiners)

    def handle(self, event: Event) -> Step:
        """Return the state after an event, and the actions."""
        if self.phase == "gone":
            return self, ()
        match event:
            case Stopped():
                return self._stopped(event)
            case Replacing() if self.phase == "forming":
                return replace(self, holds=()), ()
            case Formed():
                return self._form()
            case ViewSeen(view):
                return self._see_view(view)
            case StoreLost():
                return self._end(Leave("the store of the job is lost"))
            case LeaveRequested() if self.phase == "joining":
                return self._end(Leave(AS_REQUESTED))
            case WaitTimedOut() if self.phase == "joining":
                return self._end(Leave("no world admitted it in time"))
            case LeaveRequested():
                return replace(self, leaving=True)._revise()
            case Suspected():
                return self._change()
            case ChangeSeen(epoch) if epoch == self.view.epoch + 1:
                return self._change()
            case FormedSeen(epoch, member) if epoch == self.view.epoch:
                return replace(self, formed=self.formed | {member})._train()
            case _:
                return self._see_evidence(event)

    def _see_evidence(self, event: Event) -> Step:
        """Record what decides on the next view; compose it if that was missing."""
        match event:
            case Died(member):
                return replace(self, dead=self.dead | {member})._miss(member)
            case Unreachable(member):
                return replace(self, unreachable=self.unreachable | {member})._miss(member)
            case ReportSeen(report) if report.epoch == self.view.epoch + 1:
                return replace(self, reports=self.reports | {report})._compose()
            case JoinerSeen(slot, member) if slot == self.slots and self.phase != "joining":
                return replace(self, joiners=(*self.joiners, member))._compose()
            case Overdue():
                return replace(self, overdue=True)._compose()
            case WaitTimedOut():
                return replace(self, waited=True)._compose()
            case _:
                return self, ()  # late: of an earlier view

    # ---------------------------------------------------------------- change

    def _miss(self, member: str) -> Step:
        """Begin a change if this view's world can't go on without a participant; one that leaves only until formed."""
        if member in self.view.members or (member in self.view.leaving and self.phase == "forming"):
            missed, actions = self._change()
            epoch = self.view.epoch + 1
            if any(each.orderly and each.member == self.me for each in self.reports):
                actions = (WriteChange(epoch), *actions)
            return missed, actions
        return self._compose()

    def _change(self) -> Step:
        """Begin the change to the next view, or go on with it."""
        if self.phase in ("forming", "formed", "training"):
            return replace(self, phase="stopping"), (Abort(),)
        return self._compose()

    def _stopped(self, event: Stopped) -> Step:
        if self.phase in ("joining", "reported"):
            return self, ()
        orderly = self.phase == "training"
        report = Report(
            self.view.epoch + 1,
            self.me,
            event.step,
            event.stage,
            self.holds,
            self.leaving,
            self.trained,
            orderly,
            event.finished and orderly,
            tuple(sorted(self.unreachable)),
            self.joiners,
            event.checkpoint,
        )
        reported = replace(self, phase="reported", reports=self.reports | {report})
        composed, actions = reported._compose()
        change = () if orderly else (WriteChange(report.epoch),)
        return composed, (WriteReport(report), *change, *actions)

    def _revise(self) -> Step:
        """Add to the written report that this member leaves, as a world with too few members may wait for joiners."""
        written = next((each for each in self.reports if each.member == self.me), None)
        if self.phase != "reported" or written is None or written.leaving or self.proposed:
            return self, ()
        report = replace(written, leaving=True)
        revised, actions = replace(self, reports=self.reports - {written} | {report})._compose()
        return revised, (WriteReport(report), *actions)

    def _compose(self) -> Step:
        """Propose the next view if it is this member's turn and everything is known."""
        if self.phase != "reported" or self.proposed:
            return self, ()
        lower = self.view.participants[: self.view.participants.index(self.me)]
        if not self.overdue and not self.dead.issuperset(lower):
            return self, ()
        absent = self.unreachable if self.overdue else _NOBODY
        view = next_view(
            self.view, Evidence(self.reports, self.dead, absent, self.joiners, self.waited), self.rules
        )
        if view == "wait":
            return self, ()
        if view == "no quorum":
            return self._end(Leave("lost the majority: too few members can be reached"))
        return replace(self, proposed=True), (CreateView(view),)

    # ---------------------------------------------------------------- next view

    def _see_view(self, view: View) -> Step:
        if view.epoch <= self.view.epoch or (view.epoch > self.view.epoch + 1 and self.phase != "joining"):
            return self, ()
        if view.ends and self.phase == "joining":
            return self._end(Leave(f"the run is over: {view.reason}" if view.reason else ALL_TRAINED))
        if view.ends and self.me in self.view.leaving and view.finished:
            return self._end(Leave(AS_REQUESTED))
        if view.ends:
            return self._end(Finish() if view.finished else End(view.reason))
        if self.me in view.participants:
            return self._adopt(view)
        if self.phase == "joining":
            return replace(self, view=view), ()
        cause = next((each.cause for each in view.removed if each.member == self.me), "unreachable")
        if cause == "left":
            return self._end(Leave(AS_REQUESTED))
        return self._end(Leave(f"removed from the world in epoch {view.epoch}: {cause} for the others"))

    def _adopt(self, view: View) -> Step:
        """Begin to form the world of the next view; if one of it is dead already, begin the change after it."""
        recovery = view.recovery
        if recovery.origin == "checkpoint":
            holds = ()
        elif self.rules.strategy == "sharded":
            holds = tuple(epoch for epoch in self.holds if epoch == recovery.base)
        else:
            holds = self.holds
        forming = Member(
            self.me,
            self.rules,
            view,
            "forming",
            holds=holds,
            leaving=self.leaving,
            dead=self.dead,
            joiners=self.joiners[view.slots - self.view.slots :] if self.joiners else (),
        )
        if self.dead.intersection(view.participants):
            stopping, actions = forming._change()
            return stopping, (FormWorld(view), *actions)
        return forming, (FormWorld(view),)

    def _form(self) -> Step:
        if self.phase != "forming" or self.me in self.view.leaving:
            return self, ()
        epoch = self.view.epoch
        kept: Iterable[int] = self.holds if self.rules.strategy == "sharded" else ()
        formed = replace(self, phase="formed", holds=(*kept, epoch), formed=self.formed | {self.me})
        training, actions = formed._train()
        return training, (WriteFormed(epoch), *actions)

    def _train(self) -> Step:
        """Train once all members have formed the world; until then one that leaves stays."""
        if not self.formed.issuperset(self.view.members):
            return self, ()
        if self.phase == "forming" and self.me in self.view.leaving:
            return self._end(Leave(AS_REQUESTED))
        if self.phase != "formed":
            return self, ()
        return replace(self, phase="training", holds=(self.view.epoch,), trained=True), (Train(self.view),)

    def _end(self, action: Action) -> Step:
        return replace(self, phase="gone"), (action,)
