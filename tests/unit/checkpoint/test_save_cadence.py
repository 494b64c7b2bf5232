"""When to save and to leave: equal on all ranks, independent of their clocks, in few exchanges."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.parts.optimizer_state_pieces import partition_by_size
from paceline.checkpoint.save_cadence import (
    EverySeconds,
    EverySteps,
    StepDecision,
    StepDecisions,
    save_cadence,
)
from paceline.errors import UsageError


def test_every_n_steps():
    every = save_cadence(5)
    assert isinstance(every, EverySteps)
    assert [step for step in range(1, 16) if every.due(step)] == [5, 10, 15]
    assert save_cadence(None) is None


def test_steps_between_two_checks_count():
    """A loop whose body makes three optimizer steps, restarted after step 11."""
    every = EverySteps(4)
    assert [step for step in range(3, 25, 3) if every.due(step)] == [6, 9, 12, 18, 21, 24]
    every = EverySteps(4)
    assert [step for step in range(11, 30, 3) if every.due(step)] == [14, 17, 20, 26, 29]


@pytest.mark.parametrize("every", [0, -1, True, 2.5, "0s", "10 apples", [], b"1"])
def test_invalid_cadences_are_refused(every):
    with pytest.raises(UsageError):
        save_cadence(every)


# ------------------------------------------------------------------ simulated ranks


class Ranks:
    """Ranks that exchange rows through a barrier; each has a thread and a clock.

    An exchange costs `latency` seconds on the clock of every rank.
    """

    def __init__(self, every, ranks, latency=0.0, timeout=20.0):
        self.times, self.latency = [0.0] * ranks, latency
        self.rows, self.exchanges = [[] for _ in range(ranks)], 0
        self.barrier = threading.Barrier(ranks, timeout=timeout)
        self.decisions = [self._decisions(rank, every) for rank in range(ranks)]

    def _decisions(self, rank, every):
        def clock():
            return self.times[rank]

        cadence = EverySeconds(every, clock) if isinstance(every, float) else every and EverySteps(every)
        return StepDecisions(cadence, lambda row: self.exchange(rank, row), clock)

    def exchange(self, rank, row):
        self.rows[rank] = row
        self.exchanges += rank == 0
        self.barrier.wait()
        rows = list(self.rows)
        self.barrier.wait()
        self.times[rank] += self.latency
        return rows

    def run(self, steps, seconds, warned=lambda rank, step: False):
        """Let each rank do steps until it leaves; return their decisions, by rank."""
        found = [[] for _ in self.decisions]

        def train(rank):
            for step in range(1, steps + 1):
                self.times[rank] += seconds(rank, step)
                one = self.decisions[rank].after(step, warned=warned(rank, step), alone=False)
                found[rank].append(one)
                if one.save:
                    self.decisions[rank].saved()
                if one.leave:
                    return

        threads = [threading.Thread(target=train, args=(rank,)) for rank in range(len(self.decisions))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not self.barrier.broken, "a rank exchanged rows and another one did not"
        return found


@pytest.mark.thorough
@given(
    st.lists(st.floats(0.01, 30), min_size=50, max_size=200),
    st.lists(st.floats(0.01, 30), min_size=200, max_size=200),
)
def test_rank_0_decides_by_time_for_all(seconds_of_step, other_clock):
    """Two ranks with different clocks save at the same steps, about as often as requested."""
    times = seconds_of_step, other_clock
    ranks = Ranks(60.0, 2)
    first, other = ranks.run(len(seconds_of_step), lambda rank, step: times[rank][step - 1])
    assert first == other
    since = 0.0
    for seconds, one in zip(seconds_of_step, first, strict=True):
        since += seconds
        if one.save:
            assert since >= 60 - 1e-9
            since = 0.0


def alone(every, seconds, steps, latency=0.0):
    """Return the steps at which rank 0 exchanged and saved, of a world whose ranks are all like it."""
    now, looks, saved = [0.0], [], []

    def exchange(row):
        looks.append(now[0])
        now[0] += latency
        return [row, row]

    cadence = EverySeconds(every, lambda: now[0]) if isinstance(every, float) else every and EverySteps(every)
    decisions = StepDecisions(cadence, exchange, lambda: now[0])
    for step in range(1, steps + 1):
        now[0] += seconds(step)
        if decisions.after(step, warned=False, alone=False).save:
            decisions.saved()
            saved.append(now[0])
    return looks, saved


def test_saves_by_time_are_on_time():
    _, saved = alone(600.0, lambda _: 0.1, 20_001)
    assert saved == pytest.approx([600, 1200, 1800], rel=0.001)
    _, saved = alone(1.0, lambda _: 0.01, 1000)
    assert saved == pytest.approx([1, 2, 3, 4, 5, 6, 7, 8, 9], abs=0.6)


def test_time_between_two_reads_of_the_clock_is_no_step():
    """Steps of 3 s, and a clock that advances while it is read: the second check is not a thousand steps later."""
    now, saved = [0.0], []

    def clock():
        now[0] += 1e-7
        return now[0]

    decisions = StepDecisions(EverySeconds(60, clock), lambda row: [row], clock)
    for step in range(1, 101):
        now[0] += 3.0
        if decisions.after(step, warned=False, alone=False).save:
            decisions.saved()
            saved.append(now[0])
    assert saved == pytest.approx([60, 120, 180, 240, 300], abs=3.1)


# ------------------------------------------------------------------ warnings


@pytest.mark.parametrize("every", [None, 100, 600.0])
@pytest.mark.parametrize(("seconds", "latency"), [(0.001, 0.0), (0.02, 0.0002), (0.02, 0.002), (4.0, 0.05)])
def test_a_warning_is_noticed_within_a_quarter_of_a_second_or_a_step(every, seconds, latency):
    looks, _ = alone(every, lambda _: seconds, max(100, int(60 / seconds)), latency)
    gaps = [after - before for before, after in itertools.pairwise(looks)]
    assert max(gaps) <= max(0.25, seconds) + latency + 1e-9
    assert latency * len(looks) <= 0.02 * looks[-1]


@pytest.mark.parametrize("latency", [0.01, 0.1])
def test_exchanges_that_cost_much_are_rare(latency):
    looks, _ = alone(None, lambda _: 0.05, 20_000, latency)
    assert latency * len(looks) < 0.012 * looks[-1]
    assert max(after - before for before, after in itertools.pairwise(looks)) < 31


def test_one_exchange_that_takes_long_changes_nothing():
    decisions, now, costs = None, [0.0], iter([0.001] * 20 + [5.0] + [0.001] * 1000)

    def exchange(row):
        now[0] += next(costs)
        return [row]

    decisions, looks = StepDecisions(None, exchange, lambda: now[0]), []
    for step in range(1, 1000):
        now[0] += 0.05
        before = now[0]
        decisions.after(step, warned=False, alone=False)
        looks += [before] if now[0] > before else []
    gaps = [after - before for before, after in itertools.pairwise(looks)]
    assert sorted(gaps)[-2] < 0.3


def test_steps_that_become_slow_do_not_delay_the_next_exchange_much():
    """A compiled step is a hundred times faster than the ones after it."""
    looks, _ = alone(None, lambda step: 0.01 if step < 500 else 1.0, 600)
    gaps = [after - before for before, after in itertools.pairwise(looks)]
    assert sorted(gaps)[-2] <= 3.1, "one interval is as long as was agreed before"


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_warning_of_any_rank_has_all_leave_after_the_same_step(victim):
    ranks = Ranks(7, 3)
    found = ranks.run(
        10_000, lambda rank, step: 0.01 * (rank + 1), lambda rank, step: rank == victim and step >= 500
    )
    assert found[0] == found[1] == found[2]
    assert found[0][-1].leave
    assert 500 <= len(found[0]) <= 526
    assert [step for step, one in enumerate(found[0], 1) if one.save][:3] == [7, 14, 21]
    assert ranks.exchanges < 60


@given(
    st.sampled_from([None, 5, 3.0]),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 80)), max_size=3),
    st.lists(st.floats(0.0001, 2.0), min_size=3, max_size=12),
    st.floats(0.0, 0.1),
)
def test_ranks_always_decide_alike(every, warnings, pattern, latency):
    """Whatever their clocks, the cost of exchanges and the moments of warnings: the same, and never a lone exchange."""
    ranks = Ranks(every, 3, latency)
    found = ranks.run(
        80,
        lambda rank, step: pattern[(step * (rank + 1)) % len(pattern)],
        lambda rank, step: any(rank == one and step >= since for one, since in warnings),
    )
    assert found[0] == found[1] == found[2]
    assert found[0][-1].leave <= bool(warnings)


def test_a_rank_alone_needs_no_exchange():
    decisions = StepDecisions(EverySteps(3), lambda row: pytest.fail("no other rank"))
    found = [decisions.after(step, warned=step == 5, alone=True) for step in range(1, 6)]
    assert [one.save for one in found] == [False, False, True, False, False]
    assert found[-1] == StepDecision(save=False, leave=True)
    assert not decisions.agree(warned=False, alone=True)
    assert decisions.agree(warned=True, alone=True)


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

    def decisions():
        return StepDecisions(
            EverySeconds(60, lambda: 0.0), lambda row: shared.append(row) or [row, row], lambda: 0.0
        )

    old, new = decisions(), decisions()
    now = [old.after(step, warned=False, alone=False) for step in range(1, 30)]
    assert now == [StepDecision(False, False)] * 29
    old.rejoin()
    shared.clear()
    assert old.after(30, warned=False, alone=False) == new.after(30, warned=False, alone=False)
    assert len(shared) == 2, "both take part"
