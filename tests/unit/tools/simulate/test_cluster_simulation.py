"""Simulated training on a cluster: identities, limits, and a ledger that adds up."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawn_chart import svg_of
from paceline.checkpoint.save_interval import FailureModel, expected_slowdown
from paceline.cost_model.fit_measurements import MeasuredPoint, fit_points
from paceline.errors import UsageError
from paceline.tools.report.charts.simulation_charts import cluster_chart
from paceline.tools.simulate.cluster.cluster_network import ClusterNetwork, FittedNetwork
from paceline.tools.simulate.cluster.cluster_plan import ClusterPlan
from paceline.tools.simulate.cluster.cluster_simulation import DAY, LOSSES, simulate_cluster, sweep_nodes
from paceline.tools.simulate.cluster.cluster_text import cluster_findings
from paceline.tools.simulate.cluster.compute_times import ClusterMachines
from paceline.tools.simulate.cluster.exposed_communication import STRATEGIES, exposed_seconds
from paceline.tools.simulate.cluster.live_recovery import (
    LiveRecovery,
    expected_live_slowdown,
    live_failures,
    state_risk,
)

SLOW = ClusterNetwork(link=25e6, latency=1e-4)
FAST = ClusterNetwork(link=math.inf, latency=0.0)


def plan(network=SLOW, step=1.0, nbytes=80e6, **options):
    return ClusterPlan(
        network=network, step_seconds=step, nbytes=nbytes, **{"draws": 200_000, "jobs": 8, **options}
    )


def test_flat_gradients_are_computing_and_then_the_ring():
    row = simulate_cluster(plan(strategy="flat", algorithm="ring"), 4)
    assert row.step.p50 == row.step.mean == pytest.approx(1.0 + 6e-4 + 80e6 * 1.5 / 25e6)
    assert row.comm_seconds == pytest.approx(6e-4 + 4.8)
    assert row.ledger["useful"] == pytest.approx(1 / row.step.mean)
    assert row.ledger["communication"] == pytest.approx(1 - 1 / row.step.mean)
    assert row.speedup == pytest.approx(4 / row.step.mean)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_alone_has_no_cost(strategy):
    machines = ClusterMachines(spread=0.1, jitter=0.2)
    row = simulate_cluster(plan(strategy=strategy, machines=machines), 1)
    assert row.efficiency.mean == pytest.approx(1.0, abs=1e-12)
    assert row.comm_seconds == 0.0
    assert all(abs(row.ledger[name]) < 1e-12 for name in LOSSES)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("scaling", ["weak", "strong"])
def test_an_infinitely_fast_network_costs_nothing(strategy, scaling):
    for row in sweep_nodes(plan(FAST, strategy=strategy, scaling=scaling), [1, 2, 7, 100]):
        assert row.efficiency.mean == pytest.approx(1.0, abs=1e-9)
        assert row.speedup == pytest.approx(row.nodes, rel=1e-6)


@given(
    nodes=st.integers(1, 40),
    strategy=st.sampled_from(STRATEGIES),
    scaling=st.sampled_from(["weak", "strong"]),
    link=st.sampled_from([1e7, 1e9, 1e11]),
    spread=st.sampled_from([0.0, 0.1]),
    jitter=st.sampled_from([0.0, 0.1]),
    balance=st.sampled_from(["equal", "speed"]),
    mtbf=st.sampled_from([math.inf, 30 * DAY]),
    recovery=st.sampled_from(["restart", "live"]),
    divided=st.sampled_from([0.0, 1e9]),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_the_ledger_adds_up_to_the_whole(
    nodes, strategy, scaling, link, spread, jitter, balance, mtbf, recovery, divided, seed
):
    machines = ClusterMachines(speeds=(1, 2), spread=spread, jitter=jitter, balance=balance)
    options = {} if mtbf == math.inf else {"write": 30.0, "restart": 60.0, "node_mtbf": mtbf}
    row = simulate_cluster(
        plan(
            ClusterNetwork(link=link),
            strategy=strategy,
            scaling=scaling,
            machines=machines,
            recovery=recovery,
            live=LiveRecovery(virtual_ranks=2, divided_nbytes=divided),
            seed=seed,
            **options,
        ),
        nodes,
    )
    assert sum(row.ledger.values()) == pytest.approx(1.0)
    assert row.ledger["useful"] == pytest.approx(row.efficiency.mean)
    assert 0 < row.efficiency.p5 <= row.efficiency.p50 <= row.efficiency.p95 <= 1 + 1e-9
    assert min(row.ledger[name] for name in LOSSES if name != "varying steps") > -1e-9


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_faster_link_is_never_slower(strategy):
    machines = ClusterMachines(jitter=0.1)
    means = [
        simulate_cluster(plan(ClusterNetwork(link=link), strategy=strategy, machines=machines), 16).step.mean
        for link in (1e7, 3e7, 1e8, 1e9, 1e12)
    ]
    assert means == sorted(means, reverse=True)


@pytest.mark.parametrize("buckets", [1, 2, 5, 40])
def test_exposed_time_is_that_of_a_queue_of_buckets(buckets):
    call, transfer = 0.01, 2.0
    for window in (0.0, 0.5, 1.0, 2.0, 3.0, 10.0):
        free = 0.0
        for bucket in range(1, buckets + 1):  # ready evenly, sent one after another
            free = max(free, window * bucket / buckets) + call + transfer / buckets
        found = exposed_seconds(call, transfer, buckets, np.array([window]))[0]
        assert found == pytest.approx(free - window)


def test_overlap_is_worth_at_most_backward():
    flat, bucketed = (simulate_cluster(plan(strategy=name), 8).step.mean for name in ("flat", "bucketed"))
    assert flat - 2 / 3 < bucketed < flat


def test_contention_lengthens_overlapping_work_only():
    bare, slowed = (
        {name: simulate_cluster(plan(strategy=name, **options), 8).step.mean for name in ("flat", "bucketed")}
        for options in ({}, {"computing_slows": 1.3, "calls_slow": 1.5})
    )
    assert slowed["flat"] == bare["flat"]
    assert bare["bucketed"] < slowed["bucketed"] < bare["flat"]


def test_full_sharding_sends_half_as_much_again():
    row_of = {
        name: simulate_cluster(plan(strategy=name, algorithm="ring", bucket_nbytes=1e9), 8)
        for name in STRATEGIES
    }
    assert row_of["full-shard"].comm_seconds == pytest.approx(1.5 * row_of["flat"].comm_seconds)
    assert row_of["sharded"].comm_seconds == pytest.approx(row_of["flat"].comm_seconds)


def test_exchanging_every_h_steps_costs_an_hth():
    one, ten = (simulate_cluster(plan(strategy="flat", every=every), 8) for every in (1, 10))
    assert ten.comm_seconds == pytest.approx(one.comm_seconds / 10)
    assert ten.step.mean - 1 == pytest.approx((one.step.mean - 1) / 10)


def test_strong_scaling_divides_computing_and_weak_scaling_does_not():
    weak, strong = (
        list(sweep_nodes(plan(scaling=scaling, strategy="flat"), [1, 4, 16]))
        for scaling in ("weak", "strong")
    )
    assert [row.compute_seconds for row in weak] == [1.0, 1.0, 1.0]
    assert [row.compute_seconds for row in strong] == [1.0, 1 / 4, 1 / 16]
    assert [row.comm_seconds for row in weak] == [row.comm_seconds for row in strong]
    assert weak[2].efficiency.mean > strong[2].efficiency.mean


def test_weak_scaling_of_n_times_the_step_is_strong_scaling():
    weak = simulate_cluster(plan(step=1.0, machines=ClusterMachines(jitter=0.1)), 16)
    strong = simulate_cluster(plan(step=16.0, machines=ClusterMachines(jitter=0.1), scaling="strong"), 16)
    assert weak.step == strong.step
    assert weak.ledger == strong.ledger


def test_dispatch_by_speed_uses_the_time_that_equal_shares_lose():
    speeds = (1, 1, 2, 4)
    equal = simulate_cluster(plan(FAST, machines=ClusterMachines(speeds=speeds)), 4)
    dealt = simulate_cluster(plan(FAST, machines=ClusterMachines(speeds=speeds, balance="speed")), 4)
    assert equal.step.mean == pytest.approx(4.0)
    assert equal.ledger["uneven machines"] == pytest.approx(0.5)
    assert dealt.step.mean == pytest.approx(2.0)
    assert dealt.efficiency.mean == pytest.approx(1.0, abs=1e-9)
    assert equal.speedup == pytest.approx(1.0)
    assert dealt.speedup == pytest.approx(2.0)  # 8 of the slowest, whose fastest has 4


def test_failures_cost_the_time_of_the_exact_formula():
    options = {"node_mtbf": 100 * DAY, "write": 60.0, "restart": 300.0}
    row = simulate_cluster(plan(FAST, jobs=256, **options), 500)
    risk = FailureModel(100 * DAY / 500, 60.0, 300.0)
    assert row.mtbf_seconds == risk.mtbf
    assert 1 / row.efficiency.mean == pytest.approx(expected_slowdown(risk, row.intervals.used), rel=0.01)
    assert row.failures == pytest.approx(row.job_seconds.mean / risk.mtbf, rel=0.05)
    assert row.ledger["checkpoints"] + row.ledger["lost work"] + row.ledger["restarts"] == pytest.approx(
        1 - row.efficiency.mean, abs=1e-6
    )


LIVE = [
    {"whole_nbytes": 1e9, "virtual_ranks": 4},
    {"divided_nbytes": 1e9, "node_share": 0.5},
    {"whole_nbytes": 1e9, "replacement": 0.0},
]


@pytest.mark.parametrize("options", LIVE)
def test_live_recovery_costs_the_time_of_both_formulas(options):
    network, live = ClusterNetwork(link=1e9, latency=0.0, per_node=2, inside=1e10), LiveRecovery(**options)
    cluster = plan(
        network, jobs=256, strategy="flat", node_mtbf=20 * DAY, write=60.0, restart=300.0, live=live
    )
    restart, row = sweep_nodes(cluster, [500], ["restart", "live"])
    assert (restart.recovery, row.recovery) == ("restart", "live")
    assert restart == simulate_cluster(cluster, 500)
    failures = live_failures(live, network, 500, 20 * DAY, 300.0)
    computing = 1.0 / row.step.mean
    slowdown = expected_live_slowdown(failures, computing, row.step.mean)
    slowdown *= expected_slowdown(state_risk(failures, 60.0, 300.0), row.intervals.used)
    assert computing / row.efficiency.mean == pytest.approx(slowdown, rel=0.004)
    assert row.failures == pytest.approx(row.job_seconds.mean / row.mtbf_seconds, rel=0.05)
    assert row.rollback_seconds == (None if failures.state_mtbf == math.inf else failures.state_mtbf)
    assert row.efficiency.mean > restart.efficiency.mean
    assert sum(row.failure_cost.values()) < sum(restart.failure_cost.values())
    assert (row.ledger["missing ranks"] < 1e-12) == ("replacement" in options)
    assert (row.ledger["restarts"] > 0.01) == ("divided_nbytes" in options)


def test_live_recovery_of_one_rank_is_a_restart():
    cluster = plan(FAST, node_mtbf=DAY, write=10.0, restart=60.0)
    restart, live = sweep_nodes(cluster, [1], ["restart", "live"])
    assert live.efficiency == restart.efficiency
    assert live.ledger == restart.ledger
    assert live.failure_cost == restart.failure_cost
    assert live.intervals == restart.intervals


def test_live_recovery_repeats_a_round_of_local_steps():
    costs = [
        simulate_cluster(
            plan(FAST, node_mtbf=10 * DAY, write=1.0, every=every, strategy="flat", recovery="live"), 10
        ).failure_cost["repeated step"]
        for every in (1, 100)
    ]
    assert costs == pytest.approx([0.5, 50.0], rel=0.01)


def test_checkpoints_that_are_never_needed_are_written_once_a_day():
    options = {"node_mtbf": 10 * DAY, "recovery": "live"}
    row = simulate_cluster(plan(FAST, write=60.0, **options), 100)
    assert (row.intervals.used, row.intervals.daly, row.rollback_seconds) == (DAY, None, None)
    assert row.ledger["checkpoints"] == pytest.approx(60 / DAY, rel=0.2)
    assert simulate_cluster(plan(FAST, write=60.0, interval=900.0, **options), 100).intervals.used == 900.0


def test_live_jobs_that_never_end_are_reported():
    row = simulate_cluster(plan(FAST, node_mtbf=3600.0, write=6.0, restart=600.0, recovery="live"), 100_000)
    assert row.stuck
    assert (row.efficiency.mean, row.job_seconds) == (0.0, None)
    assert sum(row.ledger.values()) == 1.0


def test_texts_compare_the_ways_of_recovery():
    options = {
        "node_mtbf": 100 * DAY,
        "write": 60.0,
        "restart": 300.0,
        "live": LiveRecovery(divided_nbytes=1e9),
    }
    rows = list(sweep_nodes(plan(FAST, **options), [100, 1000], ["restart", "live"]))
    comparison, *others = cluster_findings(rows)
    assert "On 1,000 nodes live recovery does" in comparison
    assert "more work in the same time than restarts: a failure costs" in comparison
    assert others[0].startswith("Recovery by restart: 1,000 nodes reach")
    assert any(text.startswith("Live recovery: 1,000 nodes reach") for text in others)
    assert any("of the failures lose state, one every" in text for text in others)
    assert not any("Live recovery" in text for text in cluster_findings(rows[1::2]))
    safe = simulate_cluster(plan(FAST, **{**options, "live": LiveRecovery(), "recovery": "live"}), 100)
    assert any("No failure loses state" in text for text in cluster_findings([safe]))
    often = plan(FAST, node_mtbf=3600.0, write=60.0, restart=600.0, live=LiveRecovery(replacement=1.0))
    text = cluster_findings(list(sweep_nodes(often, [500], ["restart", "live"])))[0]
    assert text == "On 500 nodes the job ends only with live recovery."


def test_a_chart_has_a_panel_for_each_way_of_recovery():
    options = {"node_mtbf": 20 * DAY, "write": 60.0, "restart": 900.0, "live": LiveRecovery(virtual_ranks=1)}
    rows = list(sweep_nodes(plan(FAST, **options), [10, 1000], ["restart", "live"]))
    both, one = (svg_of(cluster_chart(some, title="any")) for some in (rows, rows[1::2]))
    assert both.count("recovery by restart") == both.count("live recovery") == 2  # a panel, a line of costs
    assert "missing ranks" in both
    assert "missing ranks" in one
    assert "recovery" not in one


def test_another_interval_than_the_best_costs_more():
    options = {"node_mtbf": 100 * DAY, "write": 60.0, "restart": 300.0, "jobs": 64}
    best = simulate_cluster(plan(FAST, **options), 500)
    for factor in (0.3, 3.0):
        other = simulate_cluster(plan(FAST, interval=factor * best.intervals.used, **options), 500)
        assert other.efficiency.mean < best.efficiency.mean


def test_a_job_that_never_ends_is_reported_and_has_no_time():
    row = simulate_cluster(plan(FAST, node_mtbf=3600.0, write=600.0, restart=600.0, price=1.0), 1000)
    assert row.stuck
    assert (row.efficiency.mean, row.speedup, row.job_seconds, row.cost) == (0.0, 0.0, None, None)
    assert sum(row.ledger.values()) == 1.0
    assert "never ends" in cluster_findings([row])[0]


def test_the_cost_of_a_job_is_its_node_hours():
    row = simulate_cluster(plan(strategy="flat", work=3600.0 * 1000, price=2.5), 4)
    assert row.job_seconds.mean == pytest.approx(3600 * 1000 / 4 / row.efficiency.mean)
    assert row.cost.mean == pytest.approx(2.5 * 1000 / row.efficiency.mean)


def test_a_measured_network_brings_its_error_into_the_band():
    def points(wobble):
        return [
            MeasuredPoint(n, p, (1e-4 * 2 * (p - 1) + n / 25e6 * 2 * (p - 1) / p) * (1 + wobble * (i % 2)))
            for i, n in enumerate(4**k for k in range(6, 14))
            for p in (2, 4, 8)
        ]

    sure, unsure = (FittedNetwork(fit_points(points(wobble), "all-reduce")) for wobble in (0.0, 0.3))
    exact = simulate_cluster(plan(sure, strategy="flat", jobs=64), 4)
    vague = simulate_cluster(plan(unsure, strategy="flat", jobs=64), 4)
    described = simulate_cluster(plan(SLOW, strategy="flat", jobs=64), 4)
    assert exact.step.mean == pytest.approx(described.step.mean, rel=0.01)
    assert vague.step.p95 / vague.step.p5 > 1.1 > 1.02 > exact.step.p95 / exact.step.p5


@pytest.mark.parametrize("machines", [ClusterMachines(jitter=0.1), ClusterMachines(spread=0.05, jitter=0.1)])
def test_the_same_seed_gives_the_same_to_the_bit(machines):
    options = {"machines": machines, "node_mtbf": 10 * DAY, "write": 10.0}
    first, again, other = (simulate_cluster(plan(seed=seed, **options), 50).to_record() for seed in (1, 1, 2))
    assert first == again != other
    alone = simulate_cluster(plan(seed=1, **options), 50).to_record()
    among = list(sweep_nodes(plan(seed=1, **options), [2, 50, 60]))[1].to_record()
    assert alone == among, "a row does not depend on the others"


def test_rows_are_plain_values():
    for recovery in ("restart", "live"):
        row = simulate_cluster(plan(node_mtbf=10 * DAY, write=10.0, price=1.0, recovery=recovery), 3)
        assert json.loads(json.dumps(row.to_record(), allow_nan=False)) == row.to_record()


def test_texts_name_the_bottleneck():
    rows = list(sweep_nodes(plan(strategy="flat"), [1, 2, 4]))
    findings = cluster_findings(rows)
    assert "80 % is reached up to 1 node" in findings[0]
    assert (
        "Bottleneck of 4 nodes: communication that computing does not hide, 100 % of the losses"
        in findings[1]
    )
    assert "Beyond 1 node it gets slower" in findings[2]
    assert cluster_findings(rows[:1])[1] == "Nothing is lost on 1 node."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": 0.0}, "step_seconds"), ({"nbytes": -1.0}, "nbytes"), ({"scaling": "big"}, "unknown scaling"),
        ({"strategy": "magic"}, "unknown strategy"), ({"bucket_nbytes": 0.0}, "bucket_nbytes"),
        ({"backward": 1.0}, "backward"), ({"computing_slows": 0.9}, "computing_slows"),
        ({"calls_slow": math.nan}, "calls_slow"),
        ({"every": 0}, "every"), ({"jobs": 0}, "jobs"), ({"seed": -1}, "seed"),
        ({"node_mtbf": 0.0}, "node_mtbf"), ({"write": -1.0}, "write"), ({"restart": math.inf}, "restart"),
        ({"interval": 0.0}, "interval"), ({"work": 0.0}, "work"), ({"price": -1.0}, "price"),
        ({"every": 4, "strategy": "sharded"}, "whole parameters"), ({"algorithm": "magic"}, "magic"),
        ({"node_mtbf": 10.0}, "take no time"),
        ({"recovery": "prayer"}, "unknown recovery"),
    ],
)  # fmt: skip
def test_invalid_values_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        simulate_cluster(plan(**options), 4)


@pytest.mark.parametrize("nodes", [0, -1, 1.5, 10**7])
def test_invalid_numbers_of_nodes_are_refused(nodes):
    with pytest.raises(UsageError, match="nodes"):
        simulate_cluster(plan(), nodes)
