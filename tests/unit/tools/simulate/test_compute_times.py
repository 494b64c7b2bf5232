"""Different machines and varying steps: the longest of many, compared with known results."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.tools.simulate.cluster.compute_times import ClusterMachines, draw_longest, sample_steps

DRAWS = 2_000_000


def steps(machines, nodes, *, per_node=1, every=1, jobs=8, seed=0):
    return sample_steps(machines, nodes, per_node, every, jobs, DRAWS, [seed])


def test_equal_steady_machines_do_not_wait():
    found = steps(ClusterMachines(), 100, per_node=8)
    assert (found.longest == 1.0).all()
    assert (found.useful == 1.0).all()
    assert (found.slowest == 1.0).all()


@pytest.mark.parametrize(
    "machines",
    [ClusterMachines(jitter=0.3), ClusterMachines(measured=(1.0, 1.1, 2.0)), ClusterMachines(spread=0.2)],
)
@pytest.mark.parametrize("every", [1, 4])
def test_one_rank_alone_loses_nothing_at_all(machines, every):
    found = steps(machines, 1, every=every)
    assert found.longest.mean(axis=1) == pytest.approx(found.useful, rel=1e-12)


@pytest.mark.parametrize(
    "machines", [ClusterMachines(jitter=0.1), ClusterMachines(measured=(1.0, 1.0, 1.1, 1.3, 0.9, 1.05))]
)
@pytest.mark.parametrize("ranks", [100, 1000])
def test_the_longest_drawn_at_once_is_the_longest_of_all_drawn(machines, ranks):
    rng = np.random.default_rng(1)
    at_once = draw_longest(machines, ranks, 4000, rng)
    if machines.measured:
        scaled = np.array(machines.measured) / np.mean(machines.measured)
        each = scaled[rng.integers(0, len(scaled), (4000, ranks))]
    else:
        sigma = math.sqrt(math.log1p(machines.jitter**2))
        each = np.exp(rng.normal(-(sigma**2) / 2, sigma, (4000, ranks)))
    slow = each.max(axis=1)
    error = math.hypot(at_once.std(), slow.std()) / math.sqrt(4000)
    assert at_once.mean() == pytest.approx(slow.mean(), abs=5 * error + 1e-12)
    for share in (10, 50, 90):
        assert np.percentile(at_once, share) == pytest.approx(np.percentile(slow, share), rel=0.01)


def test_the_longest_of_a_million_is_where_extreme_value_theory_has_it():
    jitter, ranks = 0.05, 1_000_000
    sigma = math.sqrt(math.log1p(jitter**2))
    found = np.log(draw_longest(ClusterMachines(jitter=jitter), ranks, 20_000, np.random.default_rng(0)))
    root = math.sqrt(2 * math.log(ranks))
    centre = root - (math.log(math.log(ranks)) + math.log(4 * math.pi)) / (2 * root)
    about = sigma * (centre + 0.5772 / root) - sigma**2 / 2
    assert found.mean() == pytest.approx(about, rel=0.01)


@given(nodes=st.integers(2, 300), jitter=st.floats(0.01, 0.5), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_waiting_is_for_the_longest_and_so_at_least_the_mean(nodes, jitter, seed):
    found = steps(ClusterMachines(jitter=jitter), nodes, seed=seed)
    assert found.longest.mean() > 1.0
    assert (found.useful == 1.0).all()


def test_more_ranks_wait_longer():
    means = [
        steps(ClusterMachines(jitter=0.1), nodes).longest.mean() for nodes in (1, 2, 4, 16, 64, 256, 4096)
    ]
    assert means == sorted(means)


def test_ranks_that_synchronise_less_often_wait_less():
    means = [steps(ClusterMachines(jitter=0.3), 16, every=every).longest.mean() for every in (1, 4, 16, 64)]
    assert means == sorted(means, reverse=True)
    assert means[-1] - 1 == pytest.approx((means[0] - 1) / 8, rel=0.5)  # about 1/√H


def test_speeds_and_shares_by_them():
    equal = steps(ClusterMachines(speeds=(1, 1, 2, 4)), 4)
    assert equal.slowest.tolist() == [4.0] * 8
    assert equal.useful == pytest.approx(np.full(8, 1 / np.mean([0.25, 0.25, 0.5, 1])))
    by_speed = steps(ClusterMachines(speeds=(1, 1, 2, 4), balance="speed"), 4)
    assert by_speed.slowest == pytest.approx(equal.useful)
    assert by_speed.longest == pytest.approx(np.full((8, 1), 2.0))


def test_speeds_are_repeated_to_as_many_nodes_as_there_are():
    assert steps(ClusterMachines(speeds=(1, 2)), 5).useful == pytest.approx(
        np.full(8, 1 / np.mean([0.5, 1, 0.5, 1, 0.5]))
    )


def test_a_spread_belongs_to_the_node_and_differs_from_job_to_job():
    found = steps(ClusterMachines(spread=0.1), 50, per_node=4)
    assert (found.longest == found.slowest[:, None]).all()
    assert len(set(found.slowest.tolist())) == 8
    assert (found.useful < found.slowest).all()
    assert found.useful.mean() == pytest.approx(1 / 1.01, rel=0.02)  # the harmonic mean of it


def test_measured_steps_count_by_their_ratios_only():
    one, other = (steps(ClusterMachines(measured=times), 10) for times in ((1.0, 2.0, 3.0), (0.5, 1.0, 1.5)))
    assert one.longest == pytest.approx(other.longest)
    assert one.longest.max() <= 1.5 * 1.2


@pytest.mark.parametrize(
    "machines",
    [
        ClusterMachines(jitter=0.1),
        ClusterMachines(spread=0.1, jitter=0.1),
        ClusterMachines(measured=tuple(np.linspace(1, 2, 9999))),
    ],
)
@pytest.mark.parametrize("nodes", [3, 500])
def test_the_same_seed_gives_the_same_to_the_bit(machines, nodes):
    first, again, other = (steps(machines, nodes, seed=seed) for seed in (5, 5, 6))
    assert (first.longest == again.longest).all()
    assert (first.useful == again.useful).all()
    assert (first.longest != other.longest).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speeds": ()}, "speeds"), ({"speeds": (1.0, 0.0)}, "speeds"), ({"spread": -0.1}, "spread"),
        ({"jitter": 9.0}, "jitter"), ({"jitter": math.nan}, "jitter"), ({"measured": (1.0, 0.0)}, "measured"),
        ({"measured": (1.0, 2.0), "jitter": 0.1}, "omit jitter"), ({"balance": "fair"}, "unknown balance"),
    ],
)  # fmt: skip
def test_invalid_values_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        ClusterMachines(**options)
