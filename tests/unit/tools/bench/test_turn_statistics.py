"""Statistics of interleaved runs, over known numbers."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench_harness.turns import InterleavedTimes, Ratio, ratio_of
from paceline.tools.bench.step.comm_traffic import covered_seconds
from paceline.tools.bench.turn_statistics import (
    RoundTimes,
    median_ratio,
    round_times,
    step_breakdown,
    turn_order,
)

values = st.lists(st.floats(0.001, 1000), min_size=1, max_size=30)


def a_round(forward=1.0, backward=2.0, optimizer=0.5, waited=0.0):
    return RoundTimes(forward, backward, optimizer, waited, forward + backward + optimizer)


def test_the_slowest_rank_is_the_time_of_a_step():
    fast, slow = (1.0, 1.0, 1.0, 0.0), (0.5, 3.0, 0.5, 0.25)
    assert round_times([[fast, slow]]) == RoundTimes(0.5, 3.0, 0.5, 0.25, 4.0)
    assert round_times([[slow, fast]]) == round_times([[fast, slow]])


def test_waiting_is_part_of_the_optimizer_and_not_added_to_the_step():
    assert round_times([[(1.0, 1.0, 1.0, 0.9)]]).step == 3.0


def test_a_turn_is_the_median_of_its_steps():
    steps = [[(float(at), 10.0 * at, 0.0, 0.0)] for at in (1, 2, 300)]
    assert round_times(steps) == RoundTimes(2.0, 20.0, 0.0, 0.0, 22.0)


def test_exposed_is_the_excess_over_computing_alone():
    bare = [a_round()] * 3
    parts = step_breakdown([a_round(backward=2.8, optimizer=0.7, waited=0.2)] * 3, bare)
    assert vars(parts) == pytest.approx({"forward": 1.0, "backward": 2.0, "exposed": 1.0, "optimizer": 0.5})


def test_waiting_in_forward_is_exposed_too():
    parts = step_breakdown([a_round(forward=1.5)], [a_round()])
    assert (parts.forward, parts.exposed) == pytest.approx((1.0, 0.5))


def test_without_synchronisation_nothing_is_exposed():
    bare = [a_round(), a_round(forward=3.0), a_round(backward=7.0)]
    assert step_breakdown(bare, bare).exposed == 0.0


def test_a_strategy_that_computes_faster_exposes_nothing():
    parts = step_breakdown([a_round(backward=1.5)], [a_round()])
    assert (parts.backward, parts.exposed) == pytest.approx((1.5, 0.0))


times = st.floats(0.001, 100)
rounds = st.builds(
    lambda f, b, o, share: RoundTimes(f, b, o, o * share, f + b + o), times, times, times, st.floats(0, 1)
)


@given(st.lists(st.tuples(rounds, rounds), min_size=1, max_size=9))
def test_parts_add_up_to_the_step_and_none_is_negative(pairs):
    own, bare = zip(*pairs, strict=True)
    parts = step_breakdown(own, bare)
    steps = sorted(mine.step for mine in own)
    middle = (steps[(len(steps) - 1) // 2] + steps[len(steps) // 2]) / 2
    assert sum(vars(parts).values()) == pytest.approx(middle)
    assert min(vars(parts).values()) >= -1e-12


def test_a_ratio_is_taken_within_rounds():
    slow_machine, fast_machine = a_round(backward=20.0), a_round()
    own = [slow_machine, slow_machine, fast_machine]
    assert median_ratio(own, own) == 1.0
    halves = [RoundTimes(0, 0, 0, 0, each.step / 2) for each in own]
    assert median_ratio(halves, own) == pytest.approx(0.5)


def test_rounds_that_do_not_match_are_an_error():
    with pytest.raises(ValueError):
        median_ratio([a_round()], [a_round()] * 2)
    for own, other in (([1.0], [1.0, 2.0]), ([], [])):
        with pytest.raises(ValueError):
            ratio_of(own, other)


@given(st.integers(1, 12), st.integers(0, 50))
def test_every_run_has_one_turn_in_a_round(count, turn):
    assert sorted(turn_order(count, turn)) == list(range(count))


@given(st.integers(2, 10), st.integers(1, 8))
def test_any_two_runs_precede_each_other_equally_often(count, pairs):
    orders = [turn_order(count, turn) for turn in range(2 * pairs)]
    for first, second in combinations(range(count), 2):
        assert sum(order.index(first) < order.index(second) for order in orders) == pairs


@pytest.mark.parametrize("count", [2, 3, 8])
def test_every_run_begins_a_round_sooner_or_later(count):
    assert {turn_order(count, turn)[0] for turn in range(2 * count)} == set(range(count))


def test_a_disturbance_of_both_does_not_count():
    own, other = [2.0, 20.0, 2.0, 200.0], [1.0, 10.0, 1.0, 100.0]
    assert ratio_of(own, other) == Ratio(2.0, 2.0, 2.0)


def test_an_outlier_widens_the_interval_and_does_not_move_the_median():
    ratio = ratio_of([2.0] * 9 + [50.0], [1.0] * 10)
    assert (ratio.median, ratio.low) == (2.0, 2.0)
    few = ratio_of([2.0, 2.0, 50.0], [1.0] * 3)
    assert few.high == 50.0


@given(values)
def test_the_median_lies_in_its_interval_which_is_deterministic(own):
    ratio = ratio_of(own, [1.0] * len(own))
    assert ratio.low <= ratio.median <= ratio.high
    assert min(own) <= ratio.low
    assert ratio.high <= max(own)
    assert ratio == ratio_of(own, [1.0] * len(own))


def test_times_are_medians_over_iterations_and_rounds_those_of_turns():
    times = InterleavedTimes.of(8, {"a": [[1.0, 9.0, 2.0], [3.0, 4.0, 5.0]], "b": [[1.0], [1.0]]})
    assert times.seconds == {"a": 3.5, "b": 1.0}
    assert times.rounds == {"a": [2.0, 4.0], "b": [1.0, 1.0]}
    assert times.ratio("a", "b").median == 3.0
    assert InterleavedTimes(**times.to_json()) == times


def test_the_best_of_several_is_added():
    times = InterleavedTimes.of(8, {"slow": [[3.0]], "fast": [[2.0]], "other": [[1.0]]})
    best = times.with_best("best", ["slow", "fast", "absent"])
    assert best.seconds["best"] == 2.0
    assert best.rounds["best"] == [2.0]
    assert set(best.seconds) == {*times.seconds, "best"}


def test_a_ratio_is_written_with_its_interval():
    assert str(Ratio(6.987, 6.5, 7.671)) == "6.99 (6.50 to 7.67)"


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0.0),
        ([(0, 2), (5, 6)], 3.0),
        ([(0, 4), (1, 2)], 4.0),
        ([(1, 3), (0, 2), (3, 4)], 4.0),
    ],
)
def test_overlapping_communication_counts_once(spans, seconds):
    assert covered_seconds(spans) == seconds
