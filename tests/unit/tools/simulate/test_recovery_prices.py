"""Live recovery: formulas compared with simulation and with failures of single ranks, one after another."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint.save_interval import FailureModel, expected_slowdown
from paceline.errors import UsageError
from paceline.tools.simulate.cluster.cluster_network import ClusterNetwork
from paceline.tools.simulate.cluster.failure_cost import FAILURE_PARTS
from paceline.tools.simulate.cluster.live_jobs import _Drawn, _job, simulate_live_jobs
from paceline.tools.simulate.cluster.live_recovery import (
    FailureKind,
    LiveFailures,
    LiveRecovery,
    expected_live_slowdown,
    live_cost,
    live_failures,
    state_risk,
)

DAY = 86400.0


def network(per_node=1):
    return ClusterNetwork(link=1e10, latency=0.0, per_node=per_node, inside=1e11)


def failures(nodes=100, per_node=1, mtbf=30 * DAY, restart=300.0, **options):
    return live_failures(LiveRecovery(**options), network(per_node), nodes, mtbf, restart)


RUNS = [
    failures(1000, virtual_ranks=2, whole_nbytes=1e10),
    failures(1000, 8, replacement=3000.0, whole_nbytes=1e10),
    failures(64, 4, 2 * DAY, 600.0, virtual_ranks=4, whole_nbytes=1e10, divided_nbytes=1e12),
    failures(2, 1, 3000.0, 100.0, virtual_ranks=1),
    failures(300, 1, 10 * DAY, 0.0, whole_nbytes=1e11),
    failures(50, 2, 2 * DAY, 20_000.0, node_share=0.0, virtual_ranks=8),
    failures(400, 8, 2 * DAY, 900.0, node_share=1.0),
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("step", [0.5, 20.0])
def test_simulated_jobs_take_the_time_of_the_formula(run, step):
    computing = 0.7
    work = np.full(64, 400 / run.live_rate)
    found = simulate_live_jobs(run, np.full(64, computing), np.full(64, step), work, [7])
    ratios = found.seconds / found.work
    error = ratios.std() / math.sqrt(len(ratios))
    began = 2e-3 * (ratios.mean() - 1)  # jobs begin with all ranks
    expected = expected_live_slowdown(run, computing, step)
    assert ratios.mean() == pytest.approx(expected, abs=5 * error + began + 1e-9)
    assert found.failures.mean() == pytest.approx(found.seconds.mean() * run.live_rate, rel=0.03)


def one_after_another(run, drawn, computing, step, work):
    """Follow a job in time, from one event to the next."""
    events = []
    for at, kind in zip(drawn.at.tolist(), (run.kinds[index] for index in drawn.kind), strict=True):
        later = kind.missing > 0
        events += [(at, "fails", kind.ranks * later), (at + kind.pause, "goes on", 0)]
        if later:
            joined = at + kind.missing
            events += [(joined, "joins", kind.ranks), (joined + kind.join, "goes on", 0)]
    now = done = since = paused = 0.0
    causes = missing = 0
    for at, event, ranks in sorted(events, key=lambda each: each[0]):
        speed = float(run.speed(np.array([missing]), computing)[0])
        if causes:
            paused += at - now
        elif done + (at - now) * speed >= work:
            return now + (work - done) / speed, paused
        else:
            done, since = done + (at - now) * speed, since + at - now
        if event == "fails" and not causes:
            done, since = done - since % step * speed, 0.0
        causes += -1 if event == "goes on" else 1
        missing += {"fails": ranks, "joins": -ranks}.get(event, 0)
        now = at
    raise AssertionError("more failures are needed")


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("seed", range(5))
def test_all_failures_at_once_are_those_one_after_another(run, seed):
    drawn = _Drawn(run, 400, [seed])
    work = 250 / run.live_rate
    seconds, paused = one_after_another(run, drawn, 0.7, 3.0, work)
    pauses, repeated, slower, count = _job(drawn, 0.7, 3.0, work)
    assert work + pauses + repeated + slower == pytest.approx(seconds, rel=1e-9)
    assert pauses == pytest.approx(paused, rel=1e-9, abs=1e-6)
    assert count == (drawn.at <= seconds).sum()


def test_the_number_of_failures_drawn_changes_nothing():
    run = RUNS[2]
    few, many = _Drawn(run, 50, [1]), _Drawn(run, 5000, [1])
    assert (few.at == many.at[:50]).all()
    assert (few.kind == many.kind[:50]).all()
    work = 20 / run.live_rate
    assert _job(few, 0.5, 1.0, work) == _job(many, 0.5, 1.0, work)
    assert _job(few, 0.5, 1.0, 100 / run.live_rate) is None


def states_lost(nodes, per_node, mtbf, exposures, share, count, seed):
    """Return how many failures of a process, and of a node, leave a shard without owner and copy in their exposure."""
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(mtbf / nodes, count))
    whole = rng.random(count) < share
    node, local = rng.integers(0, nodes, count), rng.integers(0, per_node, count)
    world, lost = nodes * per_node, [0, 0]

    def ranks(number):
        first = int(node[number]) * per_node
        return set(range(first, first + per_node)) if whole[number] else {first + int(local[number])}

    for number in range(count):
        first, end = ranks(number), at[number] + exposures[int(whole[number])]
        beside = {(each + side) % world for each in first for side in (-1, 1)}
        after, gone = number, any((each + 1) % world in first for each in first)
        while not gone:
            after += 1
            if (
                after == count or at[after] > end or (whole[after] and per_node > 1)
            ):  # which loses state itself
                break
            gone = bool(ranks(after) & (beside - first))
        lost[int(whole[number])] += gone
    return lost


@pytest.mark.parametrize(
    ("nodes", "per_node", "share"),
    [
        (2, 1, 0.5),
        (3, 1, 0.2),
        (40, 1, 1.0),
        (1, 2, 0.0),
        (1, 8, 0.3),
        (5, 2, 0.2),
        (3, 8, 0.1),
        (30, 4, 0.0),
    ],
)
def test_adjacent_ranks_that_die_lose_state_as_often_as_predicted(nodes, per_node, share):
    mtbf = 400.0
    run = failures(
        nodes, per_node, mtbf, 60.0, node_share=share, notice_process=3.0, rebuild=7.0, divided_nbytes=1.0
    )
    count = 40_000
    exposures = [kind.pause for kind in run.kinds]
    found = states_lost(nodes, per_node, mtbf, exposures, share, count, 5)
    for kind, lost, part in zip(run.kinds, found, (1 - share, share), strict=True):
        expected = count * part * kind.loses_state
        assert lost == pytest.approx(expected, abs=5 * math.sqrt(expected) + 0.03 * expected)


def test_a_node_of_several_ranks_takes_shards_and_their_copies_along():
    kinds = failures(100, 8, divided_nbytes=1e9).kinds
    assert kinds[0].loses_state < 1e-4
    assert kinds[1].loses_state == 1.0
    assert failures(100, 1, divided_nbytes=1e9).kinds[1].loses_state < 1e-4


def test_replicated_state_is_lost_only_with_all_ranks():
    assert failures(1000, 8).state_mtbf == math.inf
    alone = failures(1, 1)
    assert [kind.loses_state for kind in alone.kinds] == [1.0, 1.0]
    assert alone.state_mtbf == pytest.approx(30 * DAY)
    one_node = failures(1, 8)
    assert one_node.state_mtbf == pytest.approx(30 * DAY / 0.2, rel=1e-3)
    assert one_node.kinds[0].rebuild == 0.5
    pair = failures(2, 1, 1000.0, node_share=1.0)
    assert pair.kinds[1].loses_state == pytest.approx(6.0 / 1000.0, rel=0.01)


def test_with_virtual_ranks_the_slowest_rank_computes_one_more_micro_batch():
    missing = np.array([0, 1, 2, 4, 5, 7, 8])
    for virtual in (1, 2, 3, 8):
        speed = LiveFailures((), 8, virtual).speed(missing, 0.6)
        for count, found in zip(missing.tolist(), speed.tolist(), strict=True):
            if count == 8:
                assert found == 0.0
                continue
            slower = math.ceil(8 * virtual / (8 - count)) / virtual
            assert 1 / found == pytest.approx(0.6 * slower + 0.4)
    assert LiveFailures((), 8).speed(missing, 0.6).tolist() == [1, 7 / 8, 6 / 8, 4 / 8, 3 / 8, 1 / 8, 0]


def test_transfers_take_the_bytes_over_the_links():
    replicated = failures(10, 4, whole_nbytes=5e10)
    assert [kind.transfer for kind in replicated.kinds] == [0.0, 0.0]
    assert [kind.join for kind in replicated.kinds] == [6.0, 6.0]  # a new world, 50 GB at 10 GB/s
    sharded = failures(10, 4, whole_nbytes=1e10, divided_nbytes=1e11)
    assert sharded.kinds[0].transfer == pytest.approx(2.0)  # a tenth for each node, and as much of copies
    assert sharded.kinds[0].join == pytest.approx(1.0 + 2.0 + 1.0)
    inside = failures(1, 4, whole_nbytes=5e10)
    assert inside.kinds[0].join == 0.5 + 0.5


def test_a_replacement_that_is_ready_joins_at_once():
    kinds = failures(10, restart=4.0, whole_nbytes=1e10).kinds
    assert (kinds[0].join, kinds[0].missing, kinds[0].transfer) == (2.0, 4.0, 0.0)
    assert (kinds[1].join, kinds[1].missing, kinds[1].transfer) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("run", RUNS)
def test_parts_of_the_cost_of_a_failure_add_up_to_the_slowdown_if_failures_are_rare(run):
    kinds = tuple(
        FailureKind(**{**vars(kind), "rate": kind.rate * 1e-4, "loses_state": kind.loses_state / 2})
        for kind in run.kinds
    )
    rare = LiveFailures(kinds, run.ranks, run.virtual_ranks)
    risk, interval, step = state_risk(rare, 30.0, 300.0), 3600.0, 5.0
    cost = live_cost(rare, 0.7, step, risk, interval)
    assert tuple(cost) == FAILURE_PARTS
    slowdown = expected_live_slowdown(rare, 0.7, step) * expected_slowdown(risk, interval)
    without = expected_slowdown(FailureModel(math.inf, 30.0), interval)
    rate = sum(kind.rate for kind in kinds)
    # Checkpoints are written in vain too: their share counts for live failures, which stop them like training.
    assert (slowdown / without - 1) / rate == pytest.approx(sum(cost.values()), rel=0.01)


def test_rare_losses_of_state_have_long_intervals_and_restarts_that_others_interrupt():
    run = failures(100, 8, divided_nbytes=1e9)
    risk = state_risk(run, 60.0, 300.0)
    assert risk.mtbf == run.state_mtbf == pytest.approx(5 * 30 * DAY / 100, rel=1e-3)
    assert 300.0 < risk.restart < 305.0


def test_without_failures_nothing_is_lost():
    quiet = failures(100, mtbf=math.inf)
    assert expected_live_slowdown(quiet, 0.5, 1.0) == 1.0
    found = simulate_live_jobs(quiet, np.full(3, 0.5), np.ones(3), np.full(3, 100.0), [1])
    assert found.seconds.tolist() == [100.0] * 3
    assert found.failures.tolist() == [0] * 3


def test_jobs_that_never_end_are_recognised():
    hopeless = failures(100_000, 1, 1000.0)
    assert simulate_live_jobs(hopeless, np.full(2, 0.5), np.ones(2), np.full(2, 1e5), [1]) is None
    assert expected_live_slowdown(failures(10**6, 1, 100.0), 0.5, 1.0) == math.inf
    gone = failures(2, 1, 100.0, 1e6)
    assert expected_live_slowdown(gone, 0.5, 1.0) > 1e4


@given(
    nodes=st.integers(1, 200),
    per_node=st.sampled_from([1, 2, 8]),
    mtbf=st.floats(1e5, 1e8),
    restart=st.floats(0.0, 2000.0),
    share=st.floats(0.0, 1.0),
    virtual=st.integers(0, 4),
    divided=st.sampled_from([0.0, 1e10]),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_parts_are_never_negative(nodes, per_node, mtbf, restart, share, virtual, divided, seed):
    run = failures(
        nodes, per_node, mtbf, restart, node_share=share, virtual_ranks=virtual, divided_nbytes=divided
    )
    for kind in run.kinds:
        assert 0 <= kind.loses_state <= 1
        assert min(kind.transfer, kind.join, kind.missing) >= 0
    found = simulate_live_jobs(run, np.full(4, 0.5), np.ones(4), np.full(4, 20 * mtbf / nodes), [seed])
    if found is None:
        assert expected_live_slowdown(run, 0.5, 1.0) > 1e3
        return
    for part in (found.paused, found.repeated, found.slower):
        assert (part >= 0).all()
    assert (found.repeated <= found.failures).all()  # a step of 1 s each


@pytest.mark.parametrize(
    "bad",
    [
        {"node_share": 1.1}, {"node_share": math.nan}, {"notice_process": -1.0}, {"notice_node": math.inf},
        {"rebuild": -0.1}, {"replacement": math.nan}, {"virtual_ranks": -1}, {"virtual_ranks": 1.5},
        {"whole_nbytes": -1.0}, {"divided_nbytes": math.inf},
    ],
)  # fmt: skip
def test_invalid_values_are_refused(bad):
    with pytest.raises(UsageError, match=next(iter(bad))):
        LiveRecovery(**bad)
