"""Step state: values are written and read back."""

from __future__ import annotations

import pytest

from paceline._core.step_state import PHASES, StepState


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("paceline._core.step_state.perf_counter", lambda: now[0])
    return now


def test_a_step_goes_through_its_phases(clock):
    here = StepState()
    assert (here.step, here.phase, here.task, here.bucket, here.waiting) == (0, "outside", "", -1, False)
    for at, phase in enumerate(PHASES):
        clock[0] = 100.0 + at
        here.begin_phase(7, phase)
        assert (here.step, here.phase, here.since) == (7, phase, 100.0 + at)
    here.enter_phase("outside")
    assert (here.step, here.phase) == (7, "outside")


def test_waiting_names_the_bucket_and_ends(clock):
    here = StepState()
    here.begin_wait(3)
    assert (here.waiting, here.bucket, here.since) == (True, 3, 100.0)
    clock[0] += 2
    here.end_wait()
    assert (here.waiting, here.bucket, here.since) == (False, -1, 102.0)


def test_a_wait_that_raises_stays_marked_until_the_next_phase():
    here = StepState()
    with pytest.raises(RuntimeError), here.waiting_for_peers(2):
        raise RuntimeError
    assert (here.waiting, here.bucket) == (True, 2)
    here.enter_phase("outside")
    assert not here.waiting


def test_busy_seconds_are_those_of_a_round_without_the_waits(clock):
    here = StepState()
    here.end_round()
    assert (here.rounds, here.busy_seconds) == (0, 0.0)
    for computed, waited in ((2.0, 1.0), (3.0, 0.5)):
        clock[0] += computed
        with here.waiting_for_peers():
            clock[0] += waited / 2
        with here.waiting_for_peers():
            clock[0] += waited / 2
        here.end_round()
        assert here.latest_busy_seconds == pytest.approx(computed)
    assert (here.rounds, here.busy_seconds) == (2, pytest.approx(5.0))


def test_a_round_reports_whether_it_measures_waiting():
    here = StepState()
    here.end_round(sees_waiting=False)
    assert not here.sees_waiting


def test_a_task_covers_the_phases_in_it_and_ends_also_where_it_raises():
    here = StepState()
    with here.running_task("eval"):
        here.begin_phase(1, "forward")
        with here.running_task("checkpoint"):
            assert here.task == "checkpoint"
        assert (here.task, here.phase) == ("eval", "forward")
    with pytest.raises(OSError, match="full"), here.running_task("checkpoint"):
        raise OSError("full")
    assert here.task == ""


def test_unknown_values_can_not_be_written():
    with pytest.raises(AttributeError):
        StepState().stage = "forward"
