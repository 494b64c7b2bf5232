"""Ranges of sizes: found where there are some, not where there are none, and continuous."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cost_model.piecewise_fit import (
    FitSamples,
    choose_segment_count,
    fit_segments,
    piecewise_seconds,
)


def samples(sizes, seconds):
    n = np.array(sizes, dtype=np.float64)
    return FitSamples(n, np.ones_like(n), np.ones_like(n), np.array(seconds, dtype=np.float64))


def two_lines(n):
    """A latency-bound protocol that gives way to a bandwidth-bound one at 64 KiB."""
    return 1e-5 + 4e-10 * n if n <= 2**16 else 3e-5 + 1e-10 * n


SIZES = [2**k for k in range(8, 28)]


@pytest.mark.thorough
def test_a_noisy_line_rarely_gets_more_segments_and_is_predicted_well():
    chosen = []
    for seed in range(20):
        noise = np.random.default_rng(seed).normal(1, 0.03, len(SIZES))
        data = samples(SIZES, [(2e-5 + 1e-9 * n) * e for n, e in zip(SIZES, noise, strict=True)])
        chosen.append(choose_segment_count(data))
        segments = fit_segments(data, chosen[-1])
        for n in SIZES:
            assert piecewise_seconds(segments, n, 1, 1) == pytest.approx(2e-5 + 1e-9 * n, rel=0.08)
    assert chosen.count(1) >= 17


def test_a_change_of_protocol_is_found():
    data = samples(SIZES, [two_lines(n) for n in SIZES])
    assert choose_segment_count(data) == 2
    first, second = fit_segments(data, 2)
    assert (first.high, second.low) == (2**16, 2**17)
    assert first.alpha == pytest.approx(1e-5)
    assert second.beta == pytest.approx(1e-10)
    assert first.points + second.points == len(SIZES)


def test_three_protocols_are_found():
    times = [two_lines(n) if n <= 2**22 else 3.5 * two_lines(n) for n in SIZES]
    data = samples(SIZES, times)
    assert choose_segment_count(data) == 3
    assert [segment.high for segment in fit_segments(data, 3)] == [2**16, 2**22, 2**27]


def test_cuts_are_the_best_of_all():
    drawn = np.random.default_rng(0)
    data = samples(SIZES[:8], drawn.uniform(1, 2, 8))
    best = sum(segment.loss for segment in fit_segments(data, 2))
    for at in range(2, 7):
        masks = data.nbytes < SIZES[at], data.nbytes >= SIZES[at]
        assert sum(fit_segments(data.where(mask), 1)[0].loss for mask in masks) >= best


def test_too_few_sizes_get_fewer_segments():
    for count in (2, 3):
        assert len(fit_segments(samples([1, 2, 4], [1.0, 2, 4]), count)) == 1
    assert choose_segment_count(samples([1, 2, 4], [1.0, 5, 1])) == 1


@settings(deadline=None)
@given(st.lists(st.floats(1e-5, 1e-1), min_size=8, max_size=12))
def test_a_fit_is_continuous_and_positive(times):
    data = samples([4**k for k in range(5, 5 + len(times))], times)
    segments = fit_segments(data, 3)
    for before, after in itertools.pairwise(segments):
        for edge in (before.high, after.low):
            around = [piecewise_seconds(segments, edge * factor, 1, 1) for factor in (1 - 1e-9, 1, 1 + 1e-9)]
            assert around == pytest.approx([around[1]] * 3, rel=1e-5)
    for size in np.geomspace(data.nbytes[0], data.nbytes[-1], 50):
        assert piecewise_seconds(segments, size, 1, 1) > 0


def test_lines_that_cross_in_a_gap_change_there():
    sizes = [2**k for k in (4, 6, 8, 10, 20, 22, 24, 26)]
    data = samples(sizes, [max(1e-5, 1e-9 * n) for n in sizes])
    segments = fit_segments(data, 2)
    for size in (2**11, 5_000, 20_000, 2**19):
        assert piecewise_seconds(segments, size, 1, 1) == pytest.approx(max(1e-5, 1e-9 * size), rel=1e-6)
