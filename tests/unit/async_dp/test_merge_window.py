"""When the updates of a round are merged: quorum, grace, late and dead workers."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.async_dp.hub.merge_window import MergeWindow, SampleWeights, merge_scale

Merges = list[tuple[list[int], float]]


def replay(window: MergeWindow, events: list[tuple[float, int]], alive: set[int], quorum: int = 2) -> Merges:
    """Let workers deliver, unless an update of theirs waits; return workers and grace in seconds of all merges."""
    merges = []

    def merge_until(now: float) -> None:
        due = window.due(alive, quorum, now)
        if due <= now:
            merges.append((sorted(window.waiting), window.grace(due)))
            window.close()

    for at, worker in sorted(events):
        merge_until(at)
        if worker not in window.waiting:
            window.add(worker, at, 10.0)
        merge_until(at)
    return merges


def rounds(window: MergeWindow, offsets: dict[int, float], count: int) -> Merges:
    """Let workers deliver at their offsets in rounds of 10 s."""
    events = [(10.0 * n + offset, worker) for n in range(count) for worker, offset in offsets.items()]
    return replay(window, events, set(offsets))


def test_nothing_is_due_before_the_quorum() -> None:
    window = MergeWindow()
    assert window.due({1, 2, 3}, 1, 0.0) == math.inf
    window.add(1, 1.0)
    assert window.due({1, 2, 3}, 2, 1.0) == math.inf
    assert window.due({1, 2, 3}, 2, 1e9) == math.inf


def test_all_live_workers_are_merged_at_once() -> None:
    window = MergeWindow()
    for worker in (1, 2, 3):
        window.add(worker, float(worker))
    assert window.due({1, 2, 3}, 3, 3.0) == 3.0
    assert window.grace(3.0) == 0.0
    window.close()
    assert window.waiting == set()
    assert window.due({1, 2, 3}, 1, 3.0) == math.inf


def test_a_worker_that_is_a_little_later_is_waited_for() -> None:
    merges = rounds(MergeWindow(), {1: 0.0, 2: 0.2, 3: 2.0}, 8)
    assert [merged for merged, _ in merges] == [[1, 2, 3]] * 8
    assert all(grace == pytest.approx(1.8) for _, grace in merges)


def test_in_the_first_window_unknown_workers_have_half_an_interval() -> None:
    window = MergeWindow()
    window.add(1, 50.0, 10.0)
    window.add(2, 50.5, 10.0)
    assert window.due({1, 2, 3}, 2, 50.5) == 55.5
    window.close()
    window.add(1, 60.0)
    window.add(2, 60.5)
    assert window.due({1, 2, 3}, 2, 60.5) == 60.5, "a worker that never sends delays nobody after that"


def test_a_worker_much_slower_than_the_others_is_not_waited_for_and_joins_a_later_merge() -> None:
    events = [(10.0 * n + worker, worker) for n in range(40) for worker in (1, 2)]
    events += [(40.0 * n + 18, 3) for n in range(10)]
    merges = replay(MergeWindow(), events, {1, 2, 3})[4:]
    assert all(grace <= 1.5 for _, grace in merges), "no more than worker 2 needs"
    assert [merged for merged, _ in merges].count([1, 2, 3]) == 9
    assert all({1, 2} <= set(merged) for merged, _ in merges)


def test_a_worker_that_does_not_come_is_waited_for_until_it_is_overdue() -> None:
    window = MergeWindow()
    rounds(window, {1: 0.0, 2: 0.2, 3: 2.0}, 8)
    window.add(1, 80.0)
    window.add(2, 80.2)
    due = window.due({1, 2, 3}, 2, 80.2)
    assert due == pytest.approx(82.5), "a twentieth of the interval after it was expected"
    assert window.due({1, 2, 3}, 2, 81.0) == due, "the end of the grace does not move"
    assert window.grace(due) == pytest.approx(2.3)
    window.close()
    for step in range(9, 12):  # as a dead worker, it is overdue from now on
        window.add(1, 10.0 * step)
        window.add(2, 10.0 * step + 0.2)
        assert window.due({1, 2, 3}, 2, 10.0 * step + 0.2) == 10.0 * step + 0.2
        window.close()


def test_a_worker_that_left_is_not_waited_for() -> None:
    window = MergeWindow()
    rounds(window, {1: 0.0, 2: 0.2, 3: 2.0}, 8)
    window.add(1, 80.0)
    window.add(2, 80.2)
    assert window.due({1, 2}, 2, 80.2) == 80.2


def test_a_quorum_that_shrinks_is_reached_by_those_who_wait() -> None:
    window = MergeWindow()
    window.add(1, 0.0)
    assert window.due({1, 2, 3, 4}, 2, 5.0) == math.inf
    assert window.due({1}, 1, 20.0) == 20.0
    assert window.grace(20.0) == 0.0


def test_workers_that_withhold_their_updates_do_not_stop_the_others() -> None:
    window = MergeWindow()
    window.add(1, 3.0, 10.0)
    assert window.due({1, 2, 3, 4}, 3, 3.0) == 23.0
    window.add(2, 5.0, 40.0)
    assert window.due({1, 2, 3, 4}, 3, 5.0) == 83.0
    assert window.grace(83.0) == 0.0
    window.close()
    assert window.due({1, 2, 3, 4}, 3, 90.0) == math.inf


def test_a_thousand_merges_wait_at_most_half_an_interval_and_take_every_update_once() -> None:
    drawn = random.Random(0)
    window, alive = MergeWindow(), set(range(8))
    next_at = {worker: drawn.uniform(0, 10) for worker in alive}
    sent, merged, longest = 0, 0, 0.0
    for _ in range(8000):
        worker = min(next_at, key=lambda each: next_at[each])
        now = next_at[worker]
        due = window.due(alive, 4, now)
        if due <= now:
            merged += len(window.waiting)
            longest = max(longest, window.grace(due))
            window.close()
        if worker not in window.waiting:
            window.add(worker, now)
            sent += 1
            window.due(alive, 4, now)
        next_at[worker] = now + drawn.uniform(9, 11) * (1 + worker // 4)
    assert sent == merged + len(window.waiting)
    assert 0 < longest <= 11


@given(st.lists(st.tuples(st.integers(1, 5), st.floats(0, 50)), max_size=60), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_any_arrivals_are_due_once_there_is_a_quorum(arrivals: list[tuple[int, float]], quorum: int) -> None:
    window, now = MergeWindow(), 0.0
    for worker, pause in arrivals:
        now += pause
        window.add(worker, now)
        due = window.due({1, 2, 3, 4, 5}, quorum, now)
        assert due < math.inf or len(window.waiting) < quorum
        if due <= now:
            assert window.grace(now) >= 0
            window.close()


def test_the_number_of_updates_of_a_merge_is_bounded() -> None:
    window, alive = MergeWindow(), set(range(5000))
    for update in range(2048):
        assert window.due(alive, 3000, 1.0) == math.inf
        window.restore(update % 10)
    assert window.due(alive, 3000, 1.0) == 1.0


def test_samples_count_up_to_four_times_the_usual() -> None:
    weights = SampleWeights()
    assert [weights.counted(each) for each in (10, 20, 10, 10)] == [10, 20, 10, 10]
    assert weights.counted(4000) == 40
    assert weights.counted(0) == 1
    assert SampleWeights().counted(1e300) == 1e9


def test_merges_of_less_than_half_are_scaled() -> None:
    assert [merge_scale(n, 8) for n in (1, 2, 4, 8)] == [0.25, 0.5, 1, 1]
    assert merge_scale(1, 0) == 1
