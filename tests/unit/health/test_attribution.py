"""Failure attribution: every kind of evidence, alone and against the others."""

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
    find_late_rank,
    progress_of,
    waited_seconds,
)
from paceline.health.heartbeat import FailureNotice, Heartbeat

LIMITS = StallLimits(stall=60.0, lost=10.0, interval=1.0)


def heartbeat(rank, **fields):
    return Heartbeat(
        rank, 1, **{"step": 7, "phase": "exchange", "bucket": 0, "waiting": True, "age": 0.1} | fields
    )


def busy(rank, **fields):
    return heartbeat(
        rank, **{"phase": "forward", "bucket": -1, "waiting": False, "age": 0.1, "still": 0.0} | fields
    )


def world(*heartbeats, hosts=None, **changes):
    """Return what rank 0 observes, a fresh heartbeat of every rank; `changes` to RankObservation by ``r<rank>``."""
    observations = []
    for at, each in enumerate(heartbeats):
        fields = {"silent": 0.1 if at else 0.0} | changes.get(f"r{at}", {})
        observations.append(RankObservation(at, hosts[at] if hosts else "a", each, **fields))
    return observations


def found(observations, notices=(), limits=LIMITS, me=0, **options):
    failure = attribute_failure(me, observations, list(notices), limits, **options)
    return None if failure is None else (failure.kind, failure.rank)


def waiting(rank, seconds):
    return heartbeat(rank, age=seconds)


# ------------------------------------------------------------------ healthy ranks


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("wait", [0.0, 0.5, 5.0, 59.0])
def test_a_slower_rank_is_no_failure(phase, wait):
    assert found(world(waiting(0, wait), busy(1, phase=phase, still=wait), waiting(2, wait))) is None


@pytest.mark.parametrize("silent", [0.2, 2.5, 9.0, 600.0])
def test_silence_is_no_failure_while_no_rank_waits(silent):
    observations = world(busy(0), busy(1), busy(2), r1={"silent": silent})
    assert found(observations) is None
    assert found(observations, urgent=True) is None


@pytest.mark.parametrize("wait", [61.0, 600.0])
def test_a_rank_whose_stack_changes_is_working_for_any_wait(wait):
    observations = world(waiting(0, wait), busy(1, age=wait, still=0.4), waiting(2, wait))
    assert found(observations) is None
    assert find_late_rank(observations, [], 15.0) == Attribution(
        "stalled", 1, pytest.approx(wait + 0.1), (), 2
    )


@pytest.mark.parametrize("task", ["checkpoint", "eval"])
def test_long_tasks_of_one_rank_are_only_warned_about(task):
    observations = world(waiting(0, 100), busy(1, task=task, still=100.0))
    assert found(observations) is None
    assert find_late_rank(observations, [], 15.0).rank == 1


def test_if_all_ranks_wait_for_the_same_it_is_the_network():
    assert found(world(waiting(0, 100), waiting(1, 90), waiting(2, 80))) is None


# ------------------------------------------------------------------ exceptions and ends


def test_an_exception_is_certain_at_once():
    raised = FailureNotice("raised", 1, 1, name="ValueError")
    assert found(world(waiting(0, 0), busy(1), waiting(2, 0)), [raised]) == ("raised", 1)


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1)])
def test_the_first_exception_counts(first, second):
    notices = [FailureNotice("raised", first, first, 0.9), FailureNotice("raised", second, second, 0.4)]
    assert found(world(*map(busy, range(3))), notices) == ("raised", first)


@pytest.mark.parametrize(("exit_at", "raised", "blamed"), [(1.0, 0.9, 2), (0.1, 1.9, 1), (0.9, 1.2, 2)])
def test_an_exception_right_after_an_exit_is_its_consequence(exit_at, raised, blamed):
    notices = [FailureNotice("raised", 1, 1, raised), FailureNotice("gone", 2, 0, exit_at, code=-9)]
    assert found(world(*map(busy, range(3))), notices)[1] == blamed


def test_a_rank_that_raised_and_exited_has_raised():
    notices = [FailureNotice("raised", 1, 1, 0.5), FailureNotice("gone", 1, 0, 0.1, code=1)]
    assert found(world(*map(busy, range(3)), r1={"link": "closed"}), notices) == ("raised", 1)


@pytest.mark.parametrize("wait", [0.0, 3.0])
def test_a_connection_closed_without_a_notice_is_an_exit(wait):
    observations = world(
        waiting(0, wait), busy(1), waiting(2, wait), r1={"link": "closed", "link_seconds": 0.2}
    )
    assert found(observations) == ("gone", 1)


@pytest.mark.parametrize("kind", ["done", "leaves"])
def test_a_rank_that_left_may_exit(kind):
    observations = world(busy(0), busy(1), busy(2), r1={"link": "closed", "link_seconds": 5.0})
    assert (
        found(observations, [FailureNotice(kind, 1, 1, 5.0), FailureNotice("gone", 1, 0, 5.0, code=0)])
        is None
    )


def test_a_rank_that_left_its_loop_and_exited_while_others_wait_is_lost():
    observations = world(waiting(0, 5), busy(1), waiting(2, 5), r1={"link": "closed", "link_seconds": 4.0})
    done, gone = FailureNotice("done", 1, 1, 5.0), FailureNotice("gone", 1, 0, 4.0, code=0)
    assert found(observations, [done, gone]) == ("gone", 1)
    assert found(observations, [done]) is None  # its end is that of its watching


@pytest.mark.parametrize("code", [-15, -2])
def test_a_terminated_rank_is_not_the_cause_if_another_exited_by_itself(code):
    notices = [FailureNotice("gone", 1, 0, 5.0, code=code), FailureNotice("gone", 2, 0, 0.5, code=-9)]
    assert found(world(*map(busy, range(3))), notices) == ("gone", 2)
    assert found(world(*map(busy, range(3))), notices[:1]) == ("gone", 1)


def test_all_ranks_name_the_same_of_processes_that_exit_together():
    for first, second in ((0.50, 0.45), (0.45, 0.50)):
        notices = [FailureNotice("gone", 3, 2, first), FailureNotice("gone", 2, 3, second)]
        failure = attribute_failure(0, world(*map(busy, range(4))), notices, LIMITS)
        assert (failure.kind, failure.rank, failure.others) == ("gone", 2, (3,))


def test_a_process_ended_by_sigabrt_is_named_after_others():
    notices = [FailureNotice("gone", 1, 0, 0.5, code=-6), FailureNotice("gone", 2, 0, 0.5, code=-9)]
    assert found(world(*map(busy, range(3))), notices) == ("gone", 2)


# ------------------------------------------------------------------ stopped, silent, unreachable


@pytest.mark.parametrize(("wait", "silent", "stopped"), [(11, 11, True), (11, 5, False), (5, 11, False)])
def test_a_stopped_process_counts_once_others_have_waited(wait, silent, stopped):
    observations = world(
        heartbeat(0, age=wait, stopped=(1,)), busy(1), waiting(2, wait), r1={"silent": silent}
    )
    assert found(observations) == (("stopped", 1) if stopped else None)


def test_ranks_of_the_same_host_report_stopped_processes_to_other_hosts():
    observations = world(
        waiting(0, 30),
        heartbeat(1, age=30, stopped=(2,)),
        busy(2),
        hosts="abb",
        r2={"silent": 20.0},
    )
    assert found(observations) == ("stopped", 2)


def test_a_silent_rank_on_an_answering_host_is_stopped_unless_it_dumped_its_stack():
    silent = {"silent": 30.0, "unanswered": 0.1}
    observations = world(waiting(0, 30), busy(1), hosts="ab", r1=silent)
    assert found(observations) == ("stopped", 1)
    dumped = world(waiting(0, 30), busy(1), hosts="ab", r1=silent | {"dumped": True})
    assert found(dumped) is None
    assert find_late_rank(dumped, [], 15.0) == Attribution("held", 1, 30.0, (), 0)
    observations = world(waiting(0, 70), busy(1), hosts="ab", r1={"silent": 70.0, "dumped": True})
    assert found(observations) == ("held", 1)


def test_a_silent_rank_does_not_count_as_waiting():
    observations = world(waiting(0, 30), waiting(1, 0.1), r1={"silent": 30.0})
    assert waited_seconds(observations[1], LIMITS) == 0.0
    assert found(observations) == ("stopped", 1)


def test_a_rank_without_any_heartbeat_counts_as_silent():
    assert found(world(waiting(0, 30), None, r1={"silent": 30.0})) == ("stopped", 1)
    assert found(world(waiting(0, 5), None, r1={"silent": 5.0})) is None


@pytest.mark.parametrize("link", [{"link": "lost"}, {"unanswered": 12.0}])
@pytest.mark.parametrize("wait", [0.0, 12.0])
def test_a_host_that_does_not_answer_is_unreachable(link, wait):
    lost = {"silent": 12.0} | link
    heartbeats = [waiting(0, wait), waiting(1, wait), busy(2), busy(3)]
    failure = attribute_failure(0, world(*heartbeats, hosts="aabb", r2=lost, r3=lost), [], LIMITS)
    assert (failure.kind, failure.rank, failure.others) == ("unreachable", 2, (3,))


@pytest.mark.parametrize("silent", [0.2, 5.0, 9.9])
def test_a_host_may_be_silent_within_the_limit(silent):
    lost = {"silent": silent, "unanswered": silent}
    assert found(world(waiting(0, 9), busy(1), waiting(2, 9), hosts="abc", r1=lost)) is None


def test_a_host_with_a_heartbeat_of_one_rank_is_reachable():
    lost = {"silent": 12.0, "unanswered": 12.0}
    observations = world(busy(0), busy(1), busy(2), hosts="abb", r1=lost)
    assert found(observations) is None


@pytest.mark.parametrize("lag", [0.0, 0.5])
def test_a_host_without_heartbeats_of_other_hosts_is_cut_off(lag):
    first, second = ({"silent": s, "unanswered": s} for s in (10.1, 10.1 - lag))
    observations = world(waiting(0, 9), waiting(1, 9), busy(2), busy(3), hosts="aabc", r2=first, r3=second)
    assert found(observations) == (("cut off", None) if lag == 0.0 else None)
    later = [replace(each, silent=each.silent + lag) if each.silent > 1 else each for each in observations]
    assert found(later) == ("cut off", None)


def test_of_two_hosts_each_names_the_other():
    lost = {"silent": 12.0, "unanswered": 12.0}
    assert found(world(waiting(0, 9), busy(1), hosts="ab", r1=lost)) == ("unreachable", 1)


def test_relayed_heartbeats_have_more_time():
    for silent, expected in ((11.0, None), (13.0, ("unreachable", 1))):
        observations = world(busy(0), busy(1), busy(2), hosts="abc", r1={"silent": silent, "link": "none"})
        assert found(observations) == expected


# ------------------------------------------------------------------ stalls


@pytest.mark.parametrize("phase", PHASES)
def test_a_stalled_rank_is_named_with_a_waiting_one(phase):
    observations = world(waiting(0, 61), busy(1, phase=phase, age=70.0, still=70.0), waiting(2, 65))
    assert attribute_failure(0, observations, [], LIMITS) == Attribution(
        "stalled", 1, pytest.approx(65.1), (), 2
    )


def test_the_least_advanced_of_several_is_named():
    observations = world(waiting(0, 70), busy(1, step=7, still=99.0), busy(2, step=6, still=99.0))
    assert found(observations) == ("stalled", 2)
    observations = world(
        waiting(0, 70), busy(1, phase="backward", still=99.0), busy(2, phase="forward", still=99.0)
    )
    assert found(observations) == ("stalled", 2)


def test_a_rank_that_left_its_loop_is_named_where_all_others_wait():
    done = FailureNotice("done", 1, 1, 80.0, step=6)
    assert found(world(waiting(0, 61), busy(1), waiting(2, 61)), [done]) == ("finished", 1)
    assert found(world(waiting(0, 50), busy(1), waiting(2, 50)), [done]) is None
    both = [done, FailureNotice("done", 2, 2, 80.0, step=5)]
    failure = attribute_failure(0, world(waiting(0, 61), busy(1), busy(2)), both, LIMITS)
    assert (failure.kind, failure.rank, failure.others) == ("finished", 2, (1,))


def test_ranks_that_wait_for_different_things():
    observations = world(waiting(0, 61), heartbeat(1, age=61, step=6), waiting(2, 61))
    assert found(observations) == ("elsewhere", 1)
    observations = world(heartbeat(0, age=61, task="eval"), heartbeat(1, age=61), heartbeat(2, age=61))
    assert attribute_failure(0, observations, [], LIMITS).kind == "elsewhere"


def test_the_wait_of_a_silent_rank_is_no_evidence():
    """Others wait for it in a later step, so it has moved on; its silence has to last for an attribution."""
    limits = replace(LIMITS, stall=1.75, lost=1.5)
    heartbeats = [waiting(0, 1.8), heartbeat(1, age=0.01, step=4), waiting(2, 1.8)]
    assert found(world(*heartbeats, r1={"silent": 1.9}), limits=limits) is None
    assert found(world(*heartbeats, r1={"silent": 2.1, "dumped": True}), limits=limits) == ("held", 1)


def test_a_silent_rank_that_nobody_saw_stopped_has_time_to_dump_its_stacks():
    """On a loaded machine the stacks of a rank that holds Python's lock come later than a short `lost`."""
    limits = replace(LIMITS, stall=2.0, lost=1.5)
    for silent, expected in ((2.7, None), (4.6, ("stopped", 1))):
        observations = world(waiting(0, silent), busy(1), waiting(2, silent), r1={"silent": silent})
        assert found(observations, limits=limits) == expected
    seen = world(heartbeat(0, age=2.7, stopped=(1,)), busy(1), waiting(2, 2.7), r1={"silent": 2.7})
    assert found(seen, limits=limits) == ("stopped", 1)
    dumped = world(waiting(0, 2.7), busy(1), waiting(2, 2.7), r1={"silent": 2.7, "dumped": True})
    assert found(dumped, limits=limits) == ("held", 1)


@pytest.mark.parametrize("how", ["stopped", "silent", "stalled"])
def test_after_a_connection_error_weaker_evidence_counts(how):
    fields = {"stopped": {}, "silent": {}, "stalled": {"still": 2.0}}[how]
    silent = 0.1 if how == "stalled" else 3.5
    observations = world(
        heartbeat(0, age=4, stopped=(1,) if how == "stopped" else ()),
        busy(1, **fields),
        r1={"silent": silent},
    )
    assert found(observations) is None
    assert found(observations, urgent=True)[1] == 1


# ------------------------------------------------------------------ verdicts that are shared


def test_all_ranks_share_an_announced_attribution():
    notices = [
        FailureNotice("verdict", 2, 3, 1.0, name="stalled"),
        FailureNotice("verdict", 1, 0, 0.5, name="stopped", others=(3,)),
    ]
    observations = world(*map(busy, range(4)))
    assert attribute_failure(0, observations, notices, LIMITS) == Attribution("stopped", 1, 0.5, (3,), 0)
    assert attribute_failure(0, observations, notices[::-1], LIMITS) == Attribution(
        "stopped", 1, 0.5, (3,), 0
    )
    assert found(observations, [*notices, FailureNotice("raised", 3, 3)]) == ("raised", 3)


# ------------------------------------------------------------------ anything

HEARTBEATS = st.builds(
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
OBSERVATIONS = st.builds(
    RankObservation,
    rank=st.just(0),
    host=st.sampled_from("ab"),
    heartbeat=st.none() | HEARTBEATS,
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


def numbered(observations):
    return [
        replace(
            each,
            rank=rank,
            heartbeat=each.heartbeat and replace(each.heartbeat, rank=rank),
            silent=each.silent if rank else 0.0,
        )
        for rank, each in enumerate(observations)
    ]


@given(st.lists(OBSERVATIONS, min_size=2, max_size=4), st.lists(NOTICES, max_size=4), st.booleans())
def test_any_evidence_names_an_existing_rank_or_none(observations, notices, urgent):
    observations = numbered(observations)
    notices = [each for each in notices if each.rank < len(observations)]
    failure = attribute_failure(0, observations, notices, LIMITS, urgent=urgent)
    if failure is None:
        return
    assert failure.rank is None or failure.rank < len(observations)
    assert failure.rank not in failure.others
    if not failure.certain and failure.kind != "finished":
        assert failure.rank not in {each.rank for each in notices if each.kind in ("done", "leaves")}


@given(st.lists(OBSERVATIONS, min_size=2, max_size=4), st.lists(NOTICES, max_size=4))
def test_longer_limits_never_add_a_failure(observations, notices):
    observations = numbered(observations)
    notices = [each for each in notices if each.rank < len(observations)]
    patient = attribute_failure(0, observations, notices, StallLimits(1e9, 1e9, 1.0))
    assert patient is None or patient.kind in CERTAIN


@given(HEARTBEATS, HEARTBEATS)
def test_progress_is_ordered_by_step_first(one, other):
    if one.step < other.step:
        assert progress_of(one) < progress_of(other)
    assert progress_of(None) < progress_of(one)


def test_limits_minus_the_time_that_naming_takes():
    assert StallLimits(60.0, 15.0).minus(1.0, 1.0) == StallLimits(59.0, 14.0, 1.0)
    assert StallLimits(2.0, 1.0).minus(1.0, 1.0) == StallLimits(1.75, 1.0, 1.0)
    assert StallLimits(60.0, 15.0).minus(1.0, 8.0) == StallLimits(59.0, 14.0, 8.0)
