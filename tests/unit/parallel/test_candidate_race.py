"""Race between candidates: order, elimination and winner; with noise, with drift."""

from __future__ import annotations

import random
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.parallel.tuning.candidates import GAIN, CandidateRace


def run(race, seconds_of):
    """Run a race to its end; return the candidates in the order of their turns."""
    order = []
    while (turn := race.turn) is not None:
        race.record(seconds_of(turn, len(order)))
        order.append(turn)
    return order


def test_the_order_alternates_and_slow_candidates_are_dropped():
    order = run(CandidateRace(5, rounds=4), lambda number, _: [1.0, 0.9, 0.7, 0.8, 1.1][number])
    assert order == [0, 1, 2, 3, 4, 3, 2, 0, 0, 2, 2, 0]


def test_one_candidate_needs_no_race():
    race = CandidateRace(1)
    assert race.turn is None
    assert race.winner == 0


def test_the_default_stays_if_no_candidate_is_faster():
    race = CandidateRace(4)
    run(race, lambda number, _: [1.0, 1.2, 0.995, 1.0][number])
    assert race.winner == 0


@pytest.mark.parametrize("score", [GAIN + 1e-6, GAIN - 1e-6])
def test_a_gain_must_be_more_than_noise(score):
    race = CandidateRace(2)
    run(race, lambda number, _: score if number else 1.0)
    assert race.winner == (score < GAIN)


def test_a_machine_that_slows_down_steadily_changes_nothing():
    race = CandidateRace(3, rounds=4)
    run(race, lambda number, turn: [1.0, 0.8, 0.9][number] * 1.02**turn)
    assert race.winner == 1
    assert race.score(1) == pytest.approx(0.8, rel=0.05)


def test_one_disturbed_turn_changes_no_score():
    race = CandidateRace(2, rounds=4)
    run(race, lambda number, turn: (0.8 if number else 1.0) * (3.0 if turn == 3 else 1.0))
    assert race.score(1) == pytest.approx(0.8)
    assert race.step_seconds(1) == pytest.approx(0.8)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8), st.integers(1, 6))
def test_without_noise_the_fastest_wins_or_the_default_is_as_good(times, rounds):
    race = CandidateRace(len(times), rounds)
    order = run(race, lambda number, _: times[number])
    assert len(order) <= len(times) + 3 * max(0, rounds - 1)
    assert times[race.winner] <= min(times) / GAIN
    assert times[race.winner] <= times[0]


def test_with_noise_the_choice_is_rarely_far_from_the_best():
    noise = random.Random(7)
    losses = []
    for _ in range(200):
        times = [1.0, *(noise.uniform(0.8, 1.2) for _ in range(4))]
        race = CandidateRace(5, rounds=4)
        run(race, lambda number, _, times=times: times[number] * noise.lognormvariate(0, 0.01))
        losses.append(times[race.winner] / min(times) - 1)
    assert mean(losses) < 0.005
    assert max(losses) < 0.05
