"""How often to save: losses compared with jobs that are simulated event by event, the advice, the rounding."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._core.units import parse_seconds
from paceline.checkpoint.save_cadence import save_cadence
from paceline.checkpoint.save_interval import FailureModel, daly_interval
from paceline.errors import UsageError
from paceline.tools.plan.checkpoint_interval import (
    FailureRate,
    SaveCosts,
    observed_rate,
    plan_checkpoints,
    poisson_bounds,
    round_interval,
)

HOUR = 3600.0


def certain(mtbf):
    return FailureRate(mtbf, mtbf, mtbf)


# ---------------------------------------------------------------------- compared with simulated jobs


class Job:
    """A training that saves in the background and fails at random, as `paceline.Checkpoint` and a launcher run it.

    Training computes `interval`, waits until the previous save is complete, waits `stall` for the copy, and goes on.
    The checkpoint is complete `complete` after its save began. A failure ends all of it; after `restart`, which can
    fail as well, training goes on from the newest complete checkpoint.
    """

    def __init__(self, costs, mtbf, interval, seed):
        self.costs, self.mtbf, self.interval = costs, mtbf, interval
        self.chance = random.Random(seed)
        self.now, self.fails_at = 0.0, self.chance.expovariate(1 / mtbf)
        self.restarting = 0.0
        self.done = self.saved = 0  # intervals computed, and those in the newest complete checkpoint
        self.pending = None  # (intervals, when it is complete)
        self.complete_at = {0: 0.0}  # when each checkpoint was complete first

    def run(self, intervals):
        """Return seconds, and seconds of restarts, from the first complete checkpoint to one `intervals` later."""
        begin = None
        while self.saved < intervals + 1:
            if begin is None and self.saved >= 1:
                begin = self.restarting
            self._save() if self._spend(self.interval) else self._restart()
        return self.complete_at[intervals + 1] - self.complete_at[1], self.restarting - begin

    def _save(self):
        self.done += 1
        waiting = 0.0 if self.pending is None else max(0.0, self.pending[1] - self.now)
        if not self._spend(waiting):
            return self._restart()
        self.pending = self.done, self.now + self.costs.complete
        return None if self._spend(self.costs.stall) else self._restart()

    def _spend(self, seconds):
        """Return whether so many seconds pass without a failure."""
        lives = self.now + seconds < self.fails_at
        self.now = self.now + seconds if lives else self.fails_at
        if self.pending is not None and self.pending[1] <= self.now:
            (self.saved, at), self.pending = self.pending, None
            self.complete_at.setdefault(self.saved, at)
        return lives

    def _restart(self):
        self.done, self.pending = self.saved, None
        while True:
            self.fails_at = self.now + self.chance.expovariate(1 / self.mtbf)
            seconds = min(self.costs.restart, self.fails_at - self.now)
            self.now, self.restarting = self.now + seconds, self.restarting + seconds
            if self.now < self.fails_at:
                return


CASES = {  # costs, seconds between failures, relative to these the interval
    "in the background": (SaveCosts(stall=2.0, complete=60.0, restart=120.0), 2000.0, 0.15),
    "training waits": (SaveCosts(stall=40.0, complete=40.0, restart=60.0), 1500.0, 0.2),
    "as often as it can": (SaveCosts(stall=5.0, complete=300.0, restart=30.0), 1500.0, 0.2),
    "more often than it can": (SaveCosts(stall=5.0, complete=300.0, restart=30.0), 1500.0, 0.05),
    "failures all the time": (SaveCosts(stall=5.0, complete=50.0, restart=100.0), 200.0, 0.5),
    "rare failures": (SaveCosts(stall=1.0, complete=20.0, restart=300.0), 50_000.0, 0.01),
}


@pytest.mark.parametrize("case", CASES)
def test_simulated_jobs_lose_what_is_expected(case):
    costs, mtbf, share = CASES[case]
    interval, intervals, jobs = share * mtbf, 60, 400
    expected = plan_checkpoints(costs, certain(mtbf), interval).present
    took = np.array([Job(costs, mtbf, interval, seed).run(intervals) for seed in range(jobs)])
    slowdown = took[:, 0] / (intervals * interval)
    error = slowdown.std() / math.sqrt(jobs)
    assert slowdown.mean() == pytest.approx(1 / (1 - expected.total), abs=3 * error)
    assert error < 0.01 * slowdown.mean(), "enough jobs"
    restarting = took[:, 1].sum() / took[:, 0].sum()
    assert restarting == pytest.approx(expected.restarts, rel=0.1, abs=1e-3)


def test_simulated_jobs_are_shortest_at_the_planned_interval():
    """All intervals see failures by the same random numbers."""
    costs, mtbf = SaveCosts(stall=4.0, complete=30.0, restart=60.0), 3000.0
    plan = plan_checkpoints(costs, certain(mtbf))

    def slowdown(interval):
        intervals = round(30 * mtbf / interval)
        took = [Job(costs, mtbf, interval, seed).run(intervals)[0] for seed in range(40)]
        return np.mean(took) / (intervals * interval)

    least = slowdown(plan.seconds)
    assert least < slowdown(plan.seconds / 4)
    assert least < slowdown(plan.seconds * 4)


# ---------------------------------------------------------------------- what follows from the formula

COSTS = st.builds(
    lambda stall, background, restart, step: SaveCosts(
        stall=stall, complete=stall + background, restart=restart, step=step
    ),
    st.floats(1e-3, 100.0),
    st.floats(0.0, 1000.0),
    st.floats(0.0, 2000.0),
    st.none() | st.floats(1e-3, 30.0),
)
RATES = st.tuples(st.floats(300.0, 1e7), st.floats(1.0, 20.0), st.floats(1.0, 20.0)).map(
    lambda drawn: FailureRate(drawn[0], drawn[0] / drawn[1], drawn[0] * drawn[2])
)


@given(COSTS, RATES, st.floats(1e-2, 1e6))
@settings(deadline=None)
def test_no_interval_loses_noticeably_less_than_the_best(costs, rate, other):
    plan = plan_checkpoints(costs, rate, other)
    at_best, at_other = plan.losses(plan.best), plan.present
    assert at_other.interval == other
    if other >= (costs.step or 0.0) and rate.mtbf > costs.shortest:
        assert at_best.total <= at_other.total + 2e-3 * (1 - at_other.total) + 1e-9
    for row in plan.table:
        assert min(row.saves, row.work, row.restarts) >= 0
        assert row.total <= 1 + 1e-12
        assert row.low - 1e-9 <= row.total <= row.high + 1e-9


@given(COSTS, RATES)
@settings(deadline=None)
def test_the_advice_can_be_passed_and_is_possible(costs, rate):
    plan = plan_checkpoints(costs, rate)
    assert parse_seconds(plan.every) == pytest.approx(plan.seconds)
    assert plan.seconds >= costs.shortest * (1 - 1e-12)
    assert save_cadence(plan.every) is not None
    assert plan.seconds == pytest.approx(plan.best, rel=0.126)
    if plan.steps is not None:
        assert save_cadence(plan.steps) is not None
        assert plan.steps * costs.step >= costs.shortest * (1 - 1e-12)
    low, high = plan.best_range
    assert low <= plan.best <= high
    assert plan.regret >= 0


@given(COSTS, RATES)
@settings(deadline=None)
def test_in_the_flat_range_little_more_is_lost(costs, rate):
    plan = plan_checkpoints(costs, rate)
    low, high = plan.flat
    assert low <= plan.best * (1 + 1e-9)
    assert plan.best <= high * (1 + 1e-9)
    at_best = plan.losses(plan.best)
    for end in plan.flat:
        losses = plan.losses(end)
        assert losses.saves + losses.work <= 1.1 * (at_best.saves + at_best.work) + 1e-6


def test_in_the_background_only_the_wait_decides_until_a_save_takes_longer_than_the_interval():
    mtbf = 12 * HOUR
    short = plan_checkpoints(SaveCosts(stall=0.2, complete=5.0), certain(mtbf))
    assert short.best == daly_interval(FailureModel(mtbf, 0.2))
    assert not short.is_bound
    long = plan_checkpoints(SaveCosts(stall=0.2, complete=600.0, step=2.0), certain(mtbf))
    assert long.best == 599.8
    assert long.is_bound
    assert (long.every, long.steps) == ("10min", 300)
    assert [row.interval for row in long.table] == [600.0, 1199.6, 2399.2]


def test_no_interval_is_shorter_than_a_step():
    plan = plan_checkpoints(SaveCosts(stall=1e-3, complete=1e-3, step=60.0), certain(300.0))
    assert (plan.best, plan.every, plan.steps) == (60.0, "60s", 1)


def test_a_longer_restart_or_a_later_completion_costs_time_and_moves_nothing():
    mtbf = 6 * HOUR
    plain = plan_checkpoints(SaveCosts(stall=1.0, complete=1.0), certain(mtbf))
    late = plan_checkpoints(SaveCosts(stall=1.0, complete=60.0, restart=300.0), certain(mtbf))
    assert late.best == plain.best
    assert late.recommended.saves < plain.recommended.saves  # of more time in all
    more_work = late.recommended.work - plain.recommended.work
    assert more_work == pytest.approx(59 / mtbf, rel=0.05)
    assert late.recommended.restarts == pytest.approx(300 / mtbf, rel=0.01)


def test_a_job_that_can_not_advance_loses_everything():
    plan = plan_checkpoints(SaveCosts(stall=600.0, complete=600.0, restart=HOUR), certain(5.0))
    assert plan.recommended.total == pytest.approx(1.0)
    assert plan.flat == (plan.best, plan.best)


@pytest.mark.parametrize(
    "bad",
    [
        {"stall": 0.0}, {"stall": math.inf}, {"stall": math.nan}, {"complete": 0.5}, {"complete": math.inf},
        {"restart": -1.0}, {"restart": math.nan}, {"step": 0.0}, {"step": math.inf},
    ],
)  # fmt: skip
def test_invalid_costs_are_refused(bad):
    with pytest.raises(UsageError):
        SaveCosts(**{"stall": 1.0, "complete": 2.0, **bad})


# ---------------------------------------------------------------------- rounding


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "0.012s"), (1.0, "1s"), (94.9, "90s"), (95.0, "1.6min"), (420.0, "7min"), (5600.0, "90min"),
        (7000.0, "120min"), (11_000.0, "3.1h"), (100_000.0, "28h"), (180_000.0, "2.1d"), (1e7, "120d"),
        (3e-5, "3e-05s"),
    ],
)  # fmt: skip
def test_an_interval_has_two_digits_or_one(seconds, text):
    assert round_interval(seconds)[1] == text
    assert round_interval(seconds)[0] == pytest.approx(parse_seconds(text))


@given(st.floats(1e-3, 1e8), st.floats(0.0, 1.0))
def test_rounding_stays_near_and_never_goes_below_the_shortest(seconds, share):
    found, text = round_interval(seconds, share * seconds)
    assert share * seconds * (1 - 1e-12) <= found
    assert found == pytest.approx(seconds, rel=0.126)
    assert parse_seconds(text) == pytest.approx(found)


# ---------------------------------------------------------------------- rates from few failures


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [
        (0, 0.0, 3.6889),
        (1, 0.0253, 5.5716),
        (3, 0.6187, 8.7673),
        (10, 4.7954, 18.3904),
        (100, 81.3640, 121.6268),
    ],
)
def test_bounds_are_those_of_garwoods_table(count, low, high):
    assert poisson_bounds(count) == pytest.approx((low, high), abs=1e-4)


def test_a_rate_that_was_counted_has_bounds():
    rate = observed_rate(4, 8 * HOUR)
    assert (rate.mtbf, rate.failures, rate.seconds) == (2 * HOUR, 4, 8 * HOUR)
    assert rate.low == pytest.approx(8 * HOUR / 10.2416, rel=1e-4)
    assert rate.high == pytest.approx(8 * HOUR / 1.0899, rel=1e-4)
    plan = plan_checkpoints(SaveCosts(stall=0.5, complete=2.0, restart=30.0), rate)
    assert plan.best_range[0] < plan.best < plan.best_range[1]
    assert plan.recommended.low < plan.recommended.total < plan.recommended.high
    assert 0 < plan.regret < 0.01


def test_the_bounds_hold_as_often_as_they_should():
    """Of runs with 3 failures on average, and one or more, the true rate is between the bounds in 95 % or more."""
    chance = np.random.default_rng(5)
    counts = chance.poisson(3.0, 4000)
    held = [low <= 3.0 <= high for low, high in map(poisson_bounds, range(20))]
    assert np.mean([held[count] for count in counts]) >= 0.95


@pytest.mark.parametrize(("failures", "seconds"), [(0, 100.0), (2, 0.0), (-1, 10.0)])
def test_no_failures_are_no_rate(failures, seconds):
    with pytest.raises(UsageError):
        observed_rate(failures, seconds)
