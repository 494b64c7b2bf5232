"""A world that goes on while its ranks and hosts come and go: replacements, lost hosts, joiners, and its end."""

from __future__ import annotations

import pytest

from paceline.launch.agent.job_messages import FinishWorld, JoinWorld, LeaveJob
from paceline.launch.agent.job_state import RECONNECT_SECONDS
from paceline.launch.agent.restart_policy import HostMember, JobOutcome
from simulated_job import SimulatedJob


def live_job(hosts=3, running=None, **options):
    """Return a job whose hosts are all live."""
    job = SimulatedJob(hosts, min_hosts=1, **options)
    present = range(hosts if running is None else running)
    for host in present:
        job.register(host)
    plans = [job.join(host) for host in present]
    job.pass_time(31.0)
    assert all(plan() for plan in plans)
    for host in present:
        job.live(host)
    return job


def lose(job, host):
    job.close(host)
    job.pass_time(RECONNECT_SECONDS)


def changes(job, host=0):
    return [(one.number, one.host, one.kind) for one in job.view(host).changes]


def places(plan):
    return [(one.host, one.ranks) for one in plan.hosts]


def finish(job, host, world=0):
    return job.request(FinishWorld, host, world)().result


def test_a_rank_is_replaced_and_a_report_that_comes_twice_counts_once():
    job = live_job(max_restarts=2)
    assert job.view(0).live
    assert [job.depart(1, 0), job.depart(1, 0), job.depart(1, 1)] == [(True, True)] * 3
    assert job.depart(1, 2) == (True, False)
    view = job.view(0)
    assert (view.failed, view.lost, view.world, view.live) == (False, False, 0, True)


def test_restarts_and_replacements_are_counted_together():
    job = live_job(max_restarts=2)
    assert job.depart(1, 0) == (True, True)
    job.fail(0, 0)
    plans = [job.join(host) for host in range(3)]
    assert plans[0]().result.plan.agreement.decision.action == "same"
    for host in range(3):
        job.live(host, world=1)
    assert job.depart(2, 0, world=1) == (True, False)
    job.fail(0, 1)
    plans = [job.join(host) for host in range(3)]
    decision = plans[0]().result.plan.agreement.decision
    assert (decision.action, decision.why) == ("end", "restarted 1 time and replaced 1 rank already")


@pytest.mark.parametrize("why", ["another is not live", "failed", "lost", "another world", "nobody is left"])
def test_the_world_does_not_go_on(why):
    job, world = live_job(hosts=2), 0
    if why == "another is not live":
        job.live(0, live=False)
    elif why == "failed":
        job.fail(0, 0)
    elif why == "lost":
        job.live(1, survivors=0)
        lose(job, 0)
        assert job.view(1).lost
    elif why == "another world":
        world = 1
    else:
        assert job.depart(0, 0) == (True, True)  # its only rank: host 1 has another
    assert job.depart(1, 0, world=world) == (False, False)


def test_a_newcomer_that_its_host_has_not_reported_yet_may_go_on_alone():
    for others, goes_on in (((0, 1),), True), (((0, 0),), False), (((2, 0),), False):
        job = live_job(hosts=2)
        assert job.depart(0, 0) == (True, True)
        job.live(0, survivors=0)  # the replacement has not joined yet, as far as its host knows
        assert job.depart(1, 0, others=others) == (goes_on, goes_on)
    job = live_job(hosts=2)
    assert job.depart(0, 0) == (True, True)
    assert job.depart(1, 0, others=[(0, 1)]) == (True, True)
    assert job.depart(0, 1, others=[(1, 0)]) == (False, False), "now nobody is left"


def test_only_a_rank_that_leaves_may_leave_those_behind_who_have_ended_well():
    for cause, goes_on in (("failed", False), ("left", True)):
        job = live_job(hosts=2)
        assert finish(job, 0) == 1
        job.live(0, survivors=0)
        assert job.depart(1, 0, cause, replace=False) == (goes_on, False)
        assert job.view(0).outcome == (JobOutcome(0) if goes_on else None)


def test_if_all_ranks_of_all_hosts_leave_the_world_is_over():
    job = live_job(hosts=3)
    for host in (0, 2):
        assert job.depart(host, 0, "left", replace=False) == (True, False), "host 1 has a rank"
    assert job.depart(1, 0, "left", replace=False) == (False, False)


def test_a_process_that_has_not_joined_yet_disturbs_nobody():
    job = live_job(hosts=2)
    job.live(0, live=False)
    assert job.depart(1, 0, "joiner", survivors=1) == (True, True)
    job.fail(0, 0)
    assert job.depart(1, 1, "joiner", survivors=1) == (False, False)


def test_a_lost_host_is_forgotten_and_the_others_end_the_job():
    job = live_job()
    watch = job.watch(0, job.view(0).news)
    finish(job, 2)
    lose(job, 2)
    assert watch() is not None
    view = job.view(0)
    assert (view.lost, view.failed, view.finished, view.present) == (False, False, 0, 2)
    assert changes(job) == [(0, "host2", "lost")]
    assert finish(job, 0) == 1
    assert job.view(1).outcome is None
    assert finish(job, 1) == 2
    assert job.view(1).outcome == JobOutcome(0)


def test_a_host_leaves_or_is_lost_by_the_last_one_that_others_wait_for():
    job = live_job(hosts=3)
    finish(job, 0)
    job.request(LeaveJob, 1)
    assert (changes(job), job.view(0).outcome) == ([(0, "host1", "left")], None)
    lose(job, 2)  # nobody goes on who could finish its work
    assert (job.view(0).lost, job.view(0).outcome) == (True, None)


def test_a_lost_host_restarts_the_others_unless_all_are_live():
    job = live_job()
    job.live(1, live=False, survivors=0)
    lose(job, 2)
    assert (job.view(0).lost, changes(job)) == (True, [])
    joined = [job.join(host) for host in range(2)]
    job.pass_time(3.1)
    assert joined[0]().result.plan.agreement.lost == ("host2",)


@pytest.mark.parametrize("recovered", [True, False])
def test_a_later_failure_is_not_blamed_on_a_host_that_the_others_do_without(recovered):
    job = live_job()
    lose(job, 1)
    if recovered:
        job.live(0, epoch=1)
    job.fail(0, 0, ("PeerLost: x",))
    joined = [job.join(host) for host in (0, 2)]
    job.pass_time(3.1)
    agreement = joined[0]().result.plan.agreement
    lost, first = ((), "host0") if recovered else (("host1",), "host1")
    assert (agreement.lost, agreement.first.host) == (lost, first)


def test_a_host_joins_a_live_world_in_the_place_of_a_lost_one():
    job = live_job(ranks=2)
    lose(job, 1)
    job.register(7)
    plan = job.join(7, live=True)().result.plan
    assert (plan.joiner, plan.agreement.restart) == (True, 0)
    assert places(plan) == [("host0", 2), ("host7", 2), ("host2", 2)]
    assert changes(job) == [(0, "host1", "lost"), (1, "host7", "joined")]
    assert (job.view(0).waiting, job.view(0).world, job.view(7).live) == (False, 0, True)
    job.register(8)
    surplus = job.join(8, live=True)
    assert surplus() is None
    lose(job, 0)
    assert places(surplus().result.plan) == [("host8", 2), ("host7", 2), ("host2", 2)]
    for host in (7, 8, 2):
        job.live(host, survivors=2)
    assert [finish(job, host) for host in (8, 7)] == [1, 2]
    assert job.view(2).outcome is None
    assert finish(job, 2) == 3
    assert job.view(2).outcome == JobOutcome(0)


def test_a_host_gets_its_own_place_back_and_one_of_another_size_a_new_one():
    job = live_job(hosts=4, ranks=2)
    lose(job, 1)
    lose(job, 2)
    returned = job.join(2, live=True)().result.plan
    assert places(returned) == [(f"host{host}", 2) for host in range(4)]
    smaller = job.join(9, ranks=1, live=True)().result.plan
    assert places(smaller) == [*places(returned), ("host9", 1)]


def test_what_a_host_reports_of_a_world_that_went_on_without_it_is_ignored():
    job = live_job()
    lose(job, 1)
    job.fail(1, 0)
    job.live(1, live=False)
    assert finish(job, 1) is None
    assert job.depart(1, 0) == (False, False)
    view = job.view(0)
    assert (view.failed, view.finished, view.live) == (False, 0, True)


@pytest.mark.parametrize("why", ["no rejoin", "not live", "it can't", "finished"])
def test_a_host_that_may_not_join_waits_for_a_restart(why):
    job = live_job(running=2, rejoin=why != "no rejoin")
    if why == "not live":
        job.live(1, live=False)
    if why == "finished":
        finish(job, 0)
    job.register(2)
    late = job.join(2, live=why != "it can't")
    assert (late(), job.view(0).waiting) == (None, True)
    job.fail(0, 0)
    joined = [job.join(host) for host in range(2)]
    assert joined[0]().result.plan == late().result.plan
    assert (late().result.plan.joiner, late().result.plan.agreement.joined) == (False, ("host2",))


def test_a_host_that_waits_is_admitted_once_the_world_is_live():
    job = live_job(running=2)
    job.live(1, live=False)
    job.register(2)
    late = job.join(2, live=True)
    assert late() is None
    job.live(1)
    assert late().result.plan.joiner


def test_a_host_whose_ranks_have_not_joined_does_not_keep_the_job():
    job = live_job(hosts=2)
    job.depart(1, 0)
    assert finish(job, 0) == 1
    assert job.view(1).outcome == JobOutcome(0)
    job = live_job(hosts=3)
    job.depart(1, 0)
    assert [finish(job, 0), finish(job, 1)] == [1, 2]
    job.live(1, survivors=1)  # its replacement has joined
    assert finish(job, 2) == 2
    assert job.view(1).outcome is None
    assert finish(job, 1) == 3
    assert job.view(1).outcome == JobOutcome(0)


def test_a_join_that_comes_twice_has_the_same_answer():
    job = live_job(running=2)
    job.register(2)
    request = JoinWorld(999, "run", "m2", HostMember("host2", "m2", 1), "10.0.0.002", 4002, True)
    [first] = [one for one in job.state.handle(b"2", request, job.now) if one.id == 999]
    [again] = [one for one in job.state.handle(b"again", request, job.now) if one.id == 999]
    assert (again.client, again.result) == (b"again", first.result)
    assert changes(job) == [(0, "host2", "joined")]
