"""Every interleaving of small elastic runs: one world at a time, nobody hangs, no step is lost or applied twice.

`elastic_model` has the moves, `elastic_run` the properties. The last tests break one rule each, which must be found.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_model import explore
from elastic_run import Scenario, State, Violation
from paceline.elastic import next_view
from paceline.elastic.member import Member
from paceline.elastic.member_events import Replacing
from paceline.elastic.view import Recovery

MINORITY = "lost the majority"
REMOVED = "removed from"
LEFT = "left as requested"
NO_STORE = "the store of the job is lost"
STATE_LOST = "end: state is lost"
TOO_FEW = ("end: 1 of at least 2", "the run is over: 1 of at least 2")
NEWCOMER_LEAVES = ("the run is over: all steps", "no world admitted")


def run(scenario: Scenario, *permitted: str) -> set[tuple[str, str]]:
    """Explore a scenario in which processes finish, end by a fault, or end for a permitted reason.

    Returns:
        Processes, and how they may end.
    """
    ends: set[tuple[str, str]] = set()
    faults = {"kill": "killed", "vanish": "vanished", "cut": NO_STORE, "server": NO_STORE}
    expected = ("finished", *permitted, *(faults[one] for one in scenario.faults if one in faults))

    def wrong(state: State) -> str | None:
        for name, proc in zip(scenario.names, state.procs, strict=True):
            ends.add((name, proc.status))
            cut_off = proc.status == NO_STORE and not proc.cut
            if not proc.status.startswith(expected) or cut_off:
                return f"{name} ended: {proc.status}"
        if scenario.checkpoint and not any(each.status == "finished" for each in state.procs):
            return "nobody finished"
        kept = any(each.status in ("finished", "saved") for each in state.procs)
        if scenario.saves and not kept and set(scenario.faults) == {"leave"}:
            return "nobody has saved"
        return None

    explore(scenario, wrong)
    return ends


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_without_faults_all_finish(strategy, ranks):
    ends = run(Scenario(strategy, ranks, steps=3))
    assert ends == {(name, "finished") for name in "abcd"[:ranks]}


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
@pytest.mark.parametrize("fault", ["kill", "vanish", "glitch", "cut"])
def test_one_fault_ends_no_other_member(strategy, fault):
    run(Scenario(strategy, 3, steps=3, faults=(fault,)))
    run(Scenario(strategy, 2, faults=(fault,)), *([MINORITY] if fault in ("vanish", "cut") else []))


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
def test_one_of_four_dies(strategy):
    run(Scenario(strategy, 4, faults=("kill",)))


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
def test_two_of_three_die(strategy):
    run(Scenario(strategy, 3, faults=("kill", "kill")), STATE_LOST)
    # Of replicated state, the only copy of the latest step may be lost while it is sent.
    run(Scenario(strategy, 3, faults=("kill", "glitch")), *([STATE_LOST] if strategy == "replicated" else []))


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
def test_two_of_four_die(strategy):
    run(Scenario(strategy, 4, faults=("kill", "kill")), STATE_LOST)


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
def test_with_a_checkpoint_two_deaths_lose_nothing(strategy):
    run(Scenario(strategy, 3, faults=("kill", "kill"), checkpoint=True))


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
def test_deaths_that_nobody_sees_need_a_majority(strategy):
    run(Scenario(strategy, 3, faults=("kill", "vanish")), STATE_LOST, MINORITY)


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
def test_members_leave(strategy):
    ends = run(Scenario(strategy, 3, steps=3, faults=("leave", "leave")), LEFT)
    assert {("a", LEFT), ("b", LEFT), ("c", LEFT)} <= ends
    run(Scenario(strategy, 2, steps=3, faults=("leave", "leave")), LEFT, "end: every member leaves")
    run(Scenario(strategy, 3, faults=("leave", "kill")), LEFT)


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
def test_the_last_ones_save_before_they_leave(strategy):
    leave = ("leave", "leave")
    ends = run(Scenario(strategy, 2, steps=3, faults=leave, saves=True), LEFT, "saved")
    assert {("a", "saved"), ("b", "saved"), ("a", LEFT), ("b", LEFT)} <= ends, (
        "together or one after the other"
    )
    run(Scenario(strategy, 1, steps=3, faults=("leave",), saves=True), "saved")
    run(Scenario(strategy, 3, faults=(*leave, "leave"), saves=True), LEFT, "saved")
    run(Scenario(strategy, 2, faults=leave, joins=True, saves=True), LEFT, "saved", *NEWCOMER_LEAVES)


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
def test_nobody_waits_with_those_that_leave(strategy):
    run(Scenario(strategy, 3, faults=("leave",), min_ranks=3, saves=True), "saved")
    ends = run(
        Scenario(strategy, 2, faults=("kill", "leave"), min_ranks=2, saves=True), LEFT, "saved", *TOO_FEW
    )
    assert {("a", "saved"), ("b", "saved")} <= ends, "one that waits for joiners, too"


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
def test_a_death_while_the_last_ones_save_holds_nobody_up(strategy):
    run(Scenario(strategy, 2, faults=("leave", "leave", "kill"), saves=True), LEFT, "saved")


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
def test_a_newcomer_joins(strategy):
    assert ("j", "finished") in run(Scenario(strategy, 2, steps=3, joins=True), *NEWCOMER_LEAVES)
    run(Scenario(strategy, 3, faults=("kill",), joins=True), *NEWCOMER_LEAVES)
    run(Scenario(strategy, 2, steps=3, faults=("leave",), joins=True), LEFT, *NEWCOMER_LEAVES)


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
def test_too_few_members_wait_for_a_newcomer(strategy):
    run(Scenario(strategy, 2, faults=("kill",), min_ranks=2), *TOO_FEW)
    run(Scenario(strategy, 2, faults=("kill",), min_ranks=2, joins=True), *TOO_FEW, *NEWCOMER_LEAVES)


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
@pytest.mark.parametrize("store", [True, False])
def test_the_larger_side_of_a_cut_network_goes_on(strategy, store):
    run(Scenario(strategy, 3, split="ab", split_store=store), *([REMOVED] if store else [NO_STORE]))
    run(Scenario(strategy, 3, split="bc", split_store=store), *([REMOVED] if store else [NO_STORE]))


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
def test_a_minority_with_the_store_leaves(strategy):
    run(Scenario(strategy, 3, split="a", split_store=False), NO_STORE, MINORITY, STATE_LOST)


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
def test_without_the_store_all_leave(strategy):
    run(Scenario(strategy, 3, steps=3, faults=("server",)))
    run(Scenario(strategy, 3, faults=("server", "kill")), STATE_LOST, MINORITY)


@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
def test_a_wrong_suspicion_removes_at_most_the_suspect(strategy):
    run(Scenario(strategy, 3, faults=("suspect",)), REMOVED)


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["replicated", "sharded"])
@pytest.mark.parametrize(
    ("scenario", "permitted"),
    [
        (Scenario("", 4, faults=("kill", "glitch")), (STATE_LOST,)),
        (Scenario("", 4, faults=("leave", "kill")), (LEFT,)),
        (Scenario("", 4, faults=("vanish", "vanish")), (STATE_LOST, MINORITY)),
        (Scenario("", 4, split="abc"), (REMOVED,)),
        (Scenario("", 4, split="ab"), (REMOVED, STATE_LOST)),
        (Scenario("", 4, split="bc"), (REMOVED, STATE_LOST)),
        (Scenario("", 4, split="abc", split_store=False), (NO_STORE,)),
        (Scenario("", 3, steps=3, faults=("kill", "kill")), (STATE_LOST,)),
        (Scenario("", 3, faults=("kill", "kill"), joins=True), (STATE_LOST, "the run is over", "no world")),
        (Scenario("", 3, faults=("leave", "kill"), joins=True), (LEFT, *NEWCOMER_LEAVES)),
        (Scenario("", 3, steps=3, faults=("leave", "vanish")), (LEFT, MINORITY, REMOVED)),
        (
            Scenario("", 3, faults=("leave", "leave", "leave", "kill"), saves=True),
            (LEFT, "saved", STATE_LOST),
        ),
        (Scenario("", 4, faults=("leave", "leave", "leave"), min_ranks=3, saves=True), (LEFT, "saved")),
        (
            Scenario("", 2, faults=("leave", "leave", "glitch"), joins=True, saves=True),
            (LEFT, "saved", *NEWCOMER_LEAVES),
        ),
        (Scenario("", 3, faults=("suspect", "kill")), (REMOVED, STATE_LOST, MINORITY)),
        (Scenario("", 3, faults=("kill",), split="ab"), (REMOVED, STATE_LOST, MINORITY)),
    ],
    ids=str,
)
def test_larger_runs(strategy, scenario, permitted):
    run(replace(scenario, strategy=strategy), *permitted)


# ---------------------------------------------------------------- the checks find broken rules


def breaks(match: str, scenario: Scenario, *permitted: str) -> None:
    with pytest.raises(Violation, match=match):
        run(scenario, *permitted)


def test_found_no_majority_is_needed(monkeypatch):
    monkeypatch.setattr(next_view, "has_quorum", lambda alive, present: True)
    breaks("a minority", Scenario("replicated", 3, split="c", split_store=False), NO_STORE)


def test_found_views_are_overwritten():
    breaks(
        "two worlds in epoch 1",
        Scenario("replicated", 3, faults=("kill",), mutation="set instead of compare_set"),
    )


def test_found_state_that_is_being_replaced_counts(monkeypatch):
    handle = Member.handle
    monkeypatch.setattr(
        Member, "handle", lambda self, event: (self, ()) if event == Replacing() else handle(self, event)
    )
    breaks("does not hold", Scenario("replicated", 3, faults=("kill", "glitch")))


def test_found_state_counts_as_lost_before_it_is_replaced(monkeypatch):
    adopt = Member._adopt

    def early(self, view):
        forming, actions = adopt(self, view)
        return (replace(forming, holds=()) if self.me in view.recovery.receivers else forming), actions

    monkeypatch.setattr(Member, "_adopt", early)
    breaks("given up", Scenario("replicated", 3, faults=("vanish",)))


def test_found_a_newcomer_keeps_its_old_copy(monkeypatch):
    recover = next_view._recover_replicated

    def without_transfer(view, reports, members):
        recovery = recover(view, reports, members)
        return recovery and replace(
            recovery, receivers=tuple(one for one in recovery.receivers if one in reports)
        )

    monkeypatch.setattr(next_view, "_recover_replicated", without_transfer)
    breaks("receives none", Scenario("replicated", 2, steps=3, joins=True), *NEWCOMER_LEAVES)


def test_found_the_step_under_way_counts_as_applied(monkeypatch):
    def ahead(view, reports, members):
        holders = [one for one, report in reports.items() if report.holds]
        step = max(report.step for report in reports.values()) + 1
        return Recovery("members", step, source=holders[0])

    monkeypatch.setattr(next_view, "_recover_replicated", ahead)
    breaks("with the state of step", Scenario("replicated", 2, faults=("glitch",)))


def test_found_updates_are_not_confirmed():
    breaks("given up", Scenario("sharded", 3, faults=("kill",), mutation="no confirmation"))


def test_found_reports_are_not_frozen():
    breaks("begins step", Scenario("replicated", 3, faults=("glitch",), mutation="report not frozen"))


def test_found_old_shards_are_dropped_early(monkeypatch):
    form = Member._form

    def drop(self):
        formed, actions = form(self)
        return replace(formed, holds=formed.holds[-1:]), actions

    monkeypatch.setattr(Member, "_form", drop)
    breaks("given up", Scenario("sharded", 3, faults=("kill", "glitch")))


def test_found_leavers_do_not_hand_over(monkeypatch):
    monkeypatch.setattr(next_view, "_provides", lambda *args: False)
    breaks("for ever", Scenario("sharded", 3, steps=3, faults=("leave", "kill")), LEFT)


def test_found_one_sided_reports_remove_members(monkeypatch):
    def one_sided(members, reports, patient):
        accused = {other for one in members for other in reports[one].unreachable}
        return [one for one in members if one not in accused]

    monkeypatch.setattr(next_view, "mutually_reachable", one_sided)
    breaks("ended: removed", Scenario("replicated", 3, faults=("suspect",)))


def test_found_members_that_cannot_reach_each_other_stay(monkeypatch):
    monkeypatch.setattr(next_view, "mutually_reachable", lambda members, reports, patient: list(members))
    breaks("epochs without end", Scenario("replicated", 3, split="ab"), REMOVED)


def test_found_a_member_never_reports(monkeypatch):
    monkeypatch.setattr(Member, "_compose", lambda self: (self, ()))
    with pytest.raises(Violation, match="wait for ever"):
        run(Scenario("replicated", 2, faults=("kill",)))
