"""The statistics of turns, over numbers that are known."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.tools.bench.step.comm_traffic import covered_seconds
from paceline.tools.bench.turn_order import Round, ratio, round_of, split, turn_order


def a_round(forward=1.0, backward=2.0, optimizer=0.5, waited=0.0):
    return Round(forward, backward, optimizer, waited, forward + backward + optimizer)


def test_the_slowest_rank_stands_for_a_step():
    fast, slow = (1.0, 1.0, 1.0, 0.0), (0.5, 3.0, 0.5, 0.25)
    assert round_of([[fast, slow]]) == Round(0.5, 3.0, 0.5, 0.25, 4.0)
    assert round_of([[slow, fast]]) == round_of([[fast, slow]])


def test_waiting_is_part_of_the_optimizer_and_not_added_to_the_step():
    assert round_of([[(1.0, 1.0, 1.0, 0.9)]]).step == 3.0


def test_a_turn_is_the_median_of_its_steps():
    steps = [[(float(at), 10.0 * at, 0.0, 0.0)] for at in (1, 2, 300)]
    assert round_of(steps) == Round(2.0, 20.0, 0.0, 0.0, 22.0)


def test_exposed_is_what_goes_beyond_computing_alone():
    bare = [a_round()] * 3
    parts = split([a_round(backward=2.8, optimizer=0.7, waited=0.2)] * 3, bare)
    assert vars(parts) == pytest.approx({"forward": 1.0, "backward": 2.0, "exposed": 1.0, "optimizer": 0.5})


def test_waiting_in_forward_is_exposed_too():
    parts = split([a_round(forward=1.5)], [a_round()])
    assert (parts.forward, parts.exposed) == pytest.approx((1.0, 0.5))


def test_without_synchronisation_nothing_is_exposed():
    bare = [a_round(), a_round(forward=3.0), a_round(backward=7.0)]
    assert split(bare, bare).exposed == 0.0


def test_a_contestant_that_computes_faster_exposes_nothing():
    parts = split([a_round(backward=1.5)], [a_round()])
    assert (parts.backward, parts.exposed) == pytest.approx((1.5, 0.0))


times = st.floats(0.001, 100)
rounds = st.builds(
    lambda f, b, o, share: Round(f, b, o, o * share, f + b + o), times, times, times, st.floats(0, 1)
)


@given(st.lists(st.tuples(rounds, rounds), min_size=1, max_size=9))
def test_parts_add_up_to_the_step_and_none_is_negative(pairs):
    own, bare = zip(*pairs, strict=True)
    parts = split(own, bare)
    steps = sorted(mine.step for mine in own)
    middle = (steps[(len(steps) - 1) // 2] + steps[len(steps) // 2]) / 2
    assert sum(vars(parts).values()) == pytest.approx(middle)
    assert min(vars(parts).values()) >= -1e-12


def test_a_ratio_is_taken_within_rounds():
    slow_machine, fast_machine = a_round(backward=20.0), a_round()
    own = [slow_machine, slow_machine, fast_machine]
    assert ratio(own, own) == 1.0
    halves = [Round(0, 0, 0, 0, each.step / 2) for each in own]
    assert ratio(halves, own) == pytest.approx(0.5)


def test_rounds_that_do_not_match_are_an_error():
    with pytest.raises(ValueError):
        ratio([a_round()], [a_round()] * 2)


@given(st.integers(1, 12), st.integers(0, 50))
def test_everybody_has_one_turn_in_a_round(contestants, turn):
    assert sorted(turn_order(contestants, turn)) == list(range(contestants))


@given(st.integers(2, 10), st.integers(1, 8))
def test_any_two_go_first_equally_often(contestants, pairs):
    orders = [turn_order(contestants, turn) for turn in range(2 * pairs)]
    for first, second in combinations(range(contestants), 2):
        assert sum(order.index(first) < order.index(second) for order in orders) == pairs


@pytest.mark.parametrize("contestants", [2, 3, 8])
def test_everybody_begins_a_round_sooner_or_later(contestants):
    assert {turn_order(contestants, turn)[0] for turn in range(2 * contestants)} == set(range(contestants))


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0.0),
        ([(0, 2), (5, 6)], 3.0),
        ([(0, 4), (1, 2)], 4.0),
        ([(1, 3), (0, 2), (3, 4)], 4.0),
    ],
)
def test_time_under_way_counts_overlaps_once(spans, seconds):
    assert covered_seconds(spans) == seconds
