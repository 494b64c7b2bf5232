"""The relative line with parameters that are not negative, over numbers that are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cost_model.piecewise_fit import fit_line


def numbers(*values):
    return np.array(values, dtype=np.float64)


@settings(deadline=None)
@given(st.floats(1e-7, 1e-1), st.floats(1e-12, 1e-6), st.integers(1, 64))
def test_planted_parameters_are_recovered(alpha, beta, messages):
    n = 2.0 ** np.arange(6, 30)
    line = fit_line(np.full_like(n, messages), n, alpha * messages + beta * n)
    assert line.loss < 1e-9
    predicted = line.alpha * messages + line.beta * n
    assert predicted == pytest.approx(alpha * messages + beta * n, rel=1e-5)


def test_noise_moves_them_within_their_standard_errors():
    drawn = np.random.default_rng(3)
    n = 4.0 ** np.arange(5, 14)
    misses = 0
    for _ in range(100):
        times = (2e-5 + 1e-9 * n) * drawn.normal(1.0, 0.05, len(n))
        line = fit_line(np.ones_like(n), n, times)
        assert line.alpha_error is not None
        assert line.beta_error is not None
        misses += abs(line.alpha - 2e-5) > 2.36 * line.alpha_error  # t(7), 95 %
        misses += abs(line.beta - 1e-9) > 2.36 * line.beta_error
    assert misses <= 24


def test_a_negative_latency_is_held_at_zero_and_has_no_error():
    n = numbers(1e3, 1e4, 1e5, 1e6)
    line = fit_line(np.ones(4), n, 1e-9 * n**1.1)
    assert line.alpha == 0.0
    assert line.alpha_error is None
    assert line.beta > 0
    assert line.beta_error is not None


def test_a_negative_slope_is_held_at_zero():
    line = fit_line(np.ones(3), numbers(1.0, 2, 3), numbers(3.0, 2.0, 1.0))
    assert line.beta == 0.0
    assert line.alpha > 0


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.floats(1e-6, 10)), min_size=2, max_size=12))
def test_no_other_line_that_is_allowed_is_better(points):
    n, t = numbers(*(2.0**k for k, _ in points)), numbers(*(seconds for _, seconds in points))
    a = np.ones_like(n)
    line = fit_line(a, n, t)
    assert min(line.alpha, line.beta) >= 0
    for alpha in (0.0, 0.5 * line.alpha, 0.99 * line.alpha, 1.01 * line.alpha, line.alpha + 1e-7):
        for beta in (0.0, 0.5 * line.beta, 0.99 * line.beta, 1.01 * line.beta, line.beta + 1e-12):
            loss = (((alpha * a + beta * n) / t - 1) ** 2).sum()
            assert loss >= line.loss * (1 - 1e-6) - 1e-9


def test_one_size_does_not_separate_latency_from_bandwidth_and_still_predicts_itself():
    line = fit_line(np.ones(3), numbers(8.0, 8, 8), numbers(2.0, 2, 2))
    assert line.alpha + 8 * line.beta == pytest.approx(2.0)


def test_two_points_give_a_line_without_errors():
    line = fit_line(np.ones(2), numbers(1.0, 3.0), numbers(3.0, 5.0))
    assert (line.alpha, line.beta) == pytest.approx((2.0, 1.0))
    assert (line.alpha_error, line.beta_error) == (None, None)


def test_a_small_time_counts_as_much_as_a_large_one():
    n = numbers(1e2, 1e3, 1e8, 2e8)
    times = 1e-5 + 1e-9 * n * 1.1
    relative = fit_line(np.ones(4), n, times)
    assert relative.alpha == pytest.approx(1e-5, rel=0.01)
    in_seconds = np.polyfit(n, times * numbers(1, 1, 1.1, 1.0), 1)  # what raw seconds would make of it
    assert abs(in_seconds[1] / 1e-5 - 1) > 10
