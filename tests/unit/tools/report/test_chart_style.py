"""Smoothing, and labels that do not overlap."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.tools.report.charts.chart_style import running_mean, space_apart

numbers = st.lists(st.floats(-100, 100), max_size=12)


def test_a_mean_with_no_reach_is_the_values():
    assert running_mean([1.0, 5.0, 3.0], 0) == [1.0, 5.0, 3.0]


def test_a_slope_stays_where_it_is():
    assert running_mean([float(at) for at in range(10)], 3) == pytest.approx(list(range(10)))


def test_a_jump_is_spread_over_the_reach():
    assert running_mean([0.0, 0.0, 3.0, 0.0, 0.0], 1) == pytest.approx([0, 1, 1, 1, 0])


@given(numbers, st.integers(0, 5))
def test_a_mean_stays_within_the_values(values, reach):
    smooth = running_mean(values, reach)
    assert len(smooth) == len(values)
    assert all(min(values) - 1e-9 <= value <= max(values) + 1e-9 for value in smooth)


def test_positions_that_are_apart_stay():
    assert space_apart([3.0, 0.0, 10.0], gap=2) == [3.0, 0.0, 10.0]


def test_a_group_is_centred_on_its_mean():
    assert space_apart([1.0, 1.0, 1.0], gap=2) == [-1.0, 1.0, 3.0]


@given(numbers, st.floats(0.1, 30))
def test_neighbours_are_apart_and_in_order(positions, gap):
    spaced = space_apart(positions, gap)
    assert sum(spaced) == pytest.approx(sum(positions), abs=1e-6)
    order = sorted(range(len(positions)), key=positions.__getitem__)
    ranked = [spaced[index] for index in order]
    assert all(after - before >= gap - 1e-6 for before, after in pairwise(ranked))
