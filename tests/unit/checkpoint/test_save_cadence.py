"""Save cadence: equal on all ranks, independent of their clocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.parts.optimizer_state_pieces import partition_by_size
from paceline.checkpoint.save_cadence import EverySeconds, EverySteps, save_cadence
from paceline.errors import UsageError


def test_every_n_steps():
    every = save_cadence(5, list)
    assert isinstance(every, EverySteps)
    assert [step for step in range(1, 16) if every.due(step)] == [5, 10, 15]
    assert save_cadence(None, list) is None


def test_steps_between_two_checks_count():
    """A loop whose body makes three optimizer steps, restarted after step 11."""
    every = EverySteps(4)
    assert [step for step in range(3, 25, 3) if every.due(step)] == [6, 9, 12, 18, 21, 24]
    every = EverySteps(4)
    assert [step for step in range(11, 30, 3) if every.due(step)] == [14, 17, 20, 26, 29]


@pytest.mark.parametrize("every", [0, -1, True, 2.5, "0s", "10 apples", [], b"1"])
def test_invalid_cadences_are_refused(every):
    with pytest.raises(UsageError):
        save_cadence(every, list)


@pytest.mark.thorough
@given(
    st.lists(st.floats(0.01, 30), min_size=50, max_size=200),
    st.lists(st.floats(0.01, 30), min_size=200, max_size=200),
)
def test_rank_0_decides_by_time_for_all(seconds_of_step, other_clock):
    """Two ranks with different clocks save at the same steps, about as often as requested."""
    shared, times = [], [0.0, 0.0]

    def of_rank_0(numbers):
        shared.append(numbers)
        return numbers

    first = EverySeconds(60, of_rank_0, lambda: times[0])
    other = EverySeconds(60, lambda _: shared[-1], lambda: times[1])
    since = 0.0
    for step, seconds in enumerate(seconds_of_step, 1):
        times[0] += seconds
        times[1] += other_clock[step - 1]
        since += seconds
        checked = len(shared)
        due = first.due(step)
        if len(shared) > checked or step < other._next:
            assert other.due(step) == due
        if due:
            assert since >= 60
            first.saved()
            other.saved()
            since = 0.0


def test_checks_are_rare_with_short_steps_and_saves_are_on_time():
    now, looks = [0.0], []

    def share(numbers):
        looks.append(now[0])
        return numbers

    every = EverySeconds(600, share, lambda: now[0])
    saved = []
    for step in range(1, 20_001):
        now[0] += 0.1
        if every.due(step):
            every.saved()
            saved.append(now[0])
    assert saved == pytest.approx([600, 1200, 1800], rel=0.1)
    assert len(looks) < 120


def test_time_between_two_reads_of_the_clock_is_no_step():
    """Steps of 3 s, and a clock that advances while it is read: the second check is not a thousand steps later."""
    now, saved = [0.0], []

    def clock():
        now[0] += 1e-7
        return now[0]

    every = EverySeconds(60, list, clock)
    for step in range(1, 101):
        now[0] += 3.0
        if every.due(step):
            every.saved()
            saved.append(now[0])
    assert saved == pytest.approx([60, 120, 180, 240, 300], abs=3.1)


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_parts_are_runs_of_about_the_same_size(sizes, ranks):
    owners = partition_by_size(sizes, ranks)
    assert owners == sorted(owners)
    assert all(0 <= owner < ranks for owner in owners)
    sums = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)
    ]
    assert max(sums, default=0) <= sum(sizes) / ranks + max(sizes, default=0)


def test_after_a_change_of_ranks_newcomers_and_others_agree():
    old, new = EverySteps(4), EverySteps(4)
    assert [old.due(step) for step in (3, 4)] == [False, True]
    old.rejoin()
    assert old.due(4) == new.due(4)
    shared = []
    old, new = (
        EverySeconds(60, lambda numbers: shared.append(numbers) or numbers, lambda: 0.0) for _ in "ab"
    )
    assert [old.due(step) for step in range(3)] == [False] * 3
    old.rejoin()
    shared.clear()
    assert old.due(2) == new.due(2)
    assert len(shared) == 2, "both take part"
