"""Downsampled curves with their extremes, and counted values, in bounded memory."""

from __future__ import annotations

import itertools
import random
from statistics import median_low

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.tools.report.hub.downsample import DownsampledCurve, QuantileSketch


def thinned(points, limit):
    curve = DownsampledCurve(limit)
    for point in points:
        curve.add(*point)
    return curve


def test_few_points_are_all_kept():
    points = [(at, at * at % 7) for at in range(900)]
    assert thinned(points, 2000).points() == points


@given(st.lists(st.floats(-1e6, 1e6), max_size=400), st.integers(6, 50))
def test_of_many_points_the_extremes_the_first_and_the_last_are_kept_in_order(values, limit):
    points = list(enumerate(values))
    curve = thinned(points, limit)
    kept = curve.points()
    assert curve.count == len(points)
    assert len(kept) <= limit
    assert kept == sorted(kept, key=lambda point: point[0])
    assert set(kept) <= set(points)
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        assert {min(values), max(values)} <= {value for _, value in kept}


def test_a_single_peak_among_a_hundred_thousand_points_is_not_lost():
    points = [(at, 1.0) for at in range(100_000)]
    points[54_321] = (54_321, 9.0)
    kept = thinned(points, 2000).points()
    assert (54_321, 9.0) in kept
    assert 500 <= len(kept) <= 2000


def test_points_are_kept_all_along_the_curve():
    kept = thinned([(at, random.Random(at).random()) for at in range(10_000)], 100).points()
    assert len(kept) > 40
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(kept)]
    assert max(gaps) < 1000


def test_a_curve_without_points():
    assert DownsampledCurve().points() == []


@given(st.lists(st.integers(0, 999), min_size=1))
def test_half_of_the_values_do_not_exceed_the_median(values):
    counted = QuantileSketch()
    for value in values:
        counted.add(value / 100)
    assert counted.median == pytest.approx(median_low(values) / 100)
    assert counted.largest == max(values) / 100


def test_values_are_distinguished_by_three_digits_and_the_largest_exactly():
    counted = QuantileSketch()
    for value in (1.00049, 1.0004, 123.456):
        counted.add(value)
    assert (counted.median, counted.largest) == (1.0, 123.456)


def test_counting_all_of_another():
    one, other = QuantileSketch(), QuantileSketch()
    one.add(1.0)
    for value in (5.0, 6.0):
        other.add(value)
    one.merge(other)
    one.merge(QuantileSketch())
    assert (one.count, one.median, one.largest) == (3, 5.0, 6.0)
    assert QuantileSketch().median is None


def test_memory_does_not_grow_with_the_number_of_different_values():
    counted = QuantileSketch()
    for number in range(50_000):
        counted.add(random.Random(number).expovariate(1.0))
    assert len(counted._counts) < 5000
