"""Comparing contestants that took turns, over numbers that are known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_harness.paired import Ratio, Times, ratio_of

times = st.lists(st.floats(0.001, 1000), min_size=1, max_size=30)


def test_a_disturbance_that_meets_both_does_not_count():
    own, other = [2.0, 20.0, 2.0, 200.0], [1.0, 10.0, 1.0, 100.0]
    assert ratio_of(own, other) == Ratio(2.0, 2.0, 2.0)


def test_one_round_that_is_far_off_widens_the_interval_and_does_not_move_the_median():
    ratio = ratio_of([2.0] * 9 + [50.0], [1.0] * 10)
    assert (ratio.median, ratio.low) == (2.0, 2.0)
    few = ratio_of([2.0, 2.0, 50.0], [1.0] * 3)
    assert few.high == 50.0


@given(times)
def test_the_median_lies_in_its_interval_and_the_same_numbers_give_the_same(own):
    ratio = ratio_of(own, [1.0] * len(own))
    assert ratio.low <= ratio.median <= ratio.high
    assert min(own) <= ratio.low
    assert ratio.high <= max(own)
    assert ratio == ratio_of(own, [1.0] * len(own))


def test_rounds_that_do_not_match_are_an_error():
    for own, other in (([1.0], [1.0, 2.0]), ([], [])):
        with pytest.raises(ValueError):
            ratio_of(own, other)


def test_times_are_medians_over_iterations_and_rounds_those_of_turns():
    times = Times.of(8, {"a": [[1.0, 9.0, 2.0], [3.0, 4.0, 5.0]], "b": [[1.0], [1.0]]})
    assert times.seconds == {"a": 3.5, "b": 1.0}
    assert times.rounds == {"a": [2.0, 4.0], "b": [1.0, 1.0]}
    assert times.ratio("a", "b").median == 3.0
    assert Times(**times.to_json()) == times


def test_the_best_of_several_is_one_more_contestant():
    times = Times.of(8, {"slow": [[3.0]], "fast": [[2.0]], "other": [[1.0]]})
    best = times.with_best("best", ["slow", "fast", "absent"])
    assert best.seconds["best"] == 2.0
    assert best.rounds["best"] == [2.0]
    assert set(best.seconds) == {*times.seconds, "best"}


def test_a_ratio_is_written_with_its_interval():
    assert str(Ratio(6.987, 6.5, 7.671)) == "6.99 (6.50 to 7.67)"
