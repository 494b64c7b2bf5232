"""Labels that do not overlap, and units of time axes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.tools.report.charts.chart_style import space_apart, time_unit

numbers = st.lists(st.floats(-100, 100), max_size=12)


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


def test_times_have_a_unit_that_fits():
    units = [time_unit(each)[0] for each in (1, 179, 181, 3 * 3600, 4 * 86400)]
    assert units == ["s", "s", "min", "h", "days"]
