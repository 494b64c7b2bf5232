"""Breakdown of a step's time: hand-checked cases, and invariants that hold for any line."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.tools.report.run.run_records import TraceSpan
from paceline.tools.report.run.step_breakdown import (
    exposed_intervals,
    mean_parts,
    merge_intervals,
    step_intervals,
    step_parts,
)
from paceline.tools.report.run.trace_reader import (
    StepInterval,
    TracedCall,
    TracedStep,
    TracedWait,
    clock_offset_at,
    read_timeline,
)


def line(phases, seconds, **more):
    """Return a step of (name, start) phases."""
    ends = [*(start for _, start in phases[1:]), seconds]
    intervals = tuple(StepInterval(name, start, end) for (name, start), end in zip(phases, ends, strict=True))
    return TracedStep(step=0, rank=0, start=100.0, seconds=seconds, phases=intervals, **more)


ORDINARY = [
    ("forward", 0.0),
    ("outside", 2.0),
    ("backward", 3.0),
    ("exchange", 7.0),
    ("outside", 8.0),
    ("optimizer", 8.5),
    ("outside", 9.5),
    ("data", 9.75),
]


def test_phases_become_parts():
    parts = step_parts(line(ORDINARY, 10.0))
    assert parts == {
        "data": 0.25,
        "forward": 3.0,  # with the loss
        "backward": 4.0,
        "exposed": 1.0,
        "optimizer": 1.0,
        "other": 0.75,
        "between": 0.0,
    }


def test_waits_launches_and_tasks_are_subtracted_from_their_phases():
    traced = line(
        ORDINARY,
        10.0,
        waits=(TracedWait(0, 7.2, 7.6), TracedWait(-1, 8.6, 9.1)),
        calls=(
            TracedCall(
                kind="reduce",
                bucket=0,
                nbytes=8,
                sent=8,
                ready=3.9,
                launched=4.0,
                posted=4.5,
                done=None,
                seen=7.6,
            ),
        ),
        tasks=(StepInterval("eval", 9.5, 9.7),),
    )
    parts = step_parts(traced)
    assert parts["backward"] == pytest.approx(3.5)
    assert parts["exposed"] == pytest.approx(1.0 + 0.5 + 0.5)
    assert parts["optimizer"] == pytest.approx(0.5)
    assert parts["between"] == pytest.approx(0.2)
    assert parts["other"] == pytest.approx(0.55)


moments = st.lists(st.floats(0, 10, allow_nan=False), min_size=2, max_size=8)
names = st.sampled_from(["forward", "outside", "backward", "exchange", "optimizer", "data"])


@given(st.lists(names, min_size=1, max_size=8), moments, moments, moments, moments)
def test_parts_add_up_to_the_step_and_pieces_leave_no_gap(kinds, starts, waits, calls, tasks):
    cuts = sorted(starts)[: len(kinds)]
    phases = [(name, at) for name, at in zip(kinds, [0.0, *cuts[1:]], strict=False)]
    pairs = [sorted(each) for each in zip(waits[::2], waits[1::2], strict=False)]
    sent = [sorted(each) for each in zip(calls[::2], calls[1::2], strict=False)]
    done = [sorted(each) for each in zip(tasks[::2], tasks[1::2], strict=False)]
    traced = line(
        phases,
        10.0,
        waits=tuple(TracedWait(0, *pair) for pair in pairs),
        calls=tuple(
            TracedCall(
                kind="reduce",
                bucket=0,
                nbytes=1,
                sent=1,
                ready=None,
                launched=one,
                posted=two,
                done=None,
                seen=None,
            )
            for one, two in sent
        ),
        tasks=tuple(StepInterval("eval", *pair) for pair in done),
    )
    assert sum(step_parts(traced).values()) == pytest.approx(10.0)
    pieces = step_intervals(traced)
    assert pieces[0].start == 0.0
    assert pieces[-1].end == 10.0
    for before, after in itertools.pairwise(pieces):
        assert before.end == pytest.approx(after.start)
    apart = exposed_intervals(traced)
    assert all(a.end < b.start for a, b in itertools.pairwise(apart))


def test_intervals_that_touch_become_one():
    found = merge_intervals(
        [StepInterval("a", 3, 4), StepInterval("a", 1, 2), StepInterval("a", 2, 2.5), StepInterval("a", 5, 5)]
    )
    assert [(each.start, each.end) for each in found] == [(1, 2.5), (3, 4)]


def test_waits_of_quiet_steps_are_exposed_too():
    calls = (
        TracedCall(
            kind="reduce",
            bucket=0,
            nbytes=8,
            sent=8,
            ready=None,
            launched=7.0,
            posted=7.0,
            done=None,
            seen=7.5,
        ),
    )
    usual = line(ORDINARY, 10.0, calls=calls)
    quiet = line([("forward", 0.0), ("backward", 3.0), ("exchange", 6.5)], 10.0, quiet=True, calls=calls)
    mean = mean_parts([usual, usual, quiet, quiet, quiet])
    assert mean["backward"] == pytest.approx(3.5)
    assert mean["exposed"] == pytest.approx(1.5)
    assert sum(mean.values()) == pytest.approx(10.0)
    assert mean_parts([usual, quiet, quiet])["backward"] == pytest.approx(4.0)  # too few of them
    assert mean_parts([quiet])["backward"] == pytest.approx(3.5)
    nothing_sent = [replace(each, calls=()) for each in (usual, quiet, quiet, quiet)]
    assert mean_parts(nothing_sent)["backward"] == pytest.approx(4.0)


# ------------------------------------------------------------------ reading


def span(name, start=0.0, seconds=0.0, **fields):
    return TraceSpan(name, start, seconds, 1, fields)


def step(number, start=0.0, seconds=1.0):
    phases = [["forward", 0], ["backward", 400_000], ["exchange", 800_000]]
    calls = [["reduce", 0, 64, 32, None, 500_000, 510_000, None, 900_000]]
    return span(
        "step", start, seconds, step=number, phases=phases, waits=[], tasks=[], calls=calls, samples=4.0
    )


def test_lines_are_read_with_their_fields():
    (only,) = read_timeline([step(0)]).steps
    assert only.phases[-1] == StepInterval("exchange", 0.8, 1.0)
    (call,) = only.calls
    assert (call.nbytes, call.sent, call.ready, call.launched, call.end) == (64, 32, None, 0.5, 0.9)
    assert only.samples == 4.0


def test_the_first_step_of_each_session_is_cold_and_steps_done_again_count_once():
    first = [span("session", step=0), *(step(number, start=number) for number in range(5))]
    again = [span("session", step=3), *(step(number, start=100 + number) for number in range(3, 6))]
    trace = read_timeline([*first, *again])
    assert [line.step for line in trace.steps] == [0, 1, 2, 3, 4, 5]
    assert [line.step for line in trace.warm] == [1, 2, 4, 5]
    assert trace.steps[4].start == 104


def test_a_forward_alone_is_no_step_and_invalid_records_are_skipped():
    alone = span("step", seconds=1.0, step=9, phases=[["forward", 0]], waits=[], tasks=[], calls=[])
    broken = span("step", seconds=1.0, step=10, phases=[["backward", None]], waits=[], tasks=[], calls=[])
    assert (
        read_timeline([step(0), alone, broken, span("step", seconds=2.0)]).steps
        == read_timeline([step(0)]).steps
    )


def test_times_are_put_on_rank_0s_clock():
    marks = [span("clock", 0.0, offset=2.0, error=0.001), span("clock", 10.0, offset=4.0, error=0.003)]
    trace = read_timeline([marks[0], step(0, start=5.0), marks[1]])
    assert trace.steps[0].start == pytest.approx(5.0 - 3.0)
    assert trace.clock_error == 0.003


@pytest.mark.parametrize(("at", "offset"), [(-5.0, 1.0), (0.0, 1.0), (5.0, 1.5), (10.0, 2.0), (99.0, 2.0)])
def test_between_measurements_an_offset_is_on_a_line(at, offset):
    assert clock_offset_at([(0.0, 1.0), (10.0, 2.0)], at) == offset
    assert clock_offset_at([], at) == 0.0


def test_buckets_and_memory_are_those_reported_last():
    bucket = {"call": "all-reduce", "nbytes": 8, "parameters": 2, "first": "a"}
    plans = [span("plan", step=0, buckets=[bucket, bucket]), span("plan", step=4, buckets=[bucket])]
    trace = read_timeline([*plans, span("memory", resident=5), span("memory", resident=7), step(0)])
    assert [len(trace.buckets_at(number)) for number in (0, 3, 4, 9)] == [2, 2, 1, 1]
    assert trace.memory == {"resident": 7}
