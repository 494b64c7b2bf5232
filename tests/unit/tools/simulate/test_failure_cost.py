"""Failures and checkpoints: formulas compared with simulation, and invariants for random draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint.save_interval import (
    FailureModel,
    daly_interval,
    expected_slowdown,
    young_interval,
)
from paceline.tools.simulate.cluster.failure_cost import best_interval, simulate_jobs

HOUR = 3600.0
RISKS = [
    FailureModel(4 * HOUR, 60.0, 300.0),
    FailureModel(24 * HOUR, 300.0, 600.0),
    FailureModel(1800.0, 20.0),
    FailureModel(1e6, 1.0, 3600.0),
]


def jobs(seconds, count=64):
    return np.full(count, float(seconds))


@pytest.mark.parametrize("risk", RISKS)
@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
def test_simulated_jobs_take_the_time_of_dalys_exact_formula(risk, factor):
    interval = factor * daly_interval(risk)
    work = 200 * interval
    found = simulate_jobs(risk, interval, jobs(work, 400), [7])
    ratios = found.seconds / found.work
    error = ratios.std() / math.sqrt(len(ratios))
    last = risk.write / work  # the formula writes one more, at the end
    assert ratios.mean() == pytest.approx(expected_slowdown(risk, interval) - last, abs=5 * error)


@pytest.mark.parametrize("risk", RISKS)
def test_the_simulated_optimum_is_dalys_within_a_few_percent(risk):
    exact = min(
        np.geomspace(daly_interval(risk) / 4, 4 * daly_interval(risk), 4001),
        key=lambda interval: expected_slowdown(risk, interval),
    )
    assert daly_interval(risk) == pytest.approx(exact, rel=0.01)
    found = best_interval(risk, 64, [3])
    assert found == pytest.approx(exact, rel=0.1)
    assert expected_slowdown(risk, found) == pytest.approx(expected_slowdown(risk, exact), rel=1e-3)


@given(
    mtbf=st.floats(100.0, 1e6),
    write=st.floats(0.1, 50.0),
    restart=st.floats(0.0, 100.0),
    factor=st.floats(0.2, 5.0),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_parts_of_the_time_add_up_and_are_never_negative(mtbf, write, restart, factor, seed):
    risk = FailureModel(mtbf, write, restart)
    interval = factor * daly_interval(risk)
    found = simulate_jobs(risk, interval, jobs(20 * interval, 8), [seed])
    if found.stuck:
        assert expected_slowdown(risk, interval) > 1e3
        return
    assert found.seconds == pytest.approx(found.work + found.writing + found.lost + found.restarting)
    assert found.writing == pytest.approx(np.full(8, 19 * write))
    assert (found.lost >= 0).all()
    assert (found.lost <= found.failures * (interval + write) * (1 + 1e-9)).all()
    assert (found.restarting <= (found.failures + 1) * restart * (1 + 1e-9)).all()
    assert ((found.failures == 0) == (found.lost == 0)).all()


def test_without_failures_only_checkpoints_cost():
    safe = FailureModel(math.inf, 10.0, 100.0)
    found = simulate_jobs(safe, 100.0, jobs(1000.0, 2), [0])
    assert found.seconds.tolist() == [1000.0 + 9 * 10.0] * 2
    assert simulate_jobs(safe, math.inf, jobs(1000.0, 2), [0]).seconds.tolist() == [1000.0, 1000.0]
    assert daly_interval(safe) == young_interval(safe) == best_interval(safe, 4, [0]) == math.inf
    assert expected_slowdown(safe, math.inf) == 1.0
    assert expected_slowdown(safe, 100.0) == 1.1


def test_without_checkpoints_all_work_is_repeated():
    risk = FailureModel(1000.0, 0.0)
    found = simulate_jobs(risk, math.inf, jobs(1000.0, 4000), [5])
    assert found.seconds.mean() == pytest.approx(1000 * math.expm1(1), rel=0.05)  # M·(e^(W/M) − 1)


def test_more_failures_cost_more_with_the_same_draws():
    took = [
        simulate_jobs(FailureModel(mtbf, 10.0, 30.0), 300.0, jobs(1e5, 200), [1]).seconds.mean()
        for mtbf in (1e5, 1e4, 2e3)
    ]
    assert took == sorted(took)


def test_a_job_that_never_completes_is_reported():
    assert simulate_jobs(FailureModel(60.0, 600.0, 600.0), 600.0, jobs(1e5), [0]).stuck
    assert not simulate_jobs(FailureModel(6e4, 60.0, 60.0), 600.0, jobs(1e5), [0]).stuck


def test_the_same_seed_gives_the_same_to_the_bit():
    risk = RISKS[0]
    first, again, other = (simulate_jobs(risk, 900.0, jobs(1e6), [seed, 2]) for seed in (1, 1, 2))
    assert (first.seconds == again.seconds).all()
    assert (first.seconds != other.seconds).any()
