"""Steps at which fragments are sent and merged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.parallel.local_sgd.sync_schedule import SyncSchedule


@st.composite
def schedules(draw: st.DrawFn) -> SyncSchedule:
    every = draw(st.integers(1, 24))
    return SyncSchedule(every, draw(st.integers(1, every)), draw(st.integers(0, every - 1)))


@given(schedules())
def test_fragments_are_merged_every_h_steps_and_sent_a_delay_before(schedule: SyncSchedule) -> None:
    every, fragments, delay = schedule.every, schedule.fragments, schedule.delay
    steps = range(1, 4 * every + 1)
    sent = [(step, p) for step in steps if (p := schedule.fragment_sent_at(step)) is not None]
    for p in range(fragments):
        due = [step for step in steps if schedule.fragment_due_at(step) == p]
        assert due == [(p + 1) * every // fragments + cycle * every for cycle in range(4)]
        assert [step + delay for step, each in sent if each == p][:2] == [
            step for step in due if step > delay
        ][:2]
    # In turn, beginning with the first whose step of sending is one.
    assert [p for _, p in sent] == [(schedule.first_sent + n) % fragments for n in range(len(sent))]
    assert [step + delay for step, _ in sent] == [schedule.merge_step(n) for n in range(len(sent))]


@given(schedules(), st.integers(0, 100))
def test_steps_until_a_fragment_is_due(schedule: SyncSchedule, step: int) -> None:
    ahead = schedule.steps_until_due(step)
    assert schedule.fragment_due_at(step + ahead) is not None
    assert all(schedule.fragment_due_at(step + near) is None for near in range(1, ahead))
