"""Time of an all-reduce on a cluster's links, compared with closed forms and with a simulation of every message."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.collectives import topology
from paceline.collectives.algorithms import make_schedule
from paceline.collectives.closed_form_cost import closed_form
from paceline.collectives.simulated_cost import simulate_cost
from paceline.cost_model.bucket_closed_form import EqualBuckets
from paceline.cost_model.fit_measurements import MeasuredPoint, fit_points
from paceline.cost_model.step_simulator import Compute, Launch, Wait, simulate_step
from paceline.errors import UsageError
from paceline.tools.simulate.cluster.all_reduce_rounds import (
    ALGORITHMS,
    TWO_LEVEL_ALGORITHMS,
    all_reduce_rounds,
)
from paceline.tools.simulate.cluster.cluster_network import ClusterNetwork, FittedNetwork
from paceline.tools.simulate.cluster.exposed_communication import exposed_seconds, fastest_all_reduce

NBYTES = 1e6
PLAIN = [name for name in ALGORITHMS if name not in TWO_LEVEL_ALGORITHMS]
RANKS = [1, 2, 3, 4, 5, 7, 8, 13, 16, 31, 32]


@pytest.mark.parametrize("ranks", [*RANKS, 1000, 4096])
@pytest.mark.parametrize("algorithm", PLAIN)
def test_around_a_switch_it_is_the_closed_form(algorithm, ranks):
    found = ClusterNetwork(link=1e8, latency=1e-4).time_all_reduce(algorithm, ranks, NBYTES)
    terms = closed_form("all-reduce", algorithm, ranks)
    assert found.call == pytest.approx(1e-4 * terms.messages)
    assert found.transfer == pytest.approx(NBYTES * terms.sent / 1e8)


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("algorithm", PLAIN)
@pytest.mark.parametrize(
    "make", [topology.star, topology.ring, topology.tree], ids=lambda make: make.__name__
)
def test_closed_forms_equal_simulated_messages_for_equal_rounds_and_are_never_below(make, algorithm, ranks):
    followed = simulate_cost(
        make_schedule("all-reduce", algorithm, ranks), make(ranks, 1e8, 1e-4), NBYTES
    ).seconds
    found = (
        ClusterNetwork(topology=make.__name__, link=1e8, latency=1e-4)
        .time_all_reduce(algorithm, ranks, NBYTES)
        .seconds
    )
    assert found >= 0.9 * followed  # ranks that run ahead may get into the way of others, which rounds don't
    if make is topology.star and ranks & (ranks - 1) == 0:
        assert found == pytest.approx(followed)
    if algorithm == "ring" and make is topology.ring:
        assert found == pytest.approx(followed)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (3, 2), (4, 4), (5, 3), (8, 2), (1, 4)])
def test_two_levels_are_as_every_message_followed(nodes, per_node):
    ranks = nodes * per_node
    links = topology.two_level(ranks, per_node, 1e9, 1e8, 1e-6, latency_between=1e-5)
    followed = simulate_cost(
        make_schedule("all-reduce", "two-level", ranks, per_node=per_node), links, NBYTES
    )
    network = ClusterNetwork(link=1e8, latency=1e-5, per_node=per_node, inside=1e9, inside_latency=1e-6)
    assert network.time_all_reduce("two-level", nodes, NBYTES).seconds == pytest.approx(followed.seconds)


@pytest.mark.parametrize("algorithm", [*PLAIN, "two-level"])
@pytest.mark.parametrize(("nodes", "per_node"), [(4, 2), (6, 4), (8, 8)])
def test_total_bytes_are_those_of_the_schedule(algorithm, nodes, per_node):
    ranks = nodes * per_node
    extra = {"per_node": per_node} if algorithm == "two-level" else {}
    made = make_schedule("all-reduce", algorithm, ranks, **extra)
    sends = sum(send.width for sends in made.rounds for send in sends) / made.parts
    counted = 0.0
    for phase in all_reduce_rounds(algorithm, ranks, per_node):
        # One node stands for all.
        alike = nodes if algorithm == "two-level" and phase.src.max() < per_node else 1
        counted += alike * len(phase.src) * phase.share * phase.repeats
    assert counted == pytest.approx(sends)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_rank_sends_to_another(algorithm):
    for phase in all_reduce_rounds(algorithm, 24, 4):
        assert (phase.src != phase.dst).all()
        assert len(np.unique(phase.src * 24 + phase.dst)) == len(phase.src)
        assert max(phase.src.max(), phase.dst.max()) < 24


def test_one_node_of_one_rank_sends_nothing():
    for name in PLAIN:
        assert ClusterNetwork().time_all_reduce(name, 1, NBYTES).seconds == 0.0


def test_one_node_of_several_ranks_stays_inside():
    network = ClusterNetwork(link=1.0, latency=1e3, per_node=8, inside=1e9, inside_latency=1e-6)
    found = fastest_all_reduce(network, 1, NBYTES)
    assert found.seconds < 1.0


@given(
    algorithm=st.sampled_from(PLAIN),
    ranks=st.integers(2, 200),
    shape=st.sampled_from(["star", "ring", "tree"]),
    faster=st.floats(1.0, 100.0),
)
@settings(max_examples=60, deadline=None)
def test_a_faster_link_is_never_slower(algorithm, ranks, shape, faster):
    slow = ClusterNetwork(topology=shape, link=1e7, latency=1e-4).time_all_reduce(algorithm, ranks, NBYTES)
    fast = ClusterNetwork(topology=shape, link=1e7 * faster, latency=1e-4 / faster).time_all_reduce(
        algorithm, ranks, NBYTES
    )
    assert fast.seconds <= slow.seconds
    assert fast.seconds == pytest.approx(slow.seconds / faster)


def test_a_narrow_switch_is_shared():
    wide, narrow = ClusterNetwork(link=1e8, latency=0.0), ClusterNetwork(link=1e8, latency=0.0, switch=4e8)
    assert narrow.time_all_reduce("ring", 4, NBYTES) == wide.time_all_reduce("ring", 4, NBYTES)
    assert narrow.time_all_reduce("ring", 16, NBYTES).transfer == pytest.approx(
        4 * wide.time_all_reduce("ring", 16, NBYTES).transfer
    )


def test_the_cheapest_depends_on_size_and_ranks():
    network = ClusterNetwork(link=1e9, latency=1e-4)
    assert fastest_all_reduce(network, 256, 100.0).algorithm in ("doubling", "halving-doubling")
    assert fastest_all_reduce(network, 7, 1e9).algorithm == "ring"
    for nodes in (2, 7, 64, 100):
        for nbytes in (1e3, 1e6, 1e9):
            best = fastest_all_reduce(network, nodes, nbytes)
            assert best.seconds == min(network.time_all_reduce(name, nodes, nbytes).seconds for name in PLAIN)


def test_sharding_needs_an_algorithm_with_two_halves():
    network = ClusterNetwork(link=1e9, latency=1e-4)
    assert fastest_all_reduce(network, 64, 10.0, halved=True).algorithm == "halving-doubling"
    with pytest.raises(UsageError, match="reduce-scatter"):
        fastest_all_reduce(network, 64, 10.0, "tree", halved=True)


def test_many_nodes_prefer_halves_between_them_to_a_ring():
    network = ClusterNetwork(link=400e9, latency=14e-6, per_node=8, inside=450e9, inside_latency=3.4e-6)
    assert fastest_all_reduce(network, 8192, 1e8).algorithm == "two-level-halving"


def test_a_measured_network_reproduces_the_measurements():
    points = [
        MeasuredPoint(n, p, 1e-4 * 2 * (p - 1) + n / 25e6 * 2 * (p - 1) / p)
        for n in (4**k for k in range(6, 14))
        for p in (2, 4, 8)
    ]
    network = FittedNetwork(fit_points(points, "all-reduce"))
    assert network.fitted_algorithm == "ring"
    described = ClusterNetwork(link=25e6, latency=1e-4)
    for ranks in (2, 8, 64):
        for nbytes in (1e4, 1e6, 3e7):
            found = network.time_all_reduce("ring", ranks, nbytes)
            assert found.seconds == pytest.approx(
                described.time_all_reduce("ring", ranks, nbytes).seconds, rel=1e-3
            )
            assert found.call == pytest.approx(1e-4 * 2 * (ranks - 1), rel=1e-2)
    other = network.time_all_reduce("halving-doubling", 8, 1e6)
    assert other.seconds == pytest.approx(
        described.time_all_reduce("halving-doubling", 8, 1e6).seconds, rel=1e-3
    )
    assert network.time_all_reduce("ring", 1, 1e6).seconds == 0.0


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: ClusterNetwork(topology="mesh"), "unknown topology"),
        (lambda: ClusterNetwork(link=0.0), "link=0.0"),
        (lambda: ClusterNetwork(link=math.nan), "link=nan"),
        (lambda: ClusterNetwork(latency=-1.0), "latency=-1.0"),
        (lambda: ClusterNetwork(per_node=0), "per_node=0"),
        (lambda: ClusterNetwork(topology="ring", per_node=2), "nodes of 2 ranks in a ring"),
        (lambda: ClusterNetwork(topology="ring", switch=1e9), "has no switch"),
        (lambda: ClusterNetwork().time_all_reduce("two-level", 4, 1.0), "two-level on a star"),
        (lambda: all_reduce_rounds("bruck", 4), "unknown algorithm"),
    ],
)
def test_invalid_values_are_refused(ask, message):
    with pytest.raises(UsageError, match=message):
        ask()


SLOWS = st.floats(1, 4)


@given(st.floats(0, 1), st.floats(1e-3, 10), st.integers(1, 20), st.floats(0, 10), SLOWS, SLOWS)
def test_contention_follows_the_timeline_of_equal_buckets(call, transfer, buckets, window, slow, late):
    program = []
    for key in range(buckets):
        program += [Compute(window / buckets), Launch(key, transfer / buckets + call)]
    program += [Wait(key) for key in range(buckets)]
    expected = simulate_step(program, computing_slows=slow, calls_slow=late).end - window
    found = exposed_seconds(call, transfer, buckets, np.array(window), slow, late)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(st.floats(0, 1), st.floats(1e-3, 10), st.integers(1, 50), st.floats(0, 10))
def test_exposed_time_is_the_closed_form_of_equal_buckets(call, transfer, buckets, window):
    expected = EqualBuckets(transfer, 1.0, call, window).overhead(buckets)
    assert exposed_seconds(call, transfer, buckets, np.array(window)) == pytest.approx(expected)


def test_a_message_takes_the_link_between_nodes_or_the_one_inside():
    network = ClusterNetwork(link=1e8, latency=1e-3, per_node=4, inside=1e9, inside_latency=1e-6)
    assert network.send_seconds(2, 1e8) == 1.0 + 1e-3
    assert network.send_seconds(1, 1e8) == 0.1 + 1e-6
    assert ClusterNetwork(link=1e8, latency=0.0).send_seconds(1, 1e8) == 1.0
    points = [
        MeasuredPoint(n, p, 1e-4 * 2 * (p - 1) + n / 25e6 * 2 * (p - 1) / p)
        for n in (4**k for k in range(6, 14))
        for p in (2, 4, 8)
    ]
    measured = FittedNetwork(fit_points(points, "all-reduce"))
    assert measured.send_seconds(4, 50e6) == pytest.approx(2.0, rel=0.01)
