"""From reports to the next view: who stays, from which state, and when it waits."""

from __future__ import annotations

from dataclasses import replace

from paceline.elastic.next_view import first_view, next_view
from paceline.elastic.view import Evidence, Removal, Report, Rules, View

ABCD = first_view("abcd", step=5)
REPLICATED, SHARDED = Rules("replicated"), Rules("sharded")


def report(member: str, step: int = 7, **more) -> Report:
    return Report(1, member, **({"step": step, "holds": (0,), "trained": True} | more))


def follow(*reports: Report, view: View = ABCD, rules: Rules = SHARDED, **evidence):
    known = {name: frozenset(each) if name != "joiners" else each for name, each in evidence.items()}
    return next_view(view, Evidence(frozenset(reports), **known), rules)


def test_waits_for_every_report_that_may_come():
    assert follow(report("a"), report("b"), report("c")) == "wait"
    assert follow(report("a"), report("b"), report("c"), dead="d").members == ("a", "b", "c")
    assert follow(report("a"), report("b"), report("c"), unreachable="d").members == ("a", "b", "c")


def test_uncertain_removal_needs_a_majority_certain_does_not():
    assert follow(report("b"), report("c"), unreachable="ad") == "no quorum"
    assert follow(report("a"), report("c"), unreachable="bd").members == ("a", "c")
    assert follow(report("b"), report("c"), dead="a", unreachable="d", rules=REPLICATED).members == ("b", "c")
    assert follow(report("d"), dead="abc", rules=REPLICATED).members == ("d",)


def test_replicated_state_comes_from_the_lowest_of_the_most_advanced():
    view = follow(report("a"), report("b", 8), report("c", 8), report("d", holds=()), rules=REPLICATED)
    assert view.recovery.step == 8
    assert (view.recovery.source, view.recovery.receivers) == ("b", ("a", "d"))


def test_replicated_step_that_nobody_applied_is_repeated():
    view = follow(*(report(one, stage="complete") for one in "abcd"), rules=REPLICATED)
    assert (view.recovery.step, view.recovery.applying, view.recovery.receivers) == (7, (), ())


def test_sharded_members_roll_forward_together():
    done, held = report("a", 8), [report(one, stage="complete") for one in "bcd"]
    assert follow(done, *held).recovery.applying == ("b", "c", "d")
    assert follow(done, *held).recovery.step == 8
    whole = follow(report("a", stage="complete"), *held).recovery
    assert (whole.step, whole.applying) == (8, ("a", "b", "c", "d"))
    assert follow(report("a"), *held).recovery.step == 7
    assert follow(report("a"), *held).recovery.applying == ()


def test_a_lost_shard_comes_from_its_copy_on_the_left():
    assert follow(report("a"), report("c"), dead="bd").recovery.shards == ("a", "a", "c", "c")
    assert follow(report("b"), report("c"), report("d"), dead="a").recovery.shards[0] == "d"


def test_two_neighbours_lost_mean_the_checkpoint_or_the_end():
    view = follow(report("a", checkpoint=4), report("d"), dead="bc")
    assert (view.recovery.origin, view.recovery.step, view.members) == ("checkpoint", 4, ("a", "d"))
    assert (
        view.reason == "state is lost with b (dead), c (dead): training goes on from the checkpoint of step 4"
    )
    ended = follow(report("a"), report("d"), dead="bc")
    assert ended.ends
    assert "no checkpoint" in ended.reason


def test_the_old_layout_serves_until_the_new_one_is_whole():
    forming = follow(report("a"), report("b"), report("c"), dead="d")
    again = [
        replace(report("a"), epoch=2, holds=(0, 1), trained=False),
        replace(report("c"), epoch=2, trained=False),
    ]
    view = follow(*again, view=forming, dead="b")
    assert (view.recovery.base, view.recovery.shards) == (0, ("a", "a", "c", "c"))
    assert view.attempt == 1


def test_members_leave_once_they_have_handed_over():
    view = follow(report("a"), report("b", leaving=True), report("c"), report("d"))
    assert (view.members, view.leaving, view.removed) == (("a", "c", "d"), ("b",), ())
    at_once = follow(report("a"), report("b", leaving=True), report("c"), report("d"), rules=REPLICATED)
    assert (at_once.leaving, at_once.removed) == ((), (Removal("b", "left"),))
    last = follow(report("a", leaving=True), joiners=("e",), dead="bcd", rules=REPLICATED)
    assert (last.members, last.leaving, last.recovery.source) == (("e",), ("a",), "a")
    assert follow(*(report(one, leaving=True) for one in "abcd")).reason == "every member leaves"


def test_the_last_members_save_in_one_more_world():
    saves = replace(SHARDED, saves=True)
    view = follow(*(report(one, leaving=True) for one in "abcd"), rules=saves)
    assert (view.members, view.leaving, view.closing, view.recovery.step) == (tuple("abcd"), (), True, 7)
    one = follow(report("c", leaving=True), dead="abd", rules=replace(REPLICATED, saves=True))
    assert (one.members, one.closing) == (("c",), True)
    goes_on = follow(report("a", leaving=True), report("b"), dead="cd", rules=replace(REPLICATED, saves=True))
    assert (goes_on.members, goes_on.closing) == (("b",), False)
    joined = follow(*(report(one, leaving=True) for one in "abcd"), joiners=("e",), rules=saves)
    assert (joined.members, joined.closing) == (("e",), False)


def test_members_that_leave_do_not_wait_for_joiners():
    rules = Rules("replicated", min_ranks=3, saves=True)
    reports = report("a"), report("b"), report("c", leaving=True)
    view = follow(*reports, dead="d", joiners=(), rules=rules)
    assert (view.members, view.closing) == (("a", "b", "c"), True)
    assert follow(*reports[:2], dead="cd", rules=rules) == "wait"
    assert follow(*reports, dead="d", rules=replace(rules, saves=False)) == "wait"


def test_members_that_have_left_save_if_those_that_stayed_died():
    view = replace(ABCD, members=("a", "b"), leaving=("c", "d"))
    last = [report("c", leaving=True), report("d", leaving=True)]
    ended = follow(*last, dead="ab", view=view, rules=replace(REPLICATED, saves=True))
    assert (ended.members, ended.closing) == (("c", "d"), True)
    assert follow(*last, dead="ab", view=view, rules=REPLICATED).reason == "every member leaves"


def test_members_that_leave_do_not_vote():
    view = replace(ABCD, members=("a", "b"), leaving=("c", "d"))
    assert follow(report("b"), report("c"), report("d"), unreachable="a", view=view) == "no quorum"


def test_all_ready_joiners_are_admitted_unless_dead():
    view = follow(*(report(one, joiners=("e", "f")) for one in "abcd"), joiners=("e", "f", "g"), dead="f")
    assert (view.members, view.slots) == (tuple("abcdeg"), 3)


def test_fewer_than_min_ranks_wait_then_end():
    rules = Rules("replicated", min_ranks=3)
    reports = report("a"), report("b")
    assert follow(*reports, dead="cd", rules=rules) == "wait"
    assert follow(*reports, dead="cd", joiners=("e",), rules=rules).members == ("a", "b", "e")
    known = Evidence(frozenset(reports), dead=frozenset("cd"), waited=True)
    assert "2 of at least 3" in next_view(ABCD, known, rules).reason
    finished = [replace(each, finished=True) for each in reports]
    assert follow(*finished, dead="cd", rules=rules).members == ("a", "b")


def test_the_run_ends_well_when_all_have_finished():
    assert follow(*(report(one, finished=True) for one in "abcd")).finished
    assert not follow(*(report(one, finished=True) for one in "abc"), dead="d").finished


def test_links_that_both_ends_miss_split_the_world():
    cut = {"a": "d", "b": "d", "c": "d", "d": "abc"}
    clear = [report(one, unreachable=tuple(others)) for one, others in cut.items()]
    assert follow(*clear).members == ("a", "b", "c")
    assert follow(*clear).removed == (Removal("d", "unreachable"),)
    partial = [replace(each, unreachable=() if each.member == "b" else each.unreachable) for each in clear]
    assert follow(*partial).members == tuple("abcd")
    untrained = [replace(each, trained=False) for each in partial]
    assert follow(*untrained, view=replace(ABCD, attempt=1)).members == ("a", "b", "c")
