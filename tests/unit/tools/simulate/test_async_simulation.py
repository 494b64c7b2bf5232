"""Asynchronous training in virtual time: equivalences, faults, and the effects of the hub's rules."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from paceline.async_dp.hub.hub_settings import HubOptimizer, HubRules, MergeRules, PopulationRules
from paceline.async_dp.hub.staleness_policy import StalenessPolicy
from paceline.async_dp.worker.score_based_selection import SelectionPolicy
from paceline.errors import UsageError
from paceline.parallel.local_sgd.sync_schedule import SyncSchedule
from paceline.tools.simulate.async_settings import AsyncPlan
from paceline.tools.simulate.async_simulation import AsyncResult, AsyncSimulation, simulate_async
from paceline.tools.simulate.async_sweep import RandomFaults
from paceline.tools.simulate.learning_tasks import LinearTask
from paceline.tools.simulate.simulated_ddp import DdpPlan, simulate_ddp
from paceline.tools.simulate.simulated_machines import ChurnEvent, SimulatedMachine, draw_churn

FOUR = tuple(SimulatedMachine(step_seconds=seconds, jitter=0.1) for seconds in (0.1, 0.1, 0.2, 0.4))
EIGHT = (SimulatedMachine(step_seconds=0.1, jitter=0.1),) * 8
EQUAL = (SimulatedMachine(step_seconds=1.0),) * 4
PLAN = AsyncPlan(machines=FOUR, seconds=40.0, cadence=SyncSchedule(10, 1, 5), score_every=10.0)
BARE = {"compression": None, "rules": HubRules(down="fp32"), "stagger": False}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def usual() -> AsyncResult:
    return simulate_async(PLAN, LinearTask())


def total(found: AsyncResult, name: str) -> float:
    return sum(each[name] for each in found.counts)


def at_the_end(plan: AsyncPlan) -> AsyncSimulation:
    simulation = AsyncSimulation(plan, LinearTask(), lambda _: None)
    simulation.run()
    return simulation


# ---------------------------------------------------------------------- equivalences


def test_two_runs_of_a_plan_are_the_same_to_the_bit(usual):
    again = simulate_async(PLAN, LinearTask())
    assert again == usual
    assert simulate_async(replace(PLAN, seed=1), LinearTask()).digest != usual.digest


def test_one_worker_that_sends_every_step_is_plain_sgd():
    simulation = at_the_end(AsyncPlan(machines=EQUAL[:1], steps=50, cadence=SyncSchedule(1, 1, 0), **BARE))
    alone = LinearTask().learner(0, 1)
    alone.steps(0, 50, 1.0)
    sgd = alone.module.weight.detach().flatten()  # type: ignore[union-attr]
    assert torch.allclose(simulation.theta(), sgd, rtol=0, atol=1e-6)


def test_equal_workers_that_send_every_step_average_gradients_that_are_one_exchange_old():
    # No worker waits: step n + 1 begins while the global model of step n is under way, so it is no lock-step. It is
    # exactly this: every worker's gradient is that of its own last snapshot; the global model steps by their mean.
    steps, workers = 30, 4
    simulation = at_the_end(AsyncPlan(machines=EQUAL, steps=steps, cadence=SyncSchedule(1, 1, 0), **BARE))
    learners = [LinearTask().learner(worker, workers) for worker in range(workers)]
    weights = [learner.module.weight.detach().numpy() for learner in learners]  # type: ignore[union-attr]
    # The first worker's parameters after its first step are the global model's first.
    learners[0].steps(0, 1, 1.0)
    for weight in weights:
        weight[...] = weights[0]
    global_model = weights[0].copy()
    learners[0].steps(1, 1, 1.0)  # it has the global model, the others fetch it
    global_model = np.mean(weights, axis=0)
    snapshots = [weight.copy() for weight in weights]
    for step in range(2, steps):
        for learner, weight, snapshot in zip(learners, weights, snapshots, strict=True):
            learner.steps(step, 1, 1.0)
            weight += global_model - snapshot
            snapshot[...] = weight
        global_model = np.mean(weights, axis=0)
    assert np.allclose(simulation.theta().numpy(), global_model.ravel(), rtol=0, atol=1e-5)


def test_equal_workers_that_send_every_step_reach_the_parameters_of_ddp():
    asynchronous = simulate_async(
        AsyncPlan(machines=EQUAL, steps=150, cadence=SyncSchedule(1, 1, 0), **BARE), LinearTask()
    )
    ddp = simulate_ddp(DdpPlan(machines=EQUAL, steps=150), LinearTask())
    assert asynchronous.loss == pytest.approx(ddp.loss, rel=0.1)


def test_smaller_updates_learn_the_same_with_a_fraction_of_the_bytes():
    """The sparse one needs more rounds: in each it moves 1.56 % of the numbers."""
    plan, task = replace(PLAN, seconds=120.0), LinearTask(width=64)
    found = {
        name: simulate_async(replace(plan, compression=name), task)
        for name in (None, "int4", "int2", "topk-int2")
    }
    nbytes = [each.nbytes_up for each in found.values()]
    assert nbytes == sorted(nbytes, reverse=True)
    assert all(each.refused == {} for each in found.values())
    initial = task.learner(0, 1).score()
    assert found["int2"].loss < 1.1 * found[None].loss < 1e-4 * initial
    assert found["topk-int2"].loss < 0.01 * initial


# ---------------------------------------------------------------------- faults


@pytest.mark.parametrize("merge", [MergeRules(), MergeRules("quorum", 0.5)], ids=lambda merge: merge.on)
def test_a_hub_that_is_killed_and_started_again_loses_nothing(merge):
    plan = replace(PLAN, seconds=math.inf, steps=300, machines=FOUR[:3], rules=HubRules(merge=merge))
    churn = (
        ChurnEvent(5.0, -1, False),
        ChurnEvent(6.0, -1, True),
        ChurnEvent(12.0, -1, False),
        ChurnEvent(12.5, -1, True),
    )
    found = simulate_async(replace(plan, churn=churn), LinearTask())
    whole = simulate_async(plan, LinearTask())
    assert found.updates == total(found, "sent") == total(found, "acknowledged")
    assert (
        total(found, "resent") + found.refused.get("repeated", 0) + found.refused.get("not in session", 0) > 0
    )
    assert found.loss == pytest.approx(whole.loss, abs=1e-3)


def test_the_journal_of_a_lost_hub_remains():
    found = simulate_async(replace(PLAN, churn=(ChurnEvent(20.0, -1, False),)), LinearTask())
    assert 0 < found.updates < simulate_async(PLAN, LinearTask()).updates
    assert math.isfinite(found.loss)


def test_merging_by_quorum_takes_every_update_once_with_churn_and_faults():
    def run() -> AsyncResult:
        rules = HubRules(merge=MergeRules("quorum", 0.5), outer=HubOptimizer("delayed-nesterov", 1.0, 0.5))
        churn = (*draw_churn(0.3, 4, 40.0, seed=1), ChurnEvent(14.0, -1, False), ChurnEvent(14.5, -1, True))
        machines = EIGHT[:4]
        return simulate_async(
            replace(PLAN, machines=machines, rules=rules, churn=churn, fault=RandomFaults(0.02)), LinearTask()
        )

    found = run()
    assert found == run(), "to the bit"
    merges = [each for each in found.decisions if each["kind"] == "merge"]
    merged = sum(each["updates"] for each in merges)
    assert found.updates - 4 <= merged <= found.updates, "the others wait"
    assert merges[-1]["revision"] == merged
    assert any(each["updates"] < each["workers"] for each in merges)
    assert any(each["grace"] > 0 for each in merges)
    assert found.refused.keys() <= {"repeated", "not in session"}
    assert found.loss < 0.01


def test_merging_by_quorum_of_equal_workers_merges_all_of_them_in_every_round():
    rules = HubRules(merge=MergeRules("quorum", 0.5))
    plan = replace(PLAN, machines=EQUAL, seconds=200.0, rules=rules, stagger=False)
    found = simulate_async(plan, LinearTask())
    merges = [each for each in found.decisions if each["kind"] == "merge"]
    assert len(merges) > 15
    assert [each["updates"] for each in merges] == [4] * len(merges)
    assert found.staleness_max == 0


def test_injected_faults_cost_almost_nothing_and_no_round_counts_twice():
    faults = RandomFaults(0.05)
    plan = replace(PLAN, seconds=math.inf, steps=1500, machines=FOUR[:2])
    found = simulate_async(replace(plan, fault=faults), LinearTask())
    whole = simulate_async(plan, LinearTask())
    assert {"lost", "repeated", "late", "damaged"} <= faults.counts.keys()
    assert faults.counts["let through"] == 0
    assert found.updates == total(found, "sent") == total(found, "acknowledged")
    assert found.refused["repeated"] > 0
    assert found.loss == pytest.approx(whole.loss, abs=1e-3)
    assert found.digest == simulate_async(replace(plan, fault=RandomFaults(0.05)), LinearTask()).digest


@pytest.mark.parametrize("seed", [1, 3, 7, 8])
def test_losses_before_parameters_are_shared_exclude_no_worker(seed):
    """Lost messages: the request or its reply, and the message that all share parameters."""
    plan = replace(PLAN, seconds=math.inf, steps=600, machines=FOUR, fault=RandomFaults(0.2, seed))
    found = simulate_async(plan, LinearTask())
    assert all(each["taken"] > 5 for each in found.counts)


def test_workers_that_join_and_leave(usual):
    plan = replace(PLAN, churn=draw_churn(0.3, 4, PLAN.seconds, seed=1))
    found = simulate_async(plan, LinearTask())
    assert found == simulate_async(plan, LinearTask())
    assert found.steps < usual.steps
    assert sum(each["kind"] == "join" for each in found.decisions) > 4
    assert found.loss < 0.01


def test_a_worker_that_leaves_for_good_does_not_keep_the_others_from_ending():
    plan = replace(PLAN, seconds=math.inf, steps=60, churn=(ChurnEvent(2.0, 1, False),))
    found = simulate_async(plan, LinearTask())
    assert found.trained_seconds == pytest.approx(60 * 0.4, rel=0.1)
    assert 3 * 60 < found.steps < 4 * 60


def test_a_worker_that_returns_after_its_last_step_ends_once():
    turns = (
        ChurnEvent(1.0, 0, False),
        ChurnEvent(1.5, 0, True),
        ChurnEvent(8.0, 0, False),
        ChurnEvent(9.0, 0, True),
    )
    found = simulate_async(replace(PLAN, seconds=math.inf, steps=40, churn=turns), LinearTask())
    assert found.trained_seconds >= 40 * 0.4 * 0.8


# ---------------------------------------------------------------------- effects of rules


def test_nesterov_at_every_arrival_diverges_and_must_be_enabled():
    with pytest.raises(UsageError, match="diverges"):
        HubOptimizer("nesterov", 0.7, 0.9)
    plan = AsyncPlan(machines=EQUAL * 2, steps=150, cadence=SyncSchedule(10, 1, 0))
    losses = {}
    for name in ("nesterov", "delayed-nesterov", "averaging"):
        outer = HubOptimizer(name, 1.0 if name == "averaging" else 0.7, 0.9, unstable=True)
        losses[name] = simulate_async(replace(plan, rules=HubRules(outer=outer)), LinearTask()).loss
    initial = LinearTask().learner(0, 1).score()
    assert not losses["nesterov"] < 10 * initial
    assert losses["averaging"] < 0.1
    assert losses["delayed-nesterov"] < 0.1 * initial


def test_policies_for_stale_updates_show():
    machines = [SimulatedMachine(step_seconds=0.1)] * 5 + [SimulatedMachine(step_seconds=2.0)]
    plan = AsyncPlan(machines=machines, seconds=60.0, cadence=SyncSchedule(5, 1, 0))

    def under(policy: str) -> AsyncResult:
        return simulate_async(
            replace(plan, rules=HubRules(staleness=StalenessPolicy(policy, bound=4.0))), LinearTask()
        )

    accept, drop, wait = under("accept"), under("drop"), under("wait")
    assert (accept.staleness_max or 0) > 8
    assert (drop.staleness_max or 9) <= 4
    assert drop.refused["stale"] > 0
    assert "stale" not in accept.refused
    assert (wait.staleness_max or 9) <= 5.5
    assert wait.updates < 0.6 * accept.updates
    assert under("down-weight").digest != accept.digest


def test_a_worker_with_a_bad_learning_rate_is_replaced():
    machines = [*FOUR[:3], SimulatedMachine(step_seconds=0.1, lr=20.0)]
    rules = HubRules(population=PopulationRules(steps=60, margin=0.05))
    found = simulate_async(replace(PLAN, machines=machines, rules=rules, same_init=False), LinearTask())
    replaced = [each["worker"] for each in found.decisions if each["kind"] == "replace"]
    assert replaced[0] == 4
    assert found.loss < 0.01


@pytest.mark.parametrize("policy", ["better", "best"])
def test_sending_and_merging_by_score(policy):
    found = simulate_async(replace(PLAN, policy=SelectionPolicy(send=policy)), LinearTask())
    assert total(found, "withheld") > 0
    assert total(found, "declined") == 0
    assert found.loss < LinearTask().learner(0, 1).score() / 2
    found = simulate_async(replace(PLAN, policy=SelectionPolicy(receive=policy)), LinearTask())
    assert total(found, "declined") > 0
    assert total(found, "withheld") == 0


def test_messages_of_a_larger_model_fill_the_links():
    narrow = replace(
        PLAN, hub_up=25e6, hub_down=25e6, machines=[replace(each, up=25e6, down=25e6) for each in FOUR]
    )
    found = simulate_async(replace(narrow, parameters=20_000_000), LinearTask())
    own = simulate_async(narrow, LinearTask())
    assert own.hub_busy < 0.01
    assert found.hub_busy > 0.9
    assert found.updates < own.updates
    assert total(found, "skipped") > total(own, "skipped")


def test_fragments_are_sent_in_rotation():
    from paceline.tools.models.gpt_sizes import GptSize
    from paceline.tools.simulate.learning_tasks import GPTTask

    task = GPTTask(GptSize("small", 32, 64, 1, 2, vocabulary=256, context=32), batch=2, held_out=16)
    plan = AsyncPlan(machines=EQUAL[:2], steps=24, cadence=SyncSchedule(8, 2, 2))
    found = simulate_async(plan, task)
    whole = simulate_async(replace(plan, cadence=SyncSchedule(8, 1, 2)), task)
    assert found.updates > whole.updates
    assert math.isfinite(found.loss)


@pytest.mark.thorough
def test_a_thousand_workers_for_five_rounds():
    machine = SimulatedMachine(step_seconds=1.0, jitter=0.1, up=1e7, down=1e7)
    found = simulate_async(
        AsyncPlan(machines=[machine] * 1000, steps=20, cadence=SyncSchedule(4, 1, 1), compression=None),
        LinearTask(),
    )
    assert found.updates == total(found, "acknowledged")
    assert found.updates > 3500
    assert found.loss < LinearTask().learner(0, 1).score()


def test_invalid_plans_are_refused():
    with pytest.raises(UsageError, match="without workers"):
        AsyncPlan(machines=[], steps=1)
    with pytest.raises(UsageError, match="parameters=0"):
        replace(PLAN, parameters=0)
    with pytest.raises(UsageError, match="still running"):
        replace(PLAN, churn=(ChurnEvent(1.0, -1, True),))
