"""Simulated costs equal the closed forms; shared links, slow hosts and segments behave as on a network."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.collectives.algorithms import ALGORITHMS, make_schedule
from paceline.collectives.closed_form_cost import CLOSED_FORMS, Terms, closed_form
from paceline.collectives.schedule import pipelined
from paceline.collectives.simulated_cost import simulate_cost
from paceline.collectives.topology import ring, star, tree, two_level
from paceline.errors import UsageError

ALPHA, BETA, GAMMA = 3e-5, 1e-9, 3e-10


@pytest.mark.sweep
@pytest.mark.parametrize(("op", "name"), sorted(CLOSED_FORMS))
def test_equals_the_closed_form(op, name):
    for ranks in range(1, 34):
        for nbytes in (0.0, 1.0, 4e3, 1e8):
            cost = simulate_cost(make_schedule(op, name, ranks), star(ranks, 1 / BETA, ALPHA), nbytes, GAMMA)
            expected = closed_form(op, name, ranks).seconds(nbytes, ALPHA, BETA, GAMMA)
            assert cost.seconds == pytest.approx(expected, rel=1e-9, abs=1e-15)


# The table of anchors (Thakur, Rabenseifner & Gropp 2005), for a power of two, written out by hand.
LG, P = 3, 8
TEXTBOOK = {
    ("broadcast", "tree"): Terms(LG, LG),
    ("broadcast", "scatter-all-gather"): Terms(LG + P - 1, 2 * (P - 1) / P),
    ("reduce", "tree"): Terms(LG, LG, LG),
    ("reduce", "rabenseifner"): Terms(2 * LG, 2 * (P - 1) / P, (P - 1) / P),
    ("reduce-scatter", "halving"): Terms(LG, (P - 1) / P, (P - 1) / P),
    ("reduce-scatter", "ring"): Terms(P - 1, (P - 1) / P, (P - 1) / P),
    ("all-gather", "doubling"): Terms(LG, (P - 1) / P),
    ("all-gather", "ring"): Terms(P - 1, (P - 1) / P),
    ("all-reduce", "doubling"): Terms(LG, LG, LG),
    ("all-reduce", "halving-doubling"): Terms(2 * LG, 2 * (P - 1) / P, (P - 1) / P),
    ("all-reduce", "ring"): Terms(2 * (P - 1), 2 * (P - 1) / P, (P - 1) / P),
    ("all-reduce", "tree"): Terms(2 * LG, 2 * LG, LG),
}


@pytest.mark.parametrize(("op", "name"), sorted(TEXTBOOK))
def test_closed_forms_equal_the_textbook(op, name):
    assert closed_form(op, name, P) == TEXTBOOK[op, name]


def test_folded_ranks_as_in_the_textbook():
    """13 ranks: q = 8, so 2⌊lg p⌋ + 2 messages and (2·7/8 + 2)·n bytes; a reduce folds, but need not unfold."""
    assert closed_form("all-reduce", "halving-doubling", 13) == Terms(8, 2 * 7 / 8 + 2, 1 + 7 / 8)
    assert closed_form("reduce", "rabenseifner", 13) == Terms(7, 2 * 7 / 8 + 1, 1 + 7 / 8)


def test_an_algorithm_without_closed_form_is_refused():
    with pytest.raises(UsageError, match="all-reduce switch has no closed form"):
        closed_form("all-reduce", "switch", 4)


FIVE_MB, ONE_MB_S = 5e6, 1e6


def seconds_over_hub(op, name, segments=1, **link):
    return simulate_cost(
        pipelined(make_schedule(op, name, 8), segments), star(8, ONE_MB_S, **link), FIVE_MB
    ).seconds


def test_broadcast_to_seven_ranks():
    assert seconds_over_hub("broadcast", "one-by-one") == pytest.approx(35)
    assert seconds_over_hub("broadcast", "tree") == pytest.approx(15)
    assert seconds_over_hub("broadcast", "scatter-all-gather") == pytest.approx(8.75)
    assert seconds_over_hub("broadcast", "chain", 20) == pytest.approx(5 + 6 * 5 / 20)


def test_sending_to_all_ranks_at_once_is_no_faster():
    """The uplink is shared: a switch all-reduce's second round alone takes as long as one after another."""
    both_rounds = seconds_over_hub("all-reduce", "switch")
    assert both_rounds == pytest.approx(2 * 35)


def test_a_rank_at_the_switch_makes_it_fast():
    assert seconds_over_hub("all-reduce", "switch", hub=0) == pytest.approx(10)


def test_a_shared_switch_limits_all_together():
    free = seconds_over_hub("all-reduce", "ring")
    assert seconds_over_hub("all-reduce", "ring", switch=8 * ONE_MB_S) == pytest.approx(free)
    assert seconds_over_hub("all-reduce", "ring", switch=2 * ONE_MB_S) == pytest.approx(4 * free)


def test_a_slow_host_slows_only_those_that_depend_on_it():
    rates = [1e6] * 7 + [1e5]
    slow = simulate_cost(make_schedule("all-reduce", "ring", 8), star(8, rates), 5e6)
    assert slow.seconds == pytest.approx(10 * 8.75)
    assert slow.busiest is not None
    assert slow.busiest.name in ("up 7", "down 7")
    tree_of_eight = simulate_cost(make_schedule("broadcast", "tree", 8), star(8, rates), 5e6)
    ends = {timed.message.dst: timed.end for timed in tree_of_eight.messages}
    assert ends[7] == pytest.approx(10 + 50)
    assert ends[5] == pytest.approx(15)


def test_bytes_of_links_add_up():
    cost = simulate_cost(make_schedule("all-reduce", "ring", 4), star(4, 1e6), 4e6)
    assert cost.nbytes == pytest.approx(4 * 6 * 1e6)
    assert cost.nbytes_of_link["up 2"] == cost.nbytes_of_link["down 0"] == pytest.approx(6e6)
    assert cost.nbytes_of_link["switch"] == pytest.approx(cost.nbytes)


def test_ended_messages_leave_their_bandwidth_to_others():
    """0→1 and 0→2 share 0's uplink; with the short one gone the long one goes at full speed."""
    cost = simulate_cost(make_schedule("gather", "tree", 8), star(8, 1e6), 8e6)
    assert cost.seconds == pytest.approx(7)
    rates = [1e6, 1e5, 1e6]
    both = simulate_cost(make_schedule("all-reduce", "switch", 3), star(3, rates), 1e6)
    (slow, fast) = sorted((timed for timed in both.messages if timed.number == 0), key=lambda t: -t.end)
    assert (slow.message.src, fast.message.src) == (1, 2)
    assert fast.end == pytest.approx(1 / 0.9)  # rank 1 takes a tenth of the link into rank 0
    assert slow.end == pytest.approx(10)


def test_a_ring_topology_suits_the_ring_algorithm():
    on_ring = simulate_cost(make_schedule("all-reduce", "ring", 8), ring(8, 1e6), 5e6)
    assert on_ring.seconds == pytest.approx(8.75)
    halving = simulate_cost(make_schedule("all-reduce", "halving-doubling", 8), ring(8, 1e6), 5e6)
    assert halving.seconds > 2 * on_ring.seconds


def test_paths_in_a_ring_are_the_shorter_ones():
    made = ring(5, 1.0)
    assert [made.links[k].name for k in made.path(1, 3)] == ["1→2", "2→3"]
    assert [made.links[k].name for k in made.path(1, 4)] == ["1→0", "0→4"]


def test_paths_in_a_tree_go_through_the_common_parent():
    made = tree(7, 1.0)
    assert [made.links[k].name for k in made.path(3, 6)] == ["3→1", "1→0", "0→2", "2→6"]
    assert [made.links[k].name for k in made.path(4, 3)] == ["4→1", "1→3"]
    assert [made.links[k].name for k in made.path(0, 5)] == ["0→2", "2→5"]


def test_two_level_sends_less_over_the_slow_links():
    made = two_level(8, 4, 1e9, 1e8)
    flat = simulate_cost(make_schedule("all-reduce", "ring", 8), made, 1e8).seconds
    levels = simulate_cost(make_schedule("all-reduce", "two-level", 8, per_node=4), made, 1e8)
    assert levels.seconds < 0.8 * flat
    assert levels.nbytes_of_link["node 0 up"] == pytest.approx(1e8)


def test_latency_counts_once_per_message():
    assert two_level(4, 2, 1e9, 1e9, 1e-6, latency_between=1e-4).latency(0, 3) == pytest.approx(1.01e-4)
    assert star(4, 1e9, 1e-4).latency(0, 3) == pytest.approx(1e-4)


@given(
    algorithm=st.sampled_from([(op, name) for op in ALGORITHMS for name in ALGORITHMS[op]]),
    rates=st.lists(st.floats(1e5, 1e9), min_size=2, max_size=9),
    nbytes=st.floats(1, 1e9),
    segments=st.integers(1, 4),
)
def test_no_link_carries_more_than_its_bandwidth(algorithm, rates, nbytes, segments):
    made = star(len(rates), rates, 1e-5)
    cost = simulate_cost(pipelined(make_schedule(*algorithm, len(rates)), segments), made, nbytes)
    assert cost.busiest is not None
    assert cost.seconds * (1 + 1e-9) >= cost.nbytes_of_link[cost.busiest.name] / cost.busiest.bandwidth
    assert cost.seconds >= max(timed.end for timed in cost.messages) * (1 - 1e-12)
    for timed in cost.messages:
        least = min(made.links[k].bandwidth for k in made.path(timed.message.src, timed.message.dst))
        assert timed.end - timed.start >= (1e-5 + timed.nbytes / least) * (1 - 1e-9)


def test_nothing_to_send_costs_nothing():
    alone = simulate_cost(make_schedule("all-reduce", "ring", 1), star(1, 1e6), 5e6)
    assert (alone.seconds, alone.busiest, alone.messages) == (0.0, None, ())


def test_unlimited_links_cost_their_latency_only():
    cost = simulate_cost(make_schedule("broadcast", "tree", 8), star(8, math.inf, 1e-3), 5e6)
    assert cost.seconds == pytest.approx(3e-3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: simulate_cost(make_schedule("broadcast", "tree", 8), star(4, 1e6), 1),
            "8 ranks on a star of 4",
        ),
        (lambda: simulate_cost(make_schedule("broadcast", "tree", 4), star(4, 1e6), -1), "nbytes=-1"),
        (
            lambda: simulate_cost(make_schedule("broadcast", "tree", 4), star(4, 1e6), math.nan),
            "not a valid size",
        ),
        (lambda: star(0, 1e6), "ranks=0"),
        (lambda: star(3, [1e6, 1e6]), "2 bandwidths for 3 ranks"),
        (lambda: star(2, 0.0), "bandwidth 0.0"),
        (lambda: star(2, 1.0, hub=2), "hub=2: valid are ranks 0 to 1"),
        (lambda: star(2, 1.0, -1.0), "latency"),
        (lambda: tree(4, 1.0, children=0), "children=0"),
        (lambda: two_level(4, 0, 1.0, 1.0), "per_node=0"),
    ],
)
def test_wrong_input_is_named(call, message):
    with pytest.raises(UsageError, match=message):
        call()
