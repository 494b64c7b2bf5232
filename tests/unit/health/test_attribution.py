"""Whose fault it is: every kind of evidence, alone and against the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline._core.step_state import PHASES
from paceline.health.attribution import (
    CERTAIN,
    Attribution,
    RankObservation,
    StallLimits,
    attribute_failure,
    late,
    position,
    waited,
)
from paceline.health.heartbeat import FailureNotice, Heartbeat

LIMITS = StallLimits(stall=60.0, lost=10.0, beat=1.0)


def row(rank, **fields):
    return Heartbeat(
        rank, 1, **{"step": 7, "phase": "exchange", "bucket": 0, "waiting": True, "age": 0.1} | fields
    )


def busy(rank, **fields):
    return row(
        rank, **{"phase": "forward", "bucket": -1, "waiting": False, "age": 0.1, "still": 0.0} | fields
    )


def world(*rows, hosts=None, **changes):
    """Return what rank 0 knows: of all ranks, each just heard; `changes` are of Seen, by ``r<rank>``."""
    seen = []
    for at, each in enumerate(rows):
        fields = {"silent": 0.1 if at else 0.0} | changes.get(f"r{at}", {})
        seen.append(RankObservation(at, hosts[at] if hosts else "a", each, **fields))
    return seen


def found(seen, notices=(), limits=LIMITS, me=0, **options):
    verdict = attribute_failure(me, seen, list(notices), limits, **options)
    return None if verdict is None else (verdict.kind, verdict.rank)


def waiting(rank, seconds):
    return row(rank, age=seconds)


# ------------------------------------------------------------------ healthy ranks


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("wait", [0.0, 0.5, 5.0, 59.0])
def test_a_rank_that_is_slower_is_no_fault(phase, wait):
    assert found(world(waiting(0, wait), busy(1, phase=phase, still=wait), waiting(2, wait))) is None


@pytest.mark.parametrize("silent", [0.2, 2.5, 9.0, 600.0])
def test_silence_of_a_rank_for_which_nobody_waits_is_no_fault(silent):
    seen = world(busy(0), busy(1), busy(2), r1={"silent": silent})
    assert found(seen) is None
    assert found(seen, hurried=True) is None


@pytest.mark.parametrize("wait", [61.0, 600.0])
def test_a_rank_that_moves_on_is_at_work_however_long_others_wait(wait):
    seen = world(waiting(0, wait), busy(1, age=wait, still=0.4), waiting(2, wait))
    assert found(seen) is None
    assert late(seen, [], 15.0) == Attribution("stalled", 1, pytest.approx(wait + 0.1), (), 2)


@pytest.mark.parametrize("task", ["checkpoint", "eval"])
def test_long_tasks_of_one_rank_are_only_told(task):
    seen = world(waiting(0, 100), busy(1, task=task, still=100.0))
    assert found(seen) is None
    assert late(seen, [], 15.0).rank == 1


def test_all_wait_for_the_same_so_it_is_the_network():
    assert found(world(waiting(0, 100), waiting(1, 90), waiting(2, 80))) is None


# ------------------------------------------------------------------ exceptions and ends


def test_an_exception_is_certain_at_once():
    raised = FailureNotice("raised", 1, 1, 0.0, "ValueError")
    assert found(world(waiting(0, 0), busy(1), waiting(2, 0)), [raised]) == ("raised", 1)


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_the_first_exception_counts(first, second):
    notices = [FailureNotice("raised", first, first, 0.9), FailureNotice("raised", second, second, 0.4)]
    assert found(world(*map(busy, range(3))), notices) == ("raised", first)


@pytest.mark.parametrize(("gone", "raised", "blamed"), [(1.0, 0.9, 2), (0.1, 1.9, 1), (0.9, 1.2, 2)])
def test_an_exception_right_after_an_end_is_what_its_rank_saw_of_that(gone, raised, blamed):
    notices = [FailureNotice("raised", 1, 1, raised), FailureNotice("gone", 2, 0, gone, code=-9)]
    assert found(world(*map(busy, range(3))), notices)[1] == blamed


def test_who_raises_and_ends_has_raised():
    notices = [FailureNotice("raised", 1, 1, 0.5), FailureNotice("gone", 1, 0, 0.1, code=1)]
    assert found(world(*map(busy, range(3)), r1={"link": "closed"}), notices) == ("raised", 1)


@pytest.mark.parametrize("wait", [0.0, 3.0])
def test_a_connection_that_ended_without_a_word_is_an_end(wait):
    seen = world(waiting(0, wait), busy(1), waiting(2, wait), r1={"link": "closed", "link_seconds": 0.2})
    assert found(seen) == ("gone", 1)


@pytest.mark.parametrize("kind", ["done", "leaves"])
def test_who_took_its_leave_may_end(kind):
    seen = world(busy(0), busy(1), busy(2), r1={"link": "closed", "link_seconds": 5.0})
    assert found(seen, [FailureNotice(kind, 1, 1, 5.0), FailureNotice("gone", 1, 0, 5.0, code=0)]) is None


def test_who_left_its_loop_and_ended_while_others_wait_is_gone():
    seen = world(waiting(0, 5), busy(1), waiting(2, 5), r1={"link": "closed", "link_seconds": 4.0})
    done, gone = FailureNotice("done", 1, 1, 5.0), FailureNotice("gone", 1, 0, 4.0, code=0)
    assert found(seen, [done, gone]) == ("gone", 1)
    assert found(seen, [done]) is None  # its end is that of its watching


@pytest.mark.parametrize("code", [-15, -2])
def test_who_was_asked_to_end_is_not_the_cause_where_another_ended_by_itself(code):
    notices = [FailureNotice("gone", 1, 0, 5.0, code=code), FailureNotice("gone", 2, 0, 0.5, code=-9)]
    assert found(world(*map(busy, range(3))), notices) == ("gone", 2)
    assert found(world(*map(busy, range(3))), notices[:1]) == ("gone", 1)


def test_processes_of_a_host_that_end_together_are_named_alike_by_all():
    for first, second in ((0.50, 0.45), (0.45, 0.50)):
        notices = [FailureNotice("gone", 3, 2, first), FailureNotice("gone", 2, 3, second)]
        verdict = attribute_failure(0, world(*map(busy, range(4))), notices, LIMITS)
        assert (verdict.kind, verdict.rank, verdict.others) == ("gone", 2, (3,))


def test_a_process_that_cpp_gave_up_is_not_named_before_one_that_ended_with_it():
    notices = [FailureNotice("gone", 1, 0, 0.5, code=-6), FailureNotice("gone", 2, 0, 0.5, code=-9)]
    assert found(world(*map(busy, range(3))), notices) == ("gone", 2)


# ------------------------------------------------------------------ stopped, silent, unreachable


@pytest.mark.parametrize(("wait", "silent", "stopped"), [(11, 11, True), (11, 5, False), (5, 11, False)])
def test_a_stopped_process_counts_once_others_have_waited(wait, silent, stopped):
    seen = world(row(0, age=wait, stopped=(1,)), busy(1), waiting(2, wait), r1={"silent": silent})
    assert found(seen) == (("stopped", 1) if stopped else None)


def test_stopped_processes_are_told_to_other_hosts_by_those_beside_them():
    seen = world(
        waiting(0, 30),
        row(1, age=30, stopped=(2,)),
        busy(2),
        hosts="abb",
        r2={"silent": 20.0},
    )
    assert found(seen) == ("stopped", 2)


def test_a_rank_that_is_silent_though_its_host_answers_is_stopped_unless_it_told_its_stack():
    silent = {"silent": 30.0, "unanswered": 0.1}
    seen = world(waiting(0, 30), busy(1), hosts="ab", r1=silent)
    assert found(seen) == ("stopped", 1)
    told = world(waiting(0, 30), busy(1), hosts="ab", r1=silent | {"dumped": True})
    assert found(told) is None
    assert late(told, [], 15.0) == Attribution("held", 1, 30.0, (), 0)
    seen = world(waiting(0, 70), busy(1), hosts="ab", r1={"silent": 70.0, "dumped": True})
    assert found(seen) == ("held", 1)


def test_a_silent_rank_is_not_believed_to_wait_still():
    seen = world(waiting(0, 30), waiting(1, 0.1), r1={"silent": 30.0})
    assert waited(seen[1], LIMITS) == 0.0
    assert found(seen) == ("stopped", 1)


def test_a_rank_that_was_never_heard_of_is_missed_too():
    assert found(world(waiting(0, 30), None, r1={"silent": 30.0})) == ("stopped", 1)
    assert found(world(waiting(0, 5), None, r1={"silent": 5.0})) is None


@pytest.mark.parametrize("link", [{"link": "lost"}, {"unanswered": 12.0}])
@pytest.mark.parametrize("wait", [0.0, 12.0])
def test_a_host_that_does_not_answer_is_out_of_reach(link, wait):
    lost = {"silent": 12.0} | link
    rows = [waiting(0, wait), waiting(1, wait), busy(2), busy(3)]
    verdict = attribute_failure(0, world(*rows, hosts="aabb", r2=lost, r3=lost), [], LIMITS)
    assert (verdict.kind, verdict.rank, verdict.others) == ("unreachable", 2, (3,))


@pytest.mark.parametrize("silent", [0.2, 5.0, 9.9])
def test_a_host_may_be_out_of_reach_for_a_while(silent):
    lost = {"silent": silent, "unanswered": silent}
    assert found(world(waiting(0, 9), busy(1), waiting(2, 9), hosts="abc", r1=lost)) is None


def test_a_host_of_which_one_rank_is_heard_is_not_out_of_reach():
    lost = {"silent": 12.0, "unanswered": 12.0}
    seen = world(busy(0), busy(1), busy(2), hosts="abb", r1=lost)
    assert found(seen) is None


@pytest.mark.parametrize("lag", [0.0, 0.5])
def test_who_hears_no_other_host_is_cut_off_itself(lag):
    first, second = ({"silent": s, "unanswered": s} for s in (10.1, 10.1 - lag))
    seen = world(waiting(0, 9), waiting(1, 9), busy(2), busy(3), hosts="aabc", r2=first, r3=second)
    assert found(seen) == (("cut off", None) if lag == 0.0 else None)
    later = [replace(each, silent=each.silent + lag) if each.silent > 1 else each for each in seen]
    assert found(later) == ("cut off", None)


def test_of_two_hosts_each_names_the_other():
    lost = {"silent": 12.0, "unanswered": 12.0}
    assert found(world(waiting(0, 9), busy(1), hosts="ab", r1=lost)) == ("unreachable", 1)


def test_where_rows_are_passed_on_silence_is_given_more_time():
    for silent, expected in ((11.0, None), (13.0, ("unreachable", 1))):
        seen = world(busy(0), busy(1), busy(2), hosts="abc", r1={"silent": silent, "link": "none"})
        assert found(seen) == expected


# ------------------------------------------------------------------ stalls


@pytest.mark.parametrize("phase", PHASES)
def test_the_rank_that_stands_still_is_named_with_one_that_waits(phase):
    seen = world(waiting(0, 61), busy(1, phase=phase, age=70.0, still=70.0), waiting(2, 65))
    assert attribute_failure(0, seen, [], LIMITS) == Attribution("stalled", 1, pytest.approx(65.1), (), 2)


def test_the_least_advanced_of_several_is_named():
    seen = world(waiting(0, 70), busy(1, step=7, still=99.0), busy(2, step=6, still=99.0))
    assert found(seen) == ("stalled", 2)
    seen = world(waiting(0, 70), busy(1, phase="backward", still=99.0), busy(2, phase="forward", still=99.0))
    assert found(seen) == ("stalled", 2)


def test_a_rank_that_left_its_loop_is_named_where_all_others_wait():
    done = FailureNotice("done", 1, 1, 80.0, step=6)
    assert found(world(waiting(0, 61), busy(1), waiting(2, 61)), [done]) == ("finished", 1)
    assert found(world(waiting(0, 50), busy(1), waiting(2, 50)), [done]) is None
    both = [done, FailureNotice("done", 2, 2, 80.0, step=5)]
    verdict = attribute_failure(0, world(waiting(0, 61), busy(1), busy(2)), both, LIMITS)
    assert (verdict.kind, verdict.rank, verdict.others) == ("finished", 2, (1,))


def test_ranks_that_wait_for_different_things():
    seen = world(waiting(0, 61), row(1, age=61, step=6), waiting(2, 61))
    assert found(seen) == ("elsewhere", 1)
    seen = world(row(0, age=61, task="eval"), row(1, age=61), row(2, age=61))
    assert attribute_failure(0, seen, [], LIMITS).kind == "elsewhere"


def test_what_a_rank_waited_for_before_it_fell_silent_speaks_against_nobody():
    """Others wait for it in a later step, so it has moved on since; what it does shows when it is silent for longer."""
    limits = replace(LIMITS, stall=1.75, lost=1.5)
    rows = [waiting(0, 1.8), row(1, age=0.01, step=4), waiting(2, 1.8)]
    assert found(world(*rows, r1={"silent": 1.9}), limits=limits) is None
    assert found(world(*rows, r1={"silent": 2.1, "dumped": True}), limits=limits) == ("held", 1)


@pytest.mark.parametrize("how", ["stopped", "silent", "stalled"])
def test_after_a_connection_failed_less_speaks_against_a_rank(how):
    fields = {"stopped": {}, "silent": {}, "stalled": {"still": 2.0}}[how]
    silent = 0.1 if how == "stalled" else 3.5
    seen = world(
        row(0, age=4, stopped=(1,) if how == "stopped" else ()), busy(1, **fields), r1={"silent": silent}
    )
    assert found(seen) is None
    assert found(seen, hurried=True)[1] == 1


# ------------------------------------------------------------------ verdicts that are shared


def test_a_verdict_that_was_told_is_shared_by_all():
    told = [
        FailureNotice("verdict", 2, 3, 1.0, "stalled"),
        FailureNotice("verdict", 1, 0, 0.5, "stopped", others=(3,)),
    ]
    seen = world(*map(busy, range(4)))
    assert attribute_failure(0, seen, told, LIMITS) == Attribution("stopped", 1, 0.5, (3,), 0)
    assert attribute_failure(0, seen, told[::-1], LIMITS) == Attribution("stopped", 1, 0.5, (3,), 0)
    assert found(seen, [*told, FailureNotice("raised", 3, 3)]) == ("raised", 3)


# ------------------------------------------------------------------ anything

ROWS = st.builds(
    Heartbeat,
    rank=st.just(0),
    sequence=st.integers(0, 9),
    step=st.integers(0, 3),
    phase=st.sampled_from([*PHASES, "another"]),
    task=st.sampled_from(["", "eval", "checkpoint"]),
    bucket=st.integers(-1, 3),
    waiting=st.booleans(),
    age=st.floats(0, 200),
    still=st.floats(0, 200),
    stopped=st.lists(st.integers(0, 3), max_size=2).map(tuple),
)
SEEN = st.builds(
    RankObservation,
    rank=st.just(0),
    host=st.sampled_from("ab"),
    row=st.none() | ROWS,
    silent=st.floats(0, 200),
    link=st.sampled_from(["open", "closed", "lost", "none"]),
    link_seconds=st.floats(0, 200),
    unanswered=st.floats(0, 200),
    dumped=st.booleans(),
)
NOTICES = st.builds(
    FailureNotice,
    kind=st.sampled_from(["raised", "thread", "gone", "done", "leaves", "stack"]),
    rank=st.integers(0, 3),
    by=st.integers(0, 3),
    ago=st.floats(0, 100),
    code=st.none() | st.sampled_from([0, 1, -9, -15]),
)


def numbered(seen):
    return [
        replace(
            each,
            rank=rank,
            row=each.row and replace(each.row, rank=rank),
            silent=each.silent if rank else 0.0,
        )
        for rank, each in enumerate(seen)
    ]


@given(st.lists(SEEN, min_size=2, max_size=4), st.lists(NOTICES, max_size=4), st.booleans())
def test_any_evidence_gives_a_verdict_on_a_rank_that_is_there_or_none(seen, notices, hurried):
    seen = numbered(seen)
    notices = [each for each in notices if each.rank < len(seen)]
    verdict = attribute_failure(0, seen, notices, LIMITS, hurried=hurried)
    if verdict is None:
        return
    assert verdict.rank is None or verdict.rank < len(seen)
    assert verdict.rank not in verdict.others
    if not verdict.certain and verdict.kind != "finished":
        assert verdict.rank not in {each.rank for each in notices if each.kind in ("done", "leaves")}


@given(st.lists(SEEN, min_size=2, max_size=4), st.lists(NOTICES, max_size=4))
def test_patience_never_adds_a_verdict(seen, notices):
    seen = numbered(seen)
    notices = [each for each in notices if each.rank < len(seen)]
    patient = attribute_failure(0, seen, notices, StallLimits(1e9, 1e9, 1.0))
    assert patient is None or patient.kind in CERTAIN


@given(ROWS, ROWS)
def test_positions_are_ordered_by_step_first(one, other):
    if one.step < other.step:
        assert position(one) < position(other)
    assert position(None) < position(one)


def test_suspicions_begin_in_time_for_a_name_within_the_limits():
    assert StallLimits(60.0, 15.0).sooner(1.0, 1.0) == StallLimits(59.0, 14.0, 1.0)
    assert StallLimits(2.0, 1.0).sooner(1.0, 1.0) == StallLimits(1.75, 1.0, 1.0)
    assert StallLimits(60.0, 15.0).sooner(1.0, 8.0) == StallLimits(59.0, 14.0, 8.0)
