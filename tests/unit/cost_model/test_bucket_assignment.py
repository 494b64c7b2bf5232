"""Bucket sizes: the closed form against the simulation, the simulation against known cases, the grouping."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline._core.units import MIB
from paceline.cost_model.backward_simulation import (
    CommChannel,
    ReadyGradient,
    best_bucket,
    candidate_caps,
    simulate_backward,
)
from paceline.cost_model.bucket_assignment import bucket_caps, plan_buckets
from paceline.cost_model.bucket_closed_form import EqualBuckets
from paceline.cost_model.piecewise_fit import fit_line
from paceline.errors import UsageError

POSITIVE = st.floats(1e-3, 1e3)


def equal(count, nbytes, backward):
    """Return `count` gradients of one size, ready evenly over backward."""
    return [ReadyGradient(nbytes, backward * place / count) for place in range(1, count + 1)]


def line(job):
    return CommChannel(lambda nbytes: job.call_seconds + nbytes / job.bytes_per_second)


# ---------------------------------------------------------------- the closed form


@settings(max_examples=500, deadline=None)
@given(
    count=st.integers(1, 60),
    nbytes=st.integers(1, 10**6),
    rate=POSITIVE,
    call=st.floats(0.0, 1e3),
    backward=st.floats(0.0, 1e3),
)
def test_the_formula_is_the_simulation_of_equal_buckets(count, nbytes, rate, call, backward):
    job = EqualBuckets(nbytes * count, rate * nbytes, call, backward)
    found = simulate_backward(equal(count, nbytes, backward), nbytes, line(job))
    assert len(found.buckets) == count
    scale = job.wire_seconds + count * call + backward
    assert abs(found.exposed - job.overhead(count)) <= 1e-9 * scale


@settings(max_examples=500, deadline=None)
@given(comm=st.floats(1e-3, 1e2), call=st.floats(1e-2, 1e1), backward=st.floats(1e-3, 1e2))
def test_no_number_of_buckets_beats_the_best_one(comm, call, backward):
    job = EqualBuckets(1e6, 1e6 / comm, call, backward)
    best = job.best()
    most = int((comm + backward) / call + math.sqrt(backward / call)) + 3
    others = [job.overhead(count) for count in range(1, most)]
    assert best.overhead <= min(others) * (1 + 1e-12)
    assert best.overhead == job.overhead(best.count)
    assert best.nbytes == 1e6 / best.count


def test_where_the_network_is_the_bottleneck_the_best_number_is_the_root_of_backward_over_a_call():
    job = EqualBuckets(nbytes=8e9, bytes_per_second=1e9, call_seconds=0.01, backward_seconds=1.0)
    assert not job.compute_bound
    assert job.best().count == 10
    assert job.best().overhead == pytest.approx(1 / 10 + 10 * 0.01 + 8 - 1)


def test_where_computing_is_the_bottleneck_only_the_last_bucket_shows():
    job = EqualBuckets(nbytes=1e9, bytes_per_second=1e9, call_seconds=0.01, backward_seconds=2.0)
    best = job.best()
    assert job.compute_bound
    assert best.count == 100
    assert best.overhead == pytest.approx(1 / 100 + 0.01)


def test_barely_compute_bound_the_queue_still_decides():
    """The two cross at one bucket, yet the least of the queue lies beyond: ⌊(T_b − s/w)/o⌋ + 1 would be 1."""
    job = EqualBuckets(nbytes=1e9, bytes_per_second=1e9, call_seconds=0.01, backward_seconds=1.001)
    assert math.floor((1.001 - 1) / 0.01) + 1 == 1
    assert job.best().count == 10
    assert job.best().overhead < job.overhead(1) / 4


def test_balanced_the_bucket_is_the_root_of_bytes_rate_and_call():
    job = EqualBuckets(nbytes=1e9, bytes_per_second=4e9, call_seconds=1e-4, backward_seconds=0.0)
    best = job.best_balanced()
    assert best.nbytes == pytest.approx(math.sqrt(1e9 * 4e9 * 1e-4))
    assert best.count * best.nbytes == pytest.approx(1e9)
    assert best.overhead == pytest.approx(2 * math.sqrt(1e9 * 1e-4 / 4e9))
    wrong = math.sqrt(1e9 * 1e-4 / 4e9)  # often written for the bucket: seconds
    assert wrong * 4e9 == pytest.approx(best.nbytes), "it wants to be multiplied by the rate"


def test_calls_that_cost_nothing_are_made_without_end():
    job = EqualBuckets(nbytes=1e9, bytes_per_second=1e9, call_seconds=0.0, backward_seconds=0.25)
    assert job.best().count == job.best_balanced().count == math.inf
    assert job.best().overhead == job.overhead(math.inf) == 0.75


@pytest.mark.parametrize(
    "values",
    [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1), (math.nan, 1, 1, 1), (1, math.inf, 1, 1)],
)
def test_a_formula_needs_sensible_values(values):
    with pytest.raises(UsageError, match="above 0"):
        EqualBuckets(*values)


def test_less_than_one_bucket_is_refused():
    with pytest.raises(UsageError, match="0 buckets"):
        EqualBuckets(1, 1, 1, 1).overhead(0)


# ---------------------------------------------------------------- grouping


def test_torchs_default_has_a_small_first_bucket():
    sizes = [MIB // 2] * 130
    grouped = plan_buckets(range(130), sizes, [""] * 130, [MIB, 25 * MIB])
    assert [len(members) for members in grouped] == [2, 50, 50, 28]


def test_kinds_have_buckets_and_caps_of_their_own():
    grouped = plan_buckets(range(6), [4] * 6, ["a", "b"] * 3, [4, 8])
    assert grouped == [[0], [1], [2, 4], [3, 5]]


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 100), min_size=1, max_size=40), cap=st.floats(0, 300))
def test_every_gradient_is_in_one_bucket_in_order(sizes, cap):
    grouped = plan_buckets(range(len(sizes)), sizes, [0] * len(sizes), cap)
    assert [index for members in grouped for index in members] == list(range(len(sizes)))
    for members in grouped[:-1]:
        assert sum(sizes[index] for index in members) >= cap
        assert sum(sizes[index] for index in members[:-1]) < cap or len(members) == 1


# ---------------------------------------------------------------- the simulation


def test_naive_and_flat_wait_for_every_call():
    ready, channel = equal(4, 10, 1.0), CommChannel(lambda nbytes: 0.5 + nbytes / 100)
    naive, flat = (simulate_backward(ready, cap, channel, overlap=False) for cap in (0, math.inf))
    assert naive.exposed == pytest.approx(4 * 0.6)
    assert flat.exposed == pytest.approx(0.5 + 0.4)
    assert naive.computed == flat.computed == 1.0
    assert [call.launched for call in flat.calls] == [1.0]


def test_the_last_bucket_leaves_when_backward_has_ended():
    ready = [ReadyGradient(1, 0.1), ReadyGradient(1, 0.2)]
    found = simulate_backward(ready, 0, CommChannel(lambda nbytes: 0.01), backward_seconds=1.0)
    assert [call.launched for call in found.calls] == pytest.approx([0.1, 1.0])
    assert found.end == pytest.approx(1.01)


def test_a_bucket_of_two_kinds_waits_for_its_own_gradients():
    ready = [
        ReadyGradient(1, 0.1, "a"),
        ReadyGradient(1, 0.2, "b"),
        ReadyGradient(1, 0.3, "a"),
        ReadyGradient(1, 0.4, "b"),
    ]
    found = simulate_backward(ready, 2, CommChannel(lambda nbytes: 0.01))
    assert found.buckets == ((0, 2), (1, 3))
    assert [call.launched for call in found.calls] == pytest.approx([0.3, 0.4])


def test_slow_downs_lengthen_the_computing_too():
    ready, free = equal(10, 10, 1.0), CommChannel(lambda nbytes: 0.05)
    shared = CommChannel(lambda nbytes: 0.05, computing_slows=1.5, calls_slow=1.2)
    assert simulate_backward(ready, 0, free).computed == pytest.approx(1.0)
    slow = simulate_backward(ready, 0, shared)
    assert slow.computed == pytest.approx(1.0 + 9 * 0.05 * 1.2 * (1 - 1 / 1.5))  # nine calls lie beside it
    assert slow.exposed > simulate_backward(ready, 0, free).exposed


def test_lanes_hide_latency_and_not_bytes():
    ready = equal(50, 10**6, 0.0)
    lone = CommChannel(lambda nbytes: 0.01 + nbytes / 1e8, lambda nbytes: nbytes / 1e8, lanes=1)
    two = CommChannel(lone.seconds_of, lone.gap_of, lanes=2)
    many = CommChannel(lone.seconds_of, lone.gap_of, lanes=math.inf)
    assert simulate_backward(ready, 0, lone).end == pytest.approx(50 * 0.02)
    assert simulate_backward(ready, 0, two).end == pytest.approx(51 * 0.01)
    assert simulate_backward(ready, 0, many).end == pytest.approx(51 * 0.01)


def test_launching_costs_the_rank_time():
    ready = equal(10, 1, 1.0)
    found = simulate_backward(ready, 0, CommChannel(lambda nbytes: 0.0, launch_seconds=0.1))
    assert found.computed == pytest.approx(1.9)  # the last launch follows
    assert found.end == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("ready", "options"),
    [
        ([], {}),
        ([ReadyGradient(1, 0.2), ReadyGradient(1, 0.1)], {}),
        ([ReadyGradient(1, 0.2)], {"backward_seconds": 0.1}),
        ([ReadyGradient(1, -0.2)], {}),
        ([ReadyGradient(-1, 0.2)], {}),
    ],
)
def test_invalid_gradients_are_refused(ready, options):
    with pytest.raises(UsageError):
        simulate_backward(ready, 0, CommChannel(lambda nbytes: 0.0), **options)


def test_buckets_that_double_leave_a_slow_wire_no_gap():
    ready = equal(80, MIB, 1.0)
    wire = CommChannel(lambda nbytes: nbytes / (40 * MIB))  # half of what backward produces
    doubling = simulate_backward(ready, bucket_caps(25 * MIB, 80 * MIB), wire)
    assert [each.nbytes // MIB for each in doubling.calls] == [1, 2, 4, 8, 16, 25, 24]
    assert all(later.started == each.ended for each, later in itertools.pairwise(doubling.calls))
    assert doubling.end == pytest.approx(1 / 80 + 2.0)  # the first gradient, then all of them on the wire
    equal_ones = simulate_backward(ready, 25 * MIB, wire)
    assert equal_ones.end == pytest.approx(25 / 80 + 2.0)


# ---------------------------------------------------------------- the best bucket


def test_the_best_bucket_is_near_the_closed_form():
    job = EqualBuckets(nbytes=1e6, bytes_per_second=1e6, call_seconds=0.01, backward_seconds=1.0)
    ready = equal(1000, 10**3, 1.0)  # less than 1 MiB in all: no bucket need grow
    best = best_bucket(ready, line(job), caps=[1e3 * count for count in range(1, 1001)])
    assert best.cap == pytest.approx(job.best().nbytes, rel=0.01)
    assert best.backward.exposed == pytest.approx(job.best().overhead, rel=1e-6)
    assert len(best.tried) == 1000


def test_of_equal_sizes_the_largest_is_chosen():
    ready = equal(8, 10, 1.0)
    best = best_bucket(ready, CommChannel(lambda nbytes: 0.0), caps=[0, 10, 20, math.inf])
    assert best.cap == math.inf


def test_sizes_worth_trying_group_differently():
    ready = equal(64, MIB // 4, 1.0)
    caps = candidate_caps(ready)
    assert caps == sorted(caps)
    assert caps[0] == 0
    groupings = [simulate_backward(ready, cap, CommChannel(lambda nbytes: 0.0)).buckets for cap in caps]
    assert len(set(groupings)) == len(caps) > 10
    assert len(groupings[-1]) == 1
    with pytest.raises(UsageError, match="no bucket size"):
        best_bucket(ready, CommChannel(lambda nbytes: 0.0), caps=[])


# ---------------------------------------------------------------- published measurement (docs/step-time.md)


def medium_gradients():
    """Bytes of the gradients of a GPT with three matrices in each feed-forward layer, the last one first."""
    square, wide, ends = 1024 * 1024, 1024 * 4096, 10_000 * 1024
    block = [1024, *[square] * 4, 1024, *[wide] * 3]
    return [4 * numel for numel in reversed([ends, *block * 24, 1024, ends])]


def test_our_grouping_makes_the_calls_that_were_counted_on_two_t4():
    sizes = medium_gradients()
    calls = {cap: len(plan_buckets(range(len(sizes)), sizes, [0] * len(sizes), cap * MIB)) for cap in T4}
    assert calls == {cap: count // 10 for cap, (count, _) in T4.items()}


T4 = {1: (1700, 2.745), 10: (980, 4.425), 100: (150, 28.52), 1000: (20, 214.9)}
"""Bucket in MiB: all-reduce calls of ten steps, milliseconds of each."""


def test_the_worked_example_of_the_documentation():
    nbytes = float(sum(medium_gradients()))
    calls = np.array([count / 10 for count, _ in T4.values()])
    seconds = np.array([count * each / 1e4 for count, each in T4.values()])
    line = fit_line(calls, np.full(4, nbytes), seconds)
    assert line.alpha == pytest.approx(0.2035e-3, rel=1e-3)
    assert 1 / line.beta == pytest.approx(3.985e9, rel=1e-3)
    job = EqualBuckets(nbytes, 1 / line.beta, line.alpha, 0.5)
    assert job.wire_seconds == pytest.approx(0.4247, rel=1e-3)
    assert job.best_balanced().nbytes == pytest.approx(37.05e6, rel=1e-3)
    assert job.best().count == 369, "more than there are parameters: one at a time is best, as was measured"
