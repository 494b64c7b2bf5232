"""The state of a job without sockets or clocks: worlds, restarts, lost and late hosts, up to 300 of them."""

from __future__ import annotations

import pytest

from paceline.launch.agent.job_messages import (
    EndJob,
    FinishWorld,
    GetFailures,
    LeaveJob,
    ReportProgress,
)
from paceline.launch.agent.job_state import RECONNECT_SECONDS
from paceline.launch.agent.restart_policy import JobOutcome
from simulated_job import SimulatedJob


def test_a_world_begins_as_soon_as_all_hosts_have_joined():
    job = SimulatedJob(hosts=3, ranks=2)
    for host in range(3):
        assert job.register(host).outcome is None
    first = [job.join(2), job.join(0)]
    assert [one() for one in first] == [None, None]
    assert job.view(0).joined == 2
    last = job.join(1)
    plans = [one().result.plan for one in [*first, last]]
    assert plans[0] == plans[1] == plans[2]
    assert [one.host for one in plans[0].hosts] == ["host0", "host1", "host2"]
    assert [one.port for one in plans[0].hosts] == [4000, 4001, 4002]
    assert (plans[0].agreement.restart, plans[0].agreement.ranks_after) == (0, 6)


def test_fewer_hosts_begin_after_a_while_and_too_few_never():
    job = SimulatedJob(hosts=3, min_hosts=2)
    job.register(0)
    early = job.join(0)
    job.pass_time(28.0)
    job.register(1)
    second = job.join(1)
    job.pass_time(2.9)
    assert early() is None
    job.pass_time(0.2)
    assert len(early().result.plan.hosts) == len(second().result.plan.hosts) == 2
    job = SimulatedJob(hosts=3, min_hosts=2)
    job.register(0)
    alone = job.join(0)
    job.pass_time(299.0)
    assert alone() is None
    job.pass_time(1.0)
    assert (alone().timeout, bool(alone().error)) == (True, True)


def test_all_restart_after_a_failure_and_the_culprit_is_the_one_without_a_lost_peer():
    job = SimulatedJob(hosts=3, ranks=2)
    job.start(range(3))
    watches = [job.watch(host, job.view(host).news) for host in range(3)]
    assert [one() for one in watches] == [None] * 3
    job.fail(2, 0, ("RuntimeError: Connection closed by peer",), rank=4)
    assert all(one().result.failed for one in watches)
    job.fail(1, 0, ("KeyError: 7",), rank=2)
    assert len(job.request(GetFailures, 0, 0)().result) == 2
    job.request(ReportProgress, 0, 0)
    joined = [job.join(host) for host in range(2)]
    job.pass_time(30.0)  # host 2 still stops its ranks: none begins without it
    assert [one() for one in joined] == [None, None]
    last = job.join(2)
    agreement = last().result.plan.agreement
    assert (agreement.restart, agreement.first.host, agreement.ranks_after) == (1, "host1", 6)
    assert [one.host for one in agreement.after] == ["host2"]
    assert job.view(0).failed is False


def test_a_report_that_comes_twice_counts_once():
    job = SimulatedJob(hosts=2)
    job.start(range(2))
    job.fail(1, 0)
    job.fail(1, 0)
    assert len(job.request(GetFailures, 0, 0)().result) == 1
    assert [job.request(FinishWorld, 0, 0)().result for _ in range(2)] == [1, 1]
    job.fail(1, 7)  # of another world
    assert len(job.request(GetFailures, 0, 0)().result) == 1


def test_a_host_is_lost_when_its_connection_stays_closed():
    job = SimulatedJob(hosts=3, min_hosts=2)
    job.start(range(3))
    watch = job.watch(0, job.view(0).news)
    job.close(2)
    job.pass_time(RECONNECT_SECONDS / 2)
    assert job.view(2).member  # it is back on its connection
    job.pass_time(10.0)
    assert watch() is None
    job.close(2)
    job.pass_time(RECONNECT_SECONDS)
    assert (watch().result.lost, watch().result.present) == (True, 2)
    joined = [job.join(host) for host in range(2)]
    job.pass_time(2.9)
    assert joined[0]() is None
    job.pass_time(0.2)
    agreement = joined[0]().result.plan.agreement
    assert (agreement.lost, agreement.ranks_after, str(agreement.first)) == (
        ("host2",),
        2,
        "host2 was lost after 14 s",
    )
    assert job.view(2).member is False


def test_a_late_host_is_admitted_by_a_restart_and_a_surplus_one_waits():
    job = SimulatedJob(hosts=3, min_hosts=2)
    for host in range(2):
        job.register(host)
    joined = [job.join(host) for host in range(2)]
    job.pass_time(31.0)
    assert joined[0]().result.plan.agreement.ranks_after == 2
    watch = job.watch(0, job.view(0).news)
    job.register(2)
    late = job.join(2)
    assert watch().result.waiting
    again = [job.join(host) for host in range(2)]
    assert late().result.plan == again[0]().result.plan
    assert late().result.plan.agreement.joined == ("host2",)
    job.register(3)
    surplus = job.join(3)
    job.pass_time(1000.0)
    assert (surplus(), job.view(0).waiting) == (None, False)
    job.close(1)
    job.pass_time(2.0)
    joined = [job.join(host) for host in (0, 2)]
    assert [one.host for one in surplus().result.plan.hosts] == ["host0", "host2", "host3"]
    assert joined[0]().result.plan.agreement.restart == 2


def test_the_job_ends_for_all_hosts_at_once():
    job = SimulatedJob(hosts=2, min_hosts=1)
    job.start(range(2))
    job.register(2)
    waiting, watch = job.join(2), job.watch(1, job.view(1).news)
    assert job.request(FinishWorld, 0, 0)().result == 1
    assert watch().result.finished == 1
    watch = job.watch(1, job.view(1).news)
    assert job.request(FinishWorld, 1, 0)().result == 2
    job.request(EndJob, 1, JobOutcome(0))
    job.request(EndJob, 0, JobOutcome(1, "too late"))
    assert waiting().result.outcome == watch().result.outcome == JobOutcome(0)
    assert job.register(5).outcome == JobOutcome(0)
    assert job.join(0)().result.outcome == JobOutcome(0)
    for host in (0, 1, 2):
        job.request(LeaveJob, host)
    assert job.view(0).present == 0


def test_a_rank_that_fails_again_is_left_out_and_then_the_job_ends():
    job = SimulatedJob(hosts=2, min_hosts=1)
    job.start(range(2))
    for restart in range(2):
        job.fail(1, restart)
        plans = [job.join(host) for host in range(2)]
    agreement = plans[1]().result.plan.agreement
    assert (agreement.decision.action, agreement.shrinks, agreement.leaves) == ("fewer", "m1", True)
    job.request(LeaveJob, 1)
    alone = job.join(0)
    job.pass_time(3.1)
    assert alone().result.plan.agreement.ranks_after == 1
    job.fail(0, 3)
    job.join(0)
    job.pass_time(3.1)
    job.fail(0, 4)
    last = job.join(0)
    job.pass_time(3.1)
    assert last().result.plan.agreement.decision.action == "end"
    assert job.view(0).outcome.code == 1


def test_a_request_before_registering_and_of_an_unknown_host_are_answered():
    job = SimulatedJob(hosts=1)
    assert "no host has registered" in job.join(0)().error
    assert job.view(7).member is False
    assert job.request(LeaveJob, 7)().error == ""


@pytest.mark.parametrize("hosts", [300])
def test_three_hundred_hosts_lose_none_that_is_there(hosts):
    job = SimulatedJob(hosts=hosts, min_hosts=hosts // 2, ranks=8)
    plans = job.start(range(hosts))
    assert len({id(plan) for plan in plans}) == 1
    assert [one.member for one in plans[0].hosts] == [f"m{host}" for host in range(hosts)]
    watches = [job.watch(host, job.view(host).news) for host in range(hosts)]
    before = len(job.replies)
    job.pass_time(500.0)  # nobody sends anything, and nobody is lost
    assert len(job.replies) == before
    assert not any(one() for one in watches)
    lost = range(0, hosts, 10)
    for host in lost:
        job.close(host)
    job.pass_time(RECONNECT_SECONDS)
    rest = [host for host in range(hosts) if host not in lost]
    assert all(watches[host]().result.lost for host in rest)
    for host in rest:  # each also sees its connections close
        job.fail(host, 0, ("RuntimeError: Connection reset by peer",), rank=8 * host)
    joined = [job.join(host) for host in rest]
    job.pass_time(3.1)
    agreement = joined[0]().result.plan.agreement
    assert (agreement.ranks_after, len(agreement.lost)) == (8 * len(rest), len(lost))
    assert agreement.first.host in {f"host{host}" for host in lost}
    assert len({id(one().result.plan) for one in joined}) == 1
