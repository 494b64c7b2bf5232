"""A member's events and actions, and its records in the store."""

from __future__ import annotations

import pytest

from paceline.elastic.member import Member
from paceline.elastic.member_events import (
    Abort,
    ChangeSeen,
    CreateView,
    Died,
    Formed,
    FormedSeen,
    FormWorld,
    JoinerSeen,
    Leave,
    LeaveRequested,
    Overdue,
    ReportSeen,
    Stopped,
    StoreLost,
    Suspected,
    Train,
    Unreachable,
    ViewSeen,
    WriteChange,
    WriteFormed,
    WriteReport,
)
from paceline.elastic.next_view import first_view
from paceline.elastic.store_records import event_of, records_of, view_key, view_value, watched_keys
from paceline.elastic.view import Report, Rules
from paceline.errors import UsageError

VIEW = first_view("abc")


def member(me: str = "a", strategy: str = "replicated") -> Member:
    return Member.starting(me, Rules(strategy), VIEW)


def feed(one: Member, *events):
    actions = ()
    for event in events:
        one, more = one.handle(event)
        actions += more
    return one, actions


def other(name: str, **more) -> ReportSeen:
    return ReportSeen(Report(1, name, 3, holds=(0,), **more))


def test_a_death_leads_to_the_next_view():
    one, actions = feed(member(), Died("c"), Stopped(3), other("b"))
    assert [type(each) for each in actions] == [Abort, WriteReport, WriteChange, CreateView]
    one, actions = feed(one, ViewSeen(actions[-1].view), Formed(), FormedSeen(1, "b"))
    assert [type(each) for each in actions] == [FormWorld, WriteFormed, Train]
    assert one.view.members == ("a", "b")


def test_nobody_is_removed_before_it_had_time_to_report():
    one, actions = feed(member(), Suspected(), Stopped(3), other("b"), Unreachable("c"))
    assert not any(isinstance(each, CreateView) for each in actions)
    assert feed(one, Overdue())[1][0].view.members == ("a", "b")


def test_a_higher_rank_composes_only_when_the_view_is_late():
    one, actions = feed(member("b"), Suspected(), Stopped(3), other("a"), other("c"))
    assert not any(isinstance(each, CreateView) for each in actions)
    assert isinstance(feed(one, Overdue())[1][0], CreateView)


def test_the_last_report_begins_no_change_until_somebody_is_missed():
    one, actions = feed(member(), Stopped(9, finished=True))
    assert [type(each) for each in actions] == [WriteReport]
    assert feed(one, Died("c"))[1] == (WriteChange(1),)


def test_a_planned_change_interrupts_nobody():
    _, actions = feed(member(), LeaveRequested(), Stopped(4))
    assert [type(each) for each in actions] == [WriteReport]
    assert (actions[0].report.leaving, actions[0].report.orderly) == (True, True)
    assert feed(member(), ReportSeen(actions[0].report))[1] == ()


def test_a_member_that_waits_may_still_wish_to_leave():
    waiting, _ = feed(member("b"), Suspected(), Stopped(4))
    revised, actions = feed(waiting, LeaveRequested())
    assert [(each.report.leaving, each.report.step) for each in actions] == [(True, 4)]
    assert feed(revised, LeaveRequested()) == (revised, ())
    assert [each.leaving for each in revised.reports] == [True]


def test_wishes():
    assert not member().wants_change
    assert feed(member(), LeaveRequested())[0].wants_change
    joined = feed(member(), JoinerSeen(0, "d"))[0]
    assert joined.wants_change
    assert not feed(joined, Died("d"))[0].wants_change
    assert feed(joined, JoinerSeen(0, "d"))[0].joiners == ("d",)


def test_late_events_change_nothing():
    for event in (ChangeSeen(0), FormedSeen(4, "b"), ViewSeen(VIEW), ReportSeen(Report(5, "b", 1)), Formed()):
        assert feed(member(), event) == (member(), ())


def test_without_the_store_a_member_leaves():
    one, actions = feed(member(), StoreLost())
    assert actions == (Leave("the store of the job is lost"),)
    assert feed(one, Suspected()) == (one, ())


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
def test_watched_keys_lead_through_a_change(strategy):
    """Two members that talk over a store only."""
    store = {"dead/c": b""}
    members = {name: member(name, strategy) for name in "ab"}

    def turn(name: str, *events) -> None:
        one, actions = feed(members[name], *events)
        members[name] = one
        for action in actions:
            match action:
                case CreateView(view):
                    store.setdefault(view_key(view.epoch), view_value(view))
                case Abort():
                    turn(name, Stopped(4))
                case FormWorld():
                    turn(name, Formed())
                case WriteReport() | WriteChange() | WriteFormed():
                    store.update(records_of(action, name))

    for _ in range(12):
        for name in members:
            for key in list(watched_keys(members[name])):
                if key in store:
                    turn(name, event_of(key, store[key]))
    assert {one.phase for one in members.values()} == {"training"}
    assert {one.view.members for one in members.values()} == {("a", "b")}
    assert sorted(store) == [
        "change/1", "dead/c", "formed/1/a", "formed/1/b", "report/1/a", "report/1/b", "view/1",
    ]  # fmt: skip


def test_values_that_are_not_valid():
    with pytest.raises(UsageError, match="view/1"):
        event_of("view/1", b"{}")
    with pytest.raises(UsageError, match="not a key"):
        event_of("somewhere", b"")
