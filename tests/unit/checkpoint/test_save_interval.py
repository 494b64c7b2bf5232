"""How often to save: the published figures, and the limits of the formulas.

`tests/unit/tools/simulate/test_failure_cost.py` compares them with simulated jobs.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint.save_interval import (
    FailureModel,
    daly_interval,
    expected_slowdown,
    expected_undone,
    young_interval,
)
from paceline.errors import UsageError

MINUTE, HOUR = 60.0, 3600.0


@pytest.mark.parametrize(
    ("mtbf", "minutes", "places"), [(24 * HOUR, 117, 0), (6 * HOUR, 57, 0), (15 * MINUTE, 9.1, 1)]
)
def test_the_intervals_that_daly_published(mtbf, minutes, places):
    """FGCS 22(3), 2006, captions of figures 3 to 5: dumps of 5 minutes, restarts of 10, three systems."""
    risk = FailureModel(mtbf, 5 * MINUTE, 10 * MINUTE)
    assert round(daly_interval(risk) / MINUTE, places) == minutes


@given(mtbf=st.floats(10.0, 1e7), share=st.floats(1e-6, 4.0), restart=st.floats(0.0, 3.0))
def test_dalys_interval_loses_hardly_more_than_the_best(mtbf, share, restart):
    risk = FailureModel(mtbf, share * mtbf, restart * mtbf)
    found = daly_interval(risk)
    grid = np.geomspace(found / 20, 20 * found, 2001)
    least = min(expected_slowdown(risk, interval) for interval in grid)
    assert expected_slowdown(risk, found) <= 1.002 * least


@given(mtbf=st.floats(1.0, 1e6), write=st.floats(0.01, 100.0), factor=st.floats(0.5, 2.0))
def test_the_restart_costs_time_but_does_not_move_the_best_interval(mtbf, write, factor):
    fast, slow = FailureModel(mtbf, write, 0.0), FailureModel(mtbf, write, 0.3 * mtbf)
    assert daly_interval(fast) == daly_interval(slow)
    interval = factor * daly_interval(fast)
    ratio = expected_slowdown(slow, interval) / expected_slowdown(fast, interval)
    assert ratio == pytest.approx(math.exp(0.3))


def test_undone_work_is_half_a_period_if_failures_are_rare_and_less_if_they_are_not():
    assert expected_undone(1e12, 60.0) == pytest.approx(30.0)
    assert expected_undone(60.0, 60.0) < 30.0
    assert expected_undone(1.0, 1e6) == pytest.approx(1.0)  # fails long before the period ends


def test_young_is_dalys_first_order():
    assert young_interval(FailureModel(7200.0, 16.0)) == 480.0
    for write in (1.0, 0.1, 0.01):
        risk = FailureModel(7200.0, write)
        assert abs(daly_interval(risk) / young_interval(risk) - 1) < math.sqrt(write / 7200)


def test_writing_that_takes_longer_than_nothing_fails_has_the_time_between_failures_as_interval():
    assert daly_interval(FailureModel(100.0, 300.0)) == 100.0


@pytest.mark.parametrize("bad", [(0.0, 1.0, 1.0), (1.0, -1.0, 0.0), (1.0, 0.0, -1.0), (math.nan, 1.0, 1.0)])
def test_invalid_values_are_refused(bad):
    with pytest.raises(UsageError):
        FailureModel(*bad)
