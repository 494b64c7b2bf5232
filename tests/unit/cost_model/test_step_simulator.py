"""A program of computing, launching and waiting, worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cost_model.step_simulator import Compute, Launch, Wait, simulate_step
from paceline.errors import UsageError

SECONDS = st.floats(0.0, 10.0)


def times(timeline):
    return [(call.launched, call.started, call.ended) for call in timeline.calls]


def test_computing_hides_a_call():
    found = simulate_step([Launch(0, 2.0), Compute(3.0), Wait(0)])
    assert times(found) == [(0.0, 0.0, 2.0)]
    assert found.end == 3.0
    assert found.spans == ((0.0, 0.0), (0.0, 3.0), (3.0, 3.0))


def test_one_lane_is_a_queue():
    found = simulate_step([Launch(0, 2.0), Launch(1, 1.0), Wait(0), Wait(1)])
    assert times(found) == [(0.0, 0.0, 2.0), (0.0, 2.0, 3.0)]


def test_two_lanes_run_two_calls_at_once_but_their_gaps_are_shared():
    calls = [Launch(key, 2.0, gap=0.5) for key in range(3)]
    found = simulate_step([*calls, Wait(0), Wait(1), Wait(2)], lanes=2)
    assert times(found) == [(0.0, 0.0, 2.0), (0.0, 0.5, 2.5), (0.0, 2.0, 4.0)]
    found = simulate_step([*calls, Wait(2)], lanes=math.inf)
    assert [ended for _, _, ended in times(found)] == [2.0, 2.5, 3.0]


def test_a_gap_longer_than_the_call_is_the_call():
    found = simulate_step([Launch(0, 1.0, gap=5.0), Launch(1, 1.0), Wait(1)], lanes=9)
    assert found.end == 2.0


def test_computing_slows_during_a_call():
    # 1 s of the call's 2 s at full speed of computing / 2, then the rest of computing alone
    found = simulate_step([Launch(0, 2.0), Compute(3.0), Wait(0)], computing_slows=2.0)
    assert times(found) == [(0.0, 0.0, 2.0)]
    assert found.end == pytest.approx(4.0)  # 1 s of work done in the first 2 s, 2 s left


def test_calls_slow_while_the_rank_computes():
    found = simulate_step([Launch(0, 2.0), Compute(3.0), Wait(0)], calls_slow=2.0)
    assert found.end == pytest.approx(3.5)  # 1.5 of 2 s done by 3 s
    assert times(found)[0][2] == pytest.approx(3.5)


def test_both_slow_each_other():
    found = simulate_step([Launch(0, 1.0), Compute(1.0), Wait(0)], computing_slows=2.0, calls_slow=2.0)
    assert found.end == pytest.approx(2.0)


def test_the_host_is_busy_with_launching():
    found = simulate_step([Launch(0, 2.0, host=0.5), Launch(1, 2.0, host=0.5), Wait(1)])
    assert times(found) == [(0.5, 0.5, 2.5), (1.0, 2.5, 4.5)]


def test_calls_without_a_wait_end_after_the_program():
    found = simulate_step([Launch(0, 2.0), Launch(1, 2.0), Compute(1.0)])
    assert found.end == 1.0
    assert [ended for _, _, ended in times(found)] == [2.0, 4.0]


def test_calls_may_take_no_time():
    found = simulate_step([Launch(key, 0.0) for key in range(4)] + [Wait(key) for key in range(4)])
    assert found.end == 0.0
    assert len(found.calls) == 4


def test_an_empty_program_ends_at_once():
    assert simulate_step([]).end == 0.0


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        ([Wait(3)], {}, "call 3 is waited for"),
        ([Launch(0, 1.0), Launch(0, 1.0)], {}, "two calls have the key 0"),
        ([], {"lanes": 0}, "lanes=0"),
        ([], {"computing_slows": 0.5}, "computing_slows=0.5"),
        ([], {"calls_slow": math.nan}, "calls_slow=nan"),
    ],
)
def test_invalid_values_are_refused(program, options, message):
    with pytest.raises(UsageError, match=message):
        simulate_step(program, **options)


@settings(deadline=None)
@given(
    calls=st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=12),
    lanes=st.sampled_from([1, 2, 3, math.inf]),
    slows=st.tuples(st.floats(1.0, 3.0), st.floats(1.0, 3.0)),
)
def test_no_call_ends_too_early_or_later_than_serial_execution(calls, lanes, slows):
    """Nothing ends before it can, or later than if everything ran one after another."""
    program = []
    for key, (compute, seconds, gap) in enumerate(calls):
        program += [Compute(compute), Launch(key, seconds, gap)]
    program += [Wait(key) for key in range(len(calls))]
    found = simulate_step(program, lanes=lanes, computing_slows=slows[0], calls_slow=slows[1])
    computing, calling = sum(each[0] for each in calls), sum(each[1] for each in calls)
    assert found.end >= max(computing, max(each[1] for each in calls)) - 1e-9
    assert found.end <= slows[0] * computing + slows[1] * calling + 1e-9
    ends = [end for _, end in found.spans]
    assert ends == sorted(ends)
    for call, (_, seconds, _) in zip(found.calls, calls, strict=True):
        assert call.launched <= call.started <= call.ended
        assert call.ended - call.started >= seconds - 1e-9
    starts = [call.started for call in found.calls]
    assert starts == sorted(starts)
    fewer = simulate_step(program, lanes=1, computing_slows=slows[0], calls_slow=slows[1])
    if slows == (1.0, 1.0):
        assert found.end <= fewer.end + 1e-9
